"""Patterns of ops that one or two CUDA kernels run.

A fusion is a matrix product with its prologue and epilogue:

prologue   ``norm``, two norms of the same rows, or ``take_rows`` and ``norm``; the normalized rows
           are also written if a later op reads them
epilogue   `HEADS`: QK-norm, ``rope``, ``append_kv``; `GATE`; `ACTIVATION`; `LATENT` (MLA): the norm
           of the latent vector, ``copy_heads`` of queries, ``rope``, ``append_kv``; `ROW_NORM`: a
           norm of the results and their sum with the residual; `ADD`: a scaled sum

or a mixture-of-experts layer, from its norm to the sum with the residual, in two kernels.

Patterns see the program only.  The binder (`nbflow.executor.bind_cuda_fused`) asks whether a kernel
supports the weights and rows of a step; unsupported fusions run op by op, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nbflow.program.records import Op, Program
from nbflow_kernels.activation.swigluoai import swigluoai_numbers

HEADS, LATENT, GATE, ACTIVATION = "heads", "latent", "gate", "activation"
ROW_NORM, ADD = "row norm", "add"


@dataclass(frozen=True)
class Fusion:
    """Consecutive ops that one kernel runs, by their index in the program."""

    first: int
    linear: int
    last: int
    take: int | None = None
    """``take_rows`` of the prologue."""
    norm: int | None = None
    """Norm of the prologue."""
    second: int | None = None
    """Second norm of the same rows, for a later product."""
    keeps_norm: bool = False
    """True if later ops read the rows of the first norm."""
    epilogue: str = ""
    """Kind of epilogue: `HEADS`, ..."""
    q_norm: int | None = None
    k_norm: int | None = None
    rope: int | None = None
    append: int | None = None
    row_norm: int | None = None
    add: int | None = None
    gate: int | None = None
    """Gate or activation."""
    latent_norm: int | None = None
    copy: int | None = None
    """``copy_heads`` of the queries."""


@dataclass(frozen=True)
class ExpertFusion:
    """Consecutive ops of a mixture-of-experts layer that two kernels run, by their index."""

    first: int
    router: int
    """Product with the router's weights."""
    experts: int
    last: int
    norm: int | None = None
    """Norm of the input."""
    keeps_norm: bool = False
    """True if later ops read its rows."""
    shared: tuple[int, int] | None = None
    """Products of the shared expert: gate and up, down."""
    scale_rows: int | None = None
    """Gate of the shared expert."""
    add: int | None = None
    """Sum with the residual."""


AnyFusion = Fusion | ExpertFusion


def find_fusions(program: Program) -> dict[int, tuple[AnyFusion, ...]]:
    """Return the fusions that begin at each op, the largest first."""
    finder = _Finder(program)
    found: dict[int, tuple[AnyFusion, ...]] = {}
    for i in range(len(program.ops)):
        found[i] = (*finder.expert_fusions(i), *finder.fusions(i))
    return {i: fusions for i, fusions in found.items() if fusions}


