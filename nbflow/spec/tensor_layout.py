"""Location of our tensors in a checkpoint: under their own names, or as part of fused tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbflow.spec.architecture import Architecture
from nbflow.spec.tensor_names import FUSED, LATENT_MATRICES

Span = tuple[int, int]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of the checkpoint, or a part of it.

    All leading dimensions of the checkpoint's tensor count as rows: expert j of a tensor
    (experts, F, E) is its rows j*F to (j+1)*F.
    """

    name: str
    """The checkpoint's name."""
    shape: tuple[int, ...]
    """Shape the checkpoint's tensor must have."""
    rows: tuple[Span, ...] | None = None
    """Rows of the checkpoint's tensor in our matrix, in order; None for all."""
    transposed: bool = False
    """Stored (in, out): our rows are its columns."""
    columns: slice | None = None
    """Columns of the checkpoint's tensor in our matrix; None for all."""
    step: int = 1
    """Stride of our rows in its rows, or in its columns if it is transposed."""
    base: int = 0
    """First row of our matrix, if it is transposed."""
    head_rows: int = 0
    """Rows of each head that are the columns of its matrix (transposed per head); 0 if not."""

    def cut(self, rows: Span) -> tuple[Span, ...]:
        """Return the checkpoint's rows of our rows [start, stop)."""
        if self.rows is None:
            return (rows,)
        if self.step > 1:
            first = self.rows[0][0]
            return ((first + rows[0] * self.step, first + (rows[1] - 1) * self.step + 1),)
        spans = []
        done = 0
        for first, end in self.rows:
            start, stop = max(rows[0] - done, 0), min(rows[1] - done, end - first)
            if start < stop:
                spans.append((first + start, first + stop))
            done += end - first
        return tuple(spans)


def find_layout(
    spec: Architecture, shapes: Mapping[str, tuple[int, ...]], name: str
) -> TensorLayout:
    """Return the location of one of our tensors (``layers.3.attn.q.weight``)."""
    parts = name.split(".")
    if parts[0] == "streams":
        return _stream_matrix(spec, parts[1], parts[2], shapes[name])
    if parts[0] != "layers":
        return TensorLayout(spec.tensors[name], shapes[name])
    layer, inner, our_shape = parts[1], ".".join(parts[2:]), shapes[name]
    if parts[2] == "moe" and parts[-1] == "bias":
        return _expert_bias(spec, layer, parts[3], our_shape)
    if parts[2] == "moe":
        return _expert(spec, layer, parts[3], ".".join(parts[4:]), our_shape)
    if parts[3:4] in (["q_norm"], ["k_norm"]) and len(parts) == 6:
        return _head_norm(spec, layer, parts[3], parts[4], our_shape)
    whole = inner.rpartition(".")[0]
    pattern = spec.tensors.get(f"layers.{{i}}.{inner}")
    if whole in LATENT_MATRICES:
        return _head_part(spec, layer, whole, our_shape)
    transposed = spec.transposed and len(our_shape) == 2
    if whole == "attn.gate" and spec.output_gate_by_head and pattern is not None:
        return _gate_by_head(spec, pattern.replace("{i}", layer), our_shape)
    if pattern is not None and "{i}" not in pattern:  # a vector with numbers of each layer
        row = int(layer)
        return TensorLayout(pattern, (spec.n_layers, *our_shape), ((row, row + 1),))
    if pattern is not None:
        return TensorLayout(
            pattern.replace("{i}", layer),
            our_shape[::-1] if transposed else our_shape,
            transposed=transposed,
        )
    return _fused_part(spec, shapes, name, transposed)


def _fused_part(
    spec: Architecture, shapes: Mapping[str, tuple[int, ...]], name: str, transposed: bool
) -> TensorLayout:
    """Locate a matrix or bias of a layer in a tensor that has those of several."""
    _, layer, inner = name.split(".", 2)
    whole, kind = inner.rsplit(".", 1)
    for fused, members in FUSED.items():
        if fused == "attn.qkv" and spec.qkv_order == "qvk":
            members = (members[0], members[2], members[1])
        pattern = spec.tensors.get(f"layers.{{i}}.{fused}.{kind}")
        if whole not in members or pattern is None:
            continue
        copies = [_key_copies(spec, fused, m) for m in members]
        sizes = [
            shapes[f"layers.{layer}.{m}.weight"][0] // n
            for m, n in zip(members, copies, strict=True)
        ]
        part = members.index(whole)
        rows = _fused_rows(spec, fused, part, sizes) * copies[part]
        shape = (sum(sizes), *shapes[name][1:])
        shape = shape[::-1] if transposed else shape
        return TensorLayout(pattern.replace("{i}", layer), shape, rows, transposed)
    raise KeyError(name)


def _stream_matrix(spec: Architecture, name: str, j: str, shape: tuple[int, ...]) -> TensorLayout:
    """Locate the projection of a further stream, stored separately or for all of them."""
    pattern = spec.tensors[f"streams.{name}.{{j}}.weight"]
    if "{j}" in pattern:
        return TensorLayout(pattern.replace("{j}", j), shape)
    n, first = shape[0], int(j) * shape[0]
    return TensorLayout(pattern, (spec.streams - 1, *shape), ((first, first + n),))


