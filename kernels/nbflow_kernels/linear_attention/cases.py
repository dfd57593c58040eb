"""Test and benchmark cases of linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbflow_kernels.op_case import OpCase
from nbflow_kernels.state_format import decode_state, encode_state
from nbflow_kernels.state_space.cases import batch, tolerances

# A decay exp(-slope) is off by 6e-8 and a sum rounded by 6e-8, 1e-7 together; with slopes from 0.1
# on, about 10 terms k v through 10 decays each count: 10 * sqrt(10) * 1e-7 = 3e-6 of a term of
# N(0, 1) numbers; results are sums of D products with N(0, 1 / D) queries.  The largest of
# thousands is 4 of their size.
_ATOL, _RTOL = 1.2e-5, 2e-6
_REASON = "10 terms through 10 decays and sums off by 1e-7 each; the largest result is 4 terms"


def _case(
    name: str, lengths: Sequence[int], H: int, D: int, *, dtype: str = "float32",
    timed: bool = False, **options: Any,
) -> OpCase:  # fmt: skip
    """Return a case; q, k and v are columns of one matrix."""
    T, B = sum(lengths), len(lengths)

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        wide = rng.standard_normal((T, 3 * H * D), dtype=np.float32)
        wide[:, : H * D] /= np.float32(D**0.5)
        q, k, v = (part.reshape(T, H, D) for part in np.split(wide, 3, axis=1))
        return {
            "q": q, "k": k, "v": v,
            "slopes": rng.uniform(0.1, 1.0, H).astype(np.float32),
            "state": encode_state(rng.standard_normal((B + 2, H, D, D), dtype=np.float32), dtype),
            **batch(lengths, B + 2, rng), **options,
        }  # fmt: skip

    return OpCase(
        "lightning_attention", name, inputs, *tolerances(_RTOL, _ATOL, _REASON, dtype),
        n_bytes=4 * (2 * B * H * D * D + 4 * T * H * D), n_flops=5 * T * H * D * D,
        out=((T, H, D), "float32"), mutates=("state",), timed=timed, arithmetic="f32",
        decoded={"state": lambda stored: decode_state(stored, D)},
    )  # fmt: skip


CASES: list[OpCase] = [
    _case("steps", (3, 1, 0, 2), 3, 20),
    _case("chunks_and_steps", (66, 33), 2, 18, scale=0.5),
    _case("whole_vectors", (32, 1), 2, 32),
    _case("half", (33, 1), 2, 18, dtype="float16"),
    _case("bfloat16", (2, 1), 1, 20, dtype="uint16"),
    _case("q8_0", (34, 1), 1, 40, dtype="uint8"),
    _case("no_tokens", (0,), 2, 16),
    _case("minimax_text_01_decode", (1,), 64, 128, timed=True),
    _case("minimax_text_01_steps_31", (31,), 64, 128, timed=True),
    _case("minimax_text_01_prefill_256", (256,), 64, 128, timed=True),
]
"""Every case of the family; see `nbflow_kernels.op_case.OpCase`."""