class _Finder:
    """Pattern matcher of one program."""

    def __init__(self, program: Program) -> None:
        self._program, self._ops = program, program.ops
        self._epilogues: tuple[Callable[[Fusion], Fusion | None], ...] = (
            self._heads, self._latent, self._gate, self._activation, self._row_norm,
            self._scaled_add,
        )  # fmt: skip

    def fusions(self, i: int) -> Iterator[Fusion]:
        """Yield the fusions of a matrix product that begin at an op."""
        start = self._prologue(i)
        if start is None:
            return
        for pattern in self._epilogues:
            whole = pattern(start)
            if whole is not None:
                yield whole
        if start.norm is not None:
            yield start

    def _op(self, i: int, kind: str) -> Op | None:
        """Return op `i` if it is of a kind."""
        return self._ops[i] if i < len(self._ops) and self._ops[i].kind == kind else None

    def _prologue(self, i: int) -> Fusion | None:
        """Match a prologue and its product at an op."""
        take = self._op(i, "take_rows")
        at = i if take is None else i + 1
        norm = self._op(at, "norm")
        if norm is None:
            is_product = take is None and self._op(i, "linear") is not None
            return Fusion(i, i, i) if is_product else None
        second = None if take is not None else self._second_norm(at)
        at_linear = at + 1 if second is None else at + 2
        linear = self._op(at_linear, "linear")
        if linear is None or linear.inputs != (norm.out,) or not self._normalizes_rows(norm):
            return None
        # the rows after the last layer are an output
        keeps = self._is_read(norm.out, at_linear + 1) or take is not None
        in_place = norm.inputs[0] == norm.out
        if take is not None and (
            not in_place or take.out != norm.out or take.inputs[0] == norm.out
        ):
            return None
        if take is None and in_place and keeps:  # all thread blocks read the norm's input
            return None
        return Fusion(
            i, at_linear, at_linear, take=None if take is None else i, norm=at, second=second,
            keeps_norm=keeps,
        )  # fmt: skip

    def _second_norm(self, i: int) -> int | None:
        """Return the index of a norm of the same rows that follows one."""
        norm, other = self._ops[i], self._op(i + 1, "norm")
        if other is None or not self._normalizes_rows(other):
            return None
        if other.out in (norm.out, norm.inputs[0]):
            return None
        return i + 1 if (norm.inputs, norm.attrs) == (other.inputs, other.attrs) else None

    @staticmethod
    def _normalizes_rows(norm: Op) -> bool:
        """Return True for a norm of whole rows that need no other rank."""
        partial = norm.attrs.get("per_head") or "columns" in norm.attrs
        return not partial and len(norm.inputs) == 1

    # ---- mixture of experts --------------------------------------------------------------------

    def expert_fusions(self, i: int) -> Iterator[ExpertFusion]:
        """Yield the mixture-of-experts fusions at an op: with the shared expert, then without."""
        norm = self._op(i, "norm")
        at = i if norm is None else i + 1
        router, experts = self._op(at, "linear"), self._op(at + 1, "experts")
        if router is None or experts is None or router.bias or router.attrs:
            return
        source = router.inputs[0]
        if experts.inputs != (source, router.out):
            return
        if norm is not None:
            in_place = norm.inputs[0] == norm.out  # all thread blocks read the norm's input
            if norm.out != source or in_place or not self._normalizes_rows(norm):
                return
        start = ExpertFusion(i, at, at + 1, at + 1, norm=None if norm is None else i)
        for found in (self._with_shared(start, source), start):
            if found is not None:
                whole = self._with_residual(found)
                keeps = norm is not None and self._is_read(source, whole.last + 1)
                yield replace(whole, keeps_norm=keeps)

    def _with_shared(self, start: ExpertFusion, source: str) -> ExpertFusion | None:
        """Extend a fusion by the shared expert, if it follows."""
        i, out = start.last + 1, self._ops[start.experts].out
        kinds = "linear", "gate", "linear"
        gate_up, gate, down = (self._op(i + n, kind) for n, kind in enumerate(kinds))
        if gate_up is None or gate is None or down is None:
            return None
        if gate_up.bias or down.bias or gate_up.attrs:
            return None
        same = gate.attrs["activation"] == self._ops[start.experts].attrs["activation"]
        if (gate_up.inputs, gate.inputs, down.inputs) != ((source,), (gate_up.out,), (gate.out,)):
            return None
        found = replace(start, shared=(i, i + 2), last=i + 2)
        if same and down.out == out and down.attrs == {"accumulate": True}:
            return found
        scale, add = self._op(i + 3, "scale_rows"), self._op(i + 4, "add")
        if not same or scale is None or add is None or down.attrs or add.attrs or add.out != out:
            return None
        if (scale.inputs, scale.out, add.inputs) != ((source,), down.out, (down.out,)):
            return None
        return replace(found, scale_rows=i + 3, last=i + 4)

    def _with_residual(self, found: ExpertFusion) -> ExpertFusion:
        """Extend a fusion by the sum with the residual, if it follows."""
        i, out = found.last + 1, self._ops[found.experts].out
        add = self._op(i, "add")
        if add is None or add.inputs != (out,) or self._is_read(out, i + 1):
            return found
        return replace(found, add=i, last=i)

    # ---- epilogues ----------------------------------------------------------------------------

    def _heads(self, start: Fusion) -> Fusion | None:
        linear, i = self._ops[start.linear], start.linear + 1
        offsets = [self._offset(name, linear.out) for name in "qkv"]
        if None in offsets or sorted(offsets) != offsets or linear.attrs:  # type: ignore[type-var]
            return None
        found = replace(start, epilogue=HEADS)
        for name in "qk":
            norm = self._op(i, "norm")
            if norm is not None and norm.out == name and self._is_rms(norm):
                found = replace(found, q_norm=i) if name == "q" else replace(found, k_norm=i)
                i += 1
        rope = self._op(i, "rope")
        if rope is not None and rope.inputs == ("q", "k") and not rope.attrs.get("first"):
            found, i = replace(found, rope=i), i + 1
        append = self._op(i, "append_kv")
        if append is None or append.inputs != ("k", "v") or not self._same_norms(found):
            return None
        return replace(found, append=i, last=i)

    @staticmethod
    def _is_rms(norm: Op) -> bool:
        one_weight = len(norm.weights) == 1 and not norm.attrs.get("own_weights")
        by_itself = len(norm.inputs) == 1 and one_weight
        return by_itself and norm.attrs["norm"] == "rms" and "columns" not in norm.attrs

    def _same_norms(self, found: Fusion) -> bool:
        """Return True if the norms of queries and keys differ in their weights only."""
        norms = [self._ops[i].attrs for i in (found.q_norm, found.k_norm) if i is not None]
        alone = len(norms) == 1 and not norms[0].get("per_head")
        return not alone and all(attrs == norms[0] for attrs in norms)

    def _offset(self, name: str, base: str) -> int | None:
        """Return the first column of a buffer within its base; None if that is another buffer."""
        buffer = self._program.buffers.get(name)
        return None if buffer is None or buffer.base != base else buffer.offset

    def _latent(self, start: Fusion) -> Fusion | None:
        linear, i = self._ops[start.linear], start.linear + 1
        kinds = "norm", "copy_heads", "rope", "append_kv"
        norm, copy, rope, append = (self._op(i + n, kind) for n, kind in enumerate(kinds))
        if norm is None or copy is None or rope is None or append is None or linear.attrs:
            return None
        (queries,), columns = copy.inputs, norm.attrs.get("columns")
        if queries != linear.out and self._offset(queries, linear.out) != 0:
            return None
        if norm.attrs["norm"] != "rms" or columns is None or rope.attrs.get("first") != columns:
            return None
        if (norm.inputs, append.inputs, rope.inputs) != (
            (norm.out,), (norm.out,), (copy.out, norm.out),
        ):  # fmt: skip
            return None
        return replace(
            start, epilogue=LATENT, latent_norm=i, copy=i + 1, rope=i + 2, append=i + 3, last=i + 3
        )

    def _gate(self, start: Fusion) -> Fusion | None:
        i = start.linear + 1
        gate = self._op(i, "gate")
        if gate is None or gate.inputs != (self._ops[start.linear].out,):
            return None
        if swigluoai_numbers(gate.attrs["activation"]) is not None:  # interleaves gate and up
            return None
        return replace(start, epilogue=GATE, gate=i, last=i)

    def _activation(self, start: Fusion) -> Fusion | None:
        i, product = start.linear + 1, self._ops[start.linear]
        op = self._op(i, "activation")
        if op is None or op.inputs != (product.out,) or product.attrs.get("accumulate"):
            return None
        if op.weights:  # numbers of the layer
            return None
        if op.out != product.out and self._is_read(product.out, i + 1):
            return None
        return replace(start, epilogue=ACTIVATION, gate=i, last=i)

    def _row_norm(self, start: Fusion) -> Fusion | None:
        i, product = start.linear + 1, self._ops[start.linear]
        norm = self._op(i, "norm")
        if norm is None or norm.inputs != (product.out,) or not self._normalizes_rows(norm):
            return None
        if norm.out != product.out:
            return None
        found = replace(start, epilogue=ROW_NORM, row_norm=i, last=i)
        add = self._op(i + 1, "add")
        if add is not None and add.inputs == (norm.out,) and not self._is_read(norm.out, i + 2):
            found = replace(found, add=i + 1, last=i + 1)
        return found

    def _scaled_add(self, start: Fusion) -> Fusion | None:
        i, product = start.linear + 1, self._ops[start.linear]
        add = self._op(i, "add")
        if add is None or add.inputs != (product.out,) or product.attrs.get("accumulate"):
            return None
        if self._is_read(product.out, i + 1):
            return None
        return replace(start, epilogue=ADD, add=i, last=i)

    def _is_read(self, name: str, start: int) -> bool:
        """Return True if an op from `start` on reads the present contents of a buffer."""
        for op in self._ops[start:]:
            reads = list(op.inputs)
            if op.attrs.get("accumulate") or op.kind in ("add", "all_reduce", "scale_rows"):
                reads.append(op.out)
            if any(self._overlap(name, other) for other in reads):
                return True
            writes_part = op.kind in ("copy_heads", "heads_linear")
            if not writes_part and op.out in (name, self._columns(name)[0]):
                return False
        return False

    def _overlap(self, name: str, other: str) -> bool:
        """Return True if two buffers share columns."""
        (base, start, end), (other_base, other_start, other_end) = map(self._columns, (name, other))
        return base == other_base and start < other_end and other_start < end

    def _columns(self, name: str) -> tuple[str, int, int]:
        """Return base, first column and end column of a buffer."""
        buffer = self._program.buffers.get(name)
        if buffer is None:
            return name, 0, 1
        return buffer.base or name, buffer.offset, buffer.offset + buffer.width