def _fused_rows(spec: Architecture, fused: str, part: int, sizes: list[int]) -> tuple[Span, ...]:
    """Return the rows of one member of a fused matrix."""
    G = _fused_groups(spec, fused)
    if G == 1:
        start = sum(sizes[:part])
        return ((start, start + sizes[part]),)
    each = [size // G for size in sizes]
    starts = [g * sum(each) + sum(each[:part]) for g in range(G)]
    return tuple((start, start + each[part]) for start in starts)


def _key_copies(spec: Architecture, fused: str, member: str) -> int:
    """Return how often the stored rows of a member of a fused matrix come in ours."""
    of_keys = member in ("delta.q", "delta.k", "delta.q_conv", "delta.k_conv")
    if spec.delta is None or not of_keys or fused not in ("delta.qkv", "delta.conv"):
        return 1
    return spec.delta.key_copies


def _fused_groups(spec: Architecture, fused: str) -> int:
    """Return the number of groups of rows, each with the rows of every member."""
    if fused == "attn.qkv" and spec.qkv_layout == "groups":
        return spec.qkv_groups or spec.n_kv_heads
    if fused in ("attn.q_gate", "lightning.qkv"):
        return spec.n_heads
    if fused in ("delta.qkvz", "delta.ba"):
        assert spec.delta is not None
        return spec.delta.key_heads
    return 1


def _gate_by_head(spec: Architecture, name: str, shape: tuple[int, ...]) -> TensorLayout:
    """Locate a gate with a row for each head, which our matrix holds for each of its columns."""
    columns = shape[0] // spec.n_heads
    rows = tuple((h, h + 1) for h in range(spec.n_heads) for _ in range(columns))
    return TensorLayout(name, (spec.n_heads, *shape[1:]), rows)


def _head_norm(
    spec: Architecture, layer: str, norm: str, j: str, shape: tuple[int, ...]
) -> TensorLayout:
    """Locate the norm of one head's queries or keys, stored separately or for all heads."""
    pattern = spec.tensors[f"layers.{{i}}.attn.{norm}.{{j}}.weight"].replace("{i}", layer)
    if "{j}" in pattern:
        return TensorLayout(pattern.replace("{j}", j), shape)
    n_heads = spec.n_heads if norm == "q_norm" else spec.n_kv_heads
    return TensorLayout(pattern, (n_heads, *shape), ((int(j), int(j) + 1),))


def _head_part(spec: Architecture, layer: str, whole: str, shape: tuple[int, ...]) -> TensorLayout:
    """Locate the up projections of latent attention, stored separately or fused by head.

    In attn.kv_b the rows of a head are those of its keys without rotation, then those of its
    values; the former are transposed per head, because ours map the query to the latent.
    """
    H, latent = spec.n_heads, spec.latent
    assert latent is not None
    pattern = spec.tensors.get(f"layers.{{i}}.{whole}.weight")
    if pattern is not None:
        by_head = (H, shape[0] // H, shape[1])
        return TensorLayout(pattern.replace("{i}", layer), by_head, ((0, shape[0]),))
    pattern = spec.tensors["layers.{i}.attn.kv_b.weight"]
    n_k, n_v = spec.head_dim - spec.rope.dim, latent.value_dim
    first, n = (0, n_k) if whole == "attn.k_b" else (n_k, n_v)
    starts = [h * (n_k + n_v) + first for h in range(H)]
    return TensorLayout(
        pattern.replace("{i}", layer),
        (H * (n_k + n_v), latent.kv_rank),
        tuple((start, start + n) for start in starts),
        head_rows=n_k if whole == "attn.k_b" else 0,
    )


def _expert(
    spec: Architecture, layer: str, j: str, inner: str, shape: tuple[int, ...]
) -> TensorLayout:
    """Locate a matrix of one expert: stored separately, fused with its gate, or for all experts."""
    assert spec.moe is not None
    n = n_stored = shape[0]
    first, step = 0, 1
    pattern = spec.tensors.get(f"layers.{{i}}.moe.{{j}}.{inner}")
    if pattern is None:
        if inner == "down.weight":
            raise KeyError(inner)
        pattern = spec.tensors["layers.{i}.moe.{j}.gate_up.weight"]
        n_stored, is_up = 2 * n, inner == "up.weight"
        if spec.gate_up_layout == "neighbours":
            first, step = int(is_up), 2
        else:
            first = n if is_up else 0
    pattern = pattern.replace("{i}", layer)
    end = first + (n - 1) * step + 1
    if "{j}" in pattern:
        rows = ((first, end),) if n_stored > n else None
        return TensorLayout(pattern.replace("{j}", j), (n_stored, shape[1]), rows, step=step)
    if spec.experts_transposed or (spec.experts_down_transposed and inner == "down.weight"):
        whole = (spec.moe.n_experts, shape[1], n_stored)
        base = int(j) * shape[1]
        return TensorLayout(pattern, whole, ((first, end),), transposed=True, step=step, base=base)
    start = int(j) * n_stored
    whole = (spec.moe.n_experts, n_stored, shape[1])
    return TensorLayout(pattern, whole, ((start + first, start + end),), step=step)


def _expert_bias(spec: Architecture, layer: str, part: str, shape: tuple[int, ...]) -> TensorLayout:
    """Locate the biases of all experts: stored separately, or gate and up fused."""
    assert spec.moe is not None
    pattern = spec.tensors.get(f"layers.{{i}}.moe.{part}.bias")
    if pattern is not None:
        return TensorLayout(pattern.replace("{i}", layer), shape)
    if part == "down":
        raise KeyError(part)
    pattern = spec.tensors["layers.{i}.moe.gate_up.bias"]
    n, is_up = shape[1], int(part == "up")
    in_turn = spec.gate_up_layout == "neighbours"
    columns = slice(is_up, None, 2) if in_turn else slice(is_up * n, (is_up + 1) * n)
    return TensorLayout(pattern.replace("{i}", layer), (shape[0], 2 * n), columns=columns)
