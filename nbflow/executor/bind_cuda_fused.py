"""Bind fusions (`nbflow.executor.cuda_fusion`) to launches of fused GEMV kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbflow.executor.bind import Binder, PythonOp
from nbflow.executor.cuda_fusion import ACTIVATION, ADD, GATE, HEADS, LATENT, ROW_NORM, Fusion
from nbflow.executor.executor import Executor
from nbflow.kv_cache.storage import LAYOUT
from nbflow_kernels.cuda import device_of
from nbflow_kernels.quantized_matmul import cuda_fused


def bind_fused(binder: Binder, fusion: Fusion) -> PythonOp | None:
    """Return the launches of a fusion, one per matrix; None if no kernel supports it."""
    return _FusedBinder(binder, fusion).bind()


def norm_of(executor: Executor, index: int, out: Any) -> cuda_fused.Norm:
    """Return the kernel argument of a norm op; it writes the normalized rows to `out`, if given."""
    attrs = executor.program.ops[index].attrs
    weight, bias = (*executor.weights.operands[index], None, None)[:2]
    # the weights of a layer norm already contain its offset
    offset = attrs.get("offset", 0.0) if attrs["norm"] == "rms" else 0.0
    return cuda_fused.Norm(attrs["norm"], weight, bias, attrs["eps"], offset, out)


class _FusedBinder:
    """Binder of one fusion."""

    def __init__(self, binder: Binder, fusion: Fusion) -> None:
        self._binder, self._fusion = binder, fusion
        self._executor = binder.executor
        self._ops = self._executor.program.ops
        self._linear = self._ops[fusion.linear]
        self._weights = self._executor.weights
        self._matrices = self._weights.operands[fusion.linear]

    def bind(self) -> PythonOp | None:
        """See `bind_fused`."""
        fusion, out = self._fusion, self._out()
        x, rows = self._source()
        if len(x if rows is None else rows) != len(out):  # some hidden states need no logits
            return None
        device, activations = device_of(out), self._executor.activations
        if not all(cuda_fused.can_fuse(device, w, len(out), activations) for w in self._matrices):
            return None
        starts = [0]
        for weight in self._matrices:
            starts.append(starts[-1] + weight.shape[0])
        if not self._supports_matrices(starts):
            return None
        bias, added = self._weights.bias[fusion.linear], self._added()
        norm = self._norm()
        launches = []
        for weight, start, end in zip(self._matrices, starts, starts[1:], strict=False):
            weight_bias = None if bias is None else bias[start:end]
            epilogue = self._epilogue(start, end)
            launches.append((weight, weight_bias, out[:, start:end], norm, epilogue))
            if norm is not None:  # the first launch writes the normalized rows
                norm = replace(norm, out=None, second=None)

        def launch() -> None:
            for weight, weight_bias, columns, norm, epilogue in launches:
                cuda_fused.fused_gemv(
                    x, weight, weight_bias, columns, rows=rows, norm=norm, epilogue=epilogue,
                    added=added, activations=activations,
                )  # fmt: skip

        return PythonOp(self._linear.kind, launch, is_fixed=True)

    def _source(self) -> tuple[Any, Any]:
        """Return the input of the norm or product, and its row indices."""
        fusion, arrays = self._fusion, self._binder.arrays
        if fusion.take is not None:
            x = self._binder.view(self._ops[fusion.take].inputs[0])
            return x, arrays.logit_rows
        op = self._linear if fusion.norm is None else self._ops[fusion.norm]
        return self._binder.view(op.inputs[0]), None

    def _out(self) -> Any:
        """Return the output of the product."""
        fusion = self._fusion
        direct = {ACTIVATION: fusion.gate, ADD: fusion.add}.get(fusion.epilogue)
        return self._binder.view((self._linear if direct is None else self._ops[direct]).out)

    def _added(self) -> float:
        """Return the factor with which results are added to the output; 0 overwrites it."""
        if self._fusion.epilogue == ADD:
            assert self._fusion.add is not None
            return float(self._ops[self._fusion.add].attrs.get("scale", 1.0))
        return float(bool(self._linear.attrs.get("accumulate")))

    def _supports_matrices(self, starts: list[int]) -> bool:
        """Return True if the epilogue can run matrix by matrix."""
        if self._fusion.epilogue in ("", ACTIVATION, ADD):
            return True
        if self._fusion.epilogue != HEADS and len(self._matrices) == 1:
            return True
        if self._fusion.epilogue not in (HEADS, LATENT):
            return False
        program = self._executor.program
        D, keys_at = program.spec.head_dim, program.n_heads * program.spec.head_dim
        if self._fusion.epilogue == HEADS:
            heads = program.heads_of(self._layer())
            if heads.value_dim != heads.key_dim:
                return False
            D, keys_at = heads.key_dim, program.n_heads * heads.key_dim
        if self._fusion.epilogue == LATENT:  # one latent vector follows the queries
            return all(start % D == 0 and start <= keys_at for start in starts[:-1])
        if self._norms_all_heads():  # one matrix must hold all heads
            return set(starts) <= {0, keys_at, keys_at + program.n_kv_heads * D, starts[-1]}
        return all(start % D == 0 for start in starts)

    def _norms_all_heads(self) -> bool:
        """Return True if queries and keys are normalized over all heads together."""
        norms = [self._ops[i] for i in (self._fusion.q_norm, self._fusion.k_norm) if i is not None]
        return any(not norm.attrs.get("per_head") for norm in norms)

    def _norm(self) -> cuda_fused.Norm | None:
        """Return the norm before the product."""
        if self._fusion.norm is None:
            return None
        op = self._ops[self._fusion.norm]
        out = self._binder.view(op.out) if self._fusion.keeps_norm else None
        norm = norm_of(self._executor, self._fusion.norm, out)
        if self._fusion.second is None:
            return norm
        other = self._ops[self._fusion.second]
        weights = (*self._weights.operands[self._fusion.second], None, None)[:2]
        return replace(norm, second=(*weights, self._binder.view(other.out)))

    def _epilogue(self, first_row: int, end_row: int) -> cuda_fused.Epilogue:
        """Return the epilogue of the matrix that holds these rows."""
        fusion = self._fusion
        if fusion.epilogue == HEADS:
            return self._heads(first_row)
        if fusion.epilogue == LATENT:
            return self._latent(first_row, end_row)
        if fusion.epilogue == ROW_NORM:
            assert fusion.row_norm is not None
            add = None if fusion.add is None else self._ops[fusion.add]
            norm = self._ops[fusion.row_norm]
            out = self._binder.view((norm if add is None else add).out)
            added = 0.0 if add is None else add.attrs.get("scale", 1.0)
            return cuda_fused.NormEpilogue(norm_of(self._executor, fusion.row_norm, out), added)
        if fusion.epilogue in (GATE, ACTIVATION):
            assert fusion.gate is not None
            op = self._ops[fusion.gate]
            if fusion.epilogue == ACTIVATION:
                return cuda_fused.Activation(op.attrs["activation"])
            return cuda_fused.GateEpilogue(op.attrs["activation"], self._binder.view(op.out))
        return cuda_fused.NOTHING

    def _heads(self, first_row: int) -> cuda_fused.RopeKvAppendEpilogue:
        fusion, program, storage = self._fusion, self._executor.program, self._executor.storage
        keys, values = storage.layers[self._layer()]
        kinds = storage.kinds_of(self._layer())
        norms = [i for i in (fusion.q_norm, fusion.k_norm) if i is not None]
        attrs = self._ops[norms[0]].attrs if norms else {}
        q_weight, k_weight = (
            None if i is None else self._weights.operands[i][0]
            for i in (fusion.q_norm, fusion.k_norm)
        )
        return cuda_fused.RopeKvAppendEpilogue(
            self._places(), program.spec.head_dim, first_row // program.spec.head_dim,
            program.n_heads, program.n_kv_heads, keys, values, kinds, q_weight, k_weight,
            attrs.get("eps", 0.0), attrs.get("offset", 0.0), self._norms_all_heads(),
        )  # fmt: skip

    def _latent(self, first_row: int, end_row: int) -> cuda_fused.MlaEpilogue:
        fusion, storage = self._fusion, self._executor.storage
        assert fusion.latent_norm is not None
        assert fusion.copy is not None
        norm, copy = self._ops[fusion.latent_norm], self._ops[fusion.copy]
        D, n_heads = copy.attrs["head"], self._executor.program.n_heads
        latent = self._binder.view(norm.out)
        queries = self._binder.view(copy.out)
        queries = queries.reshape(len(queries), n_heads, -1)[:, min(first_row // D, n_heads - 1) :]
        buffer, first = self._executor.program.buffers[norm.out], None
        if buffer.base != self._linear.out:
            # a product before wrote it: the first launch continues with it
            first = None if first_row else -1
        elif first_row <= buffer.offset < end_row:
            first = buffer.offset - first_row
        weight = (*self._weights.operands[fusion.latent_norm], None)[0]
        pages, _ = storage.layers[self._layer()]
        kind, _ = storage.kinds_of(self._layer())
        return cuda_fused.MlaEpilogue(
            self._places(), D, max(0, min(end_row, n_heads * D) - first_row) // D,
            norm.attrs["columns"], queries, latent, first, pages, kind, weight,
            norm.attrs["eps"], norm.attrs.get("offset", 0.0),
        )  # fmt: skip

    def _layer(self) -> int:
        """Return the layer whose KV pages are written."""
        assert self._fusion.append is not None
        return self._ops[self._fusion.append].layer or 0

    def _places(self) -> cuda_fused.KvPlacement:
        """Return positions and KV pages of the step's tokens."""
        fusion, arrays = self._fusion, self._binder.arrays
        rope = None if fusion.rope is None else self._ops[fusion.rope].attrs["rope"]
        return cuda_fused.KvPlacement(
            arrays.positions, arrays.batch_indices, arrays.kv_indices, arrays.kv_indptr, LAYOUT,
            arrays.rope_rows, None if rope is None else self._executor.rope_table(rope),
            rope is None or rope.style == "half",
        )  # fmt: skip
