"""The gated delta rule on the CPU: chunks of tokens, 16 columns of the state in a vector.

With a_t = exp(g_t) and c_t the product of the decays of a chunk up to token t, both for each of
the Dk rows of the state, a chunk of n tokens that begins with the state S is

    L[t, s] = k_t . (c_t / c_s k_s)    for s < t        A[t, s] = q_t . (c_t / c_s k_s)  for s <= t
    u_t = beta_t (v_t - S^T (c_t k_t) - sum_s L[t, s] u_s)
    o_t = S^T (c_t q_t) + sum_s A[t, s] u_s
    S <- c_n S + sum_s (c_n / c_s k_s) u_s^T

(`c_t k_t` etc. row by row; `loops.chunk`).  This is the WY form, its triangular system solved by
substitution.  The ratios c_t / c_s are products of decays, so that a quotient of vanishing numbers
never occurs: one for each channel multiplies the keys, one for the whole head the dot products and
the sums (`cpu_chunk`).

Of n tokens, S^T is multiplied with 2 n vectors and S is read and written once: with n = 8
(`cpu_chunk`) these are products of matrices in register tiles; with n = 1 (`cpu_steps`) they are
four operations per number, and the state is read and written for each token.  The columns of the
state are independent but for the dot products: threads divide heads and columns, which leaves all
bits alone.

A chunk takes, per number of a state of 128 x 128 and token, 3 multiply-adds in the products, 0.13
multiplications for the decay, 0.09 in the substitution and 0.07 (two heads per key) to 0.22 (a
decay for each channel) to prepare keys and queries: 3.3 to 3.4, one vector of 16 per cycle on a Zen
4.  A step takes 4, but it waits for loads and stores: if it did not, chunks would save a fifth.

A single token works in the caller's state (`direct`).  For more tokens, other formats and ragged
sizes the columns are copied: strips of 16, the rows of a strip contiguous.  Another format than
float32 is rounded to after each chunk and each step, so that the roundings, too, do not depend on
the division into calls.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import get_num_threads, hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, allocate, read_i32, release, write_f32
from nbflow_kernels.delta_rule.cpu_chunk import BLOCK, CHUNK, chunks, record_bytes
from nbflow_kernels.delta_rule.cpu_state import copy_from_strips, copy_to_strips
from nbflow_kernels.delta_rule.cpu_steps import GROUPS, steps
from nbflow_kernels.state_format import F32, KINDS
from nbflow_kernels.state_format.cpu import row_bytes

_PARTS_PER_THREAD = 4  # heads or parts of heads; more of them are divided more evenly


def gated_delta_rule(
    q, k, v, g, beta, state, indptr, state_indices, start_positions, scale, normalize_qk, chunked,
    out
):  # fmt: skip
    """See `nbflow_kernels.gated_delta_rule`."""
    hold(q, k, v, g, beta, state, indptr, state_indices, start_positions, out)
    T, Hk, Dk = q.shape
    _, Hv, Dv = v.shape
    per_channel = int(g.ndim == 3)
    heads, n_parts, columns = divide(Hk, Hv, Dv, chunked and not per_channel and T >= CHUNK)
    rows = [(address_of(a), a.strides[0]) if T else (0, 0) for a in (q, k, v, g, beta, out)]
    parallel_for(
        _gated_delta_rule, Hv // heads * n_parts, 4.0 * T * Hv * Dk * Dv,
        *rows[0], *rows[1], *rows[2], *rows[3], per_channel, *rows[4],
        address_of(state), KINDS[state.dtype.name], address_of(indptr), address_of(state_indices),
        0 if start_positions is None else address_of(start_positions), *rows[5],
        len(state_indices), Hk, Hv, Dk, Dv, heads, n_parts, columns, scale, normalize_qk, chunked,
    )  # fmt: skip


def divide(Hk, Hv, Dv, share):
    """Return heads of a part, parts of their columns, and columns of a part.

    Heads of one key go together if they may `share` its dot products and there are enough keys.
    """
    wanted = _PARTS_PER_THREAD * get_num_threads()
    heads = Hv // Hk if share and Hk >= wanted else 1
    step = 16 * GROUPS
    columns = _ceil_div(_ceil_div(Dv, _ceil_div(wanted * heads, Hv)), step) * step
    return heads, _ceil_div(Dv, columns), columns


def _ceil_div(a, b):
    return -(-a // b)


@jit.kernel
def _gated_delta_rule(
    q, q_bytes, k, k_bytes, v, v_bytes, g, g_bytes, per_channel, beta, beta_bytes, state, kind,
    indptr, state_indices, positions, out, out_bytes, B, Hk, Hv, Dk, Dv, heads, n_parts, columns,
    scale, normalize, chunked, start, stop
):  # fmt: skip
    """Compute parts [start, stop) of the columns of `heads` heads of one key, for all sequences."""
    n_bytes = -(-Dk // 16) * 64
    n_strips = -(-min(columns, Dv) // (16 * GROUPS)) * GROUPS
    size, head_strips = Dk * row_bytes(kind, Dv), n_strips * 16 * n_bytes
    records_size, scratch_size = BLOCK * record_bytes(per_channel, Dk), max(8 * n_bytes, 2048)
    records = allocate(records_size + 2048 + 128 + scratch_size + heads * head_strips)
    u = records + records_size
    units = u + 2048
    scratch = units + 128
    strips = scratch + scratch_size
    simd.store_f32(units, simd.splat(0.0))
    simd.store_f32(units + 64, simd.splat(0.0))
    write_f32(units + 60, np.float32(1.0))
    write_f32(units + 92, np.float32(1.0))
    units += 60
    factor, g_step = np.float32(scale), 4 * (Dk if per_channel else 1)
    for part in range(start, stop):
        h, first = part // n_parts * heads, part % n_parts * columns
        width = min(columns, Dv - first)
        head = h // (Hv // Hk)
        for b in range(B):
            begin, end = read_i32(indptr + 4 * b), read_i32(indptr + 4 * b + 4)
            if begin >= end:
                continue
            stored = state + (read_i32(state_indices + 4 * b) * Hv + h) * size
            direct = kind == F32 and end - begin == 1 and width % (16 * GROUPS) == 0 and Dk % 4 == 0
            S, strip_bytes, strip_row, next_S = strips, 16 * n_bytes, 64, head_strips
            if direct:
                S, strip_bytes, strip_row, next_S = stored + 4 * first, 64, 4 * Dv, size
            position = 0 if positions == 0 else read_i32(positions + 4 * b)
            is_loaded, t = direct or kind != F32, begin
            while t < end:
                n = min(end - t, CHUNK - (position + t - begin) % CHUNK)
                q_at, k_at = q + t * q_bytes + 4 * head * Dk, k + t * k_bytes + 4 * head * Dk
                g_at = g + t * g_bytes + h * g_step
                beta_at = beta + t * beta_bytes + 4 * h
                v_at = v + t * v_bytes + 4 * (h * Dv + first)
                out_at = out + t * out_bytes + 4 * (h * Dv + first)
                if chunked and n == CHUNK:
                    n_chunks = min((end - t) // CHUNK, BLOCK)
                    is_last = t + n_chunks * CHUNK == end
                    ahead, heads_ahead = BLOCK * CHUNK, 0
                    if is_last and B == 1 and n_parts == 1 and part + 1 < stop:
                        ahead, heads_ahead = -t, heads
                    keys_ahead = (h + heads_ahead) // (Hv // Hk) - head
                    chunks(
                        n_chunks, heads, S, strip_bytes, next_S, stored, kind, size, first, width,
                        Dk, Dv, q_at, q_bytes, k_at, k_bytes, g_at, g_bytes, per_channel, beta_at,
                        beta_bytes, v_at, v_bytes, out_at, out_bytes, factor, normalize,
                        not is_loaded, is_last, ahead, heads_ahead, keys_ahead, records, units, u,
                        scratch,
                    )  # fmt: skip
                    is_loaded = True
                    t += n_chunks * CHUNK
                    continue
                for i in range(heads):
                    at, head_S, head_stored = 4 * i * Dv, S + i * next_S, stored + i * size
                    if not is_loaded:
                        copy_to_strips(
                            head_stored, kind, Dk, Dv, first, width, n_strips, head_S, scratch
                        )
                    steps(
                        n, head_S, strip_bytes, strip_row, head_stored, kind, first,
                        width, Dk, Dv, q_at, q_bytes, k_at, k_bytes, g_at + i * g_step, g_bytes,
                        per_channel, beta_at + 4 * i, beta_bytes, v_at + at, v_bytes, out_at + at,
                        out_bytes, factor, normalize, records, scratch, u,
                    )  # fmt: skip
                    if t + n == end and kind == F32 and not direct:
                        copy_from_strips(head_S, kind, Dk, Dv, first, width, head_stored, scratch)
                is_loaded = True
                t += n
    release(records)
