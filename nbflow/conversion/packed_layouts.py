"""Write matrices in a grouped format as GPTQ, AWQ or compressed-tensors store them.

``--to gptq`` is ``gptq:int4_g128``: a layout, and the grouped format of the matrices.  The folder's
config.json gets the `quantization_config` by which vLLM and transformers know it.
`nbflow.checkpoint.grouped_tensors` describes the tensors, and reads them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.writers.tensor_plan import TensorPlan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.grouped import GroupFormat

DEFAULTS = {"gptq": "int4_g128", "awq": "uint4_g128", "compressed-tensors": "int4_g128"}
"""Layouts, and the format of the matrices if none is named."""
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,), "compressed-tensors": (2, 3, 4, 8)}
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_WORD = 32


@dataclass(frozen=True)
class PackedLayout:
    """Layout of another quantizer's checkpoints, and the format of the matrices."""

    name: str
    format: GroupFormat

    def config(self, unchanged: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config`; `unchanged` are modules that stay floats."""
        bits, size = self.format.code_bits, self.format.block_size
        if self.name == "gptq":
            return {
                "quant_method": "gptq",
                "bits": bits,
                "group_size": size,
                "sym": not self.format.has_zeros,
                "desc_act": False,
                # the first version cannot hold a zero point of 0
                "checkpoint_format": "gptq_v2" if self.format.has_zeros else "gptq",
            }
        if self.name == "awq":
            return {
                "quant_method": "awq",
                "bits": bits,
                "group_size": size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": list(unchanged),
            }
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": not self.format.has_zeros,
            "strategy": "group",
            "group_size": size,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": list(unchanged),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }

    def plans(self, plans: Sequence[TensorPlan]) -> list[TensorPlan]:
        """Replace each matrix in the format by its tensors in the layout."""
        found: list[TensorPlan] = []
        for plan in plans:
            found += self._tensors(plan) if plan.format == self.format.name else [plan]
        return found

    def unchanged(self, plans: Sequence[TensorPlan]) -> list[str]:
        """Return the modules of matrices that are not in the format, a tied head included.

        Raises
        ------
        UsageError
            If a matrix of a layer is among them, which GPTQ's configuration cannot say, or a
            matrix cannot be stored in the layout.
        """
        packed = [plan for plan in plans if plan.format == self.format.name]
        for plan in packed:
            self._check(plan)
        others = []
        for plan in plans:
            if plan in packed:
                continue
            if len(plan.shape) == 2 and plan.name.endswith(".weight"):
                others.append(plan.name.removesuffix(".weight"))
        in_layers = [name for name in others if ".layers." in name or ".h." in name]
        if in_layers and self.name == "gptq":
            raise UsageError(
                f"{in_layers[0]} is not in {self.format.name}: a GPTQ checkpoint has all matrices "
                "of layers in one format; leave out --rule, or write nbflow's own layout"
            )
        if not any(plan.name == "lm_head.weight" for plan in plans):
            others.append("lm_head")
        return others

    def _check(self, plan: TensorPlan) -> None:
        """Raise unless a matrix can be stored in the layout."""
        n_rows, n_columns = plan.shape if len(plan.shape) == 2 else (0, 0)
        multiple = 8 if self.name == "awq" else _WORD
        if not n_rows or not plan.name.endswith(".weight"):
            raise UsageError(
                f"tensor {plan.name} of shape {plan.shape} is not the matrix of one module, as "
                f"{self.name} stores; write nbflow's own layout (--to {self.format.name})"
            )
        if n_rows % multiple or n_columns % max(multiple, self.format.block_size):
            raise UsageError(
                f"tensor {plan.name} of shape {plan.shape}: {self.name} needs rows in multiples of "
                f"{multiple} and columns in multiples of {max(multiple, self.format.block_size)}; "
                "choose a smaller group"
            )

    def _tensors(self, plan: TensorPlan) -> list[TensorPlan]:
        """Return the tensors of a matrix; they are packed together when the first is written."""
        held: dict[str, NDArray[Any]] = {}

        def chunks(name: str) -> Iterator[bytes]:
            if not held:
                held.update(self._packed(plan))
            yield held.pop(name).tobytes()

        stem = plan.name.removesuffix("weight")
        return [
            TensorPlan(stem + name, shape, dtype, lambda name=name: chunks(name))  # type: ignore[misc]
            for name, (shape, dtype) in self._shapes(plan.shape).items()
        ]

    def _shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and type of each tensor of a matrix."""
        (n, k), bits = shape, self.format.code_bits
        groups, words = k // self.format.block_size, (n * bits // _WORD, k * bits // _WORD)
        if self.name == "compressed-tensors":
            zero = {"weight_zero_point": ((words[0], groups), "i32")}
            return {
                "weight_packed": ((n, words[1]), "i32"),
                "weight_scale": ((n, groups), "f16"),
                **(zero if self.format.has_zeros else {}),
                "weight_shape": ((2,), "i64"),
            }
        found = {
            "qweight": ((words[1], n) if self.name == "gptq" else (k, words[0]), "i32"),
            "qzeros": ((groups, words[0]), "i32"),
            "scales": ((groups, n), "f16"),
        }
        return found | ({"g_idx": ((k,), "i32")} if self.name == "gptq" else {})

    def _packed(self, plan: TensorPlan) -> dict[str, NDArray[Any]]:
        """Return the tensors of a matrix."""
        (n, k), format, bits = plan.shape, self.format, self.format.code_bits
        data = np.frombuffer(b"".join(plan.chunks()), np.uint8).reshape(n, -1)
        codes = format.integers(data).codes
        blocks = data.reshape(-1, format.block_bytes)
        scales = format.scales(blocks).astype("<f2").reshape(n, -1)
        zeros = format.zeros(blocks).reshape(n, -1)
        if self.name == "compressed-tensors":
            return {
                "weight_packed": pack_words(codes, bits),
                "weight_scale": scales,
                "weight_zero_point": pack_words(zeros.T, bits).T,
                "weight_shape": np.array([n, k], "<i8"),
            }
        if self.name == "awq":
            words = pack_words(_awq_order(codes.T), bits), pack_words(_awq_order(zeros.T), bits)
            return {"qweight": words[0], "qzeros": words[1], "scales": scales.T}
        if not format.has_zeros:  # the first version stores zero points less 1
            zeros = zeros - np.uint8(1)
        return {
            "qweight": pack_words(codes, bits).T,
            "qzeros": pack_words(zeros.T, bits),
            "scales": scales.T,
            "g_idx": (np.arange(k) // format.block_size).astype("<i4"),
        }


def parse_layout(to: str) -> PackedLayout | None:
    """Return the layout that ``--to`` names, with its format, or None.

    Examples
    --------
    >>> parse_layout("gptq:uint4_g64").format
    <GroupFormat uint4_g64: 4.375 bits per weight>
    >>> parse_layout("q4_k") is None
    True
    """
    name, _, stated = to.partition(":")
    if name.lower() not in DEFAULTS:
        return None
    name = name.lower()
    format = FORMATS[stated or DEFAULTS[name]]
    fits = isinstance(format, GroupFormat) and format.scale_type == "f16" and not format.has_base
    if not isinstance(format, GroupFormat) or not fits or format.code_bits not in _BITS[name]:
        raise UsageError(
            f"{to}: {name} stores grouped formats with float16 scales of "
            f"{' or '.join(map(str, _BITS[name]))} bits, such as {DEFAULTS[name]}, got "
            f"{format.name}"
        )
    if name == "awq" and not format.has_zeros:
        raise UsageError(f"{to}: awq stores zero points; use u{format.name}")
    return PackedLayout(name, format)


def pack_words(numbers: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack rows of numbers (n, m) into 32-bit words (n, m * bits / 32), lowest bits first.

    Examples
    --------
    >>> import numpy as np
    >>> hex(pack_words(np.arange(8, dtype=np.uint8)[None], 4)[0, 0])
    '0x76543210'
    """
    data = np.ascontiguousarray(numbers, np.uint8)
    if bits < 8:
        single = np.unpackbits(data[..., None], axis=2, count=bits, bitorder="little")
        data = np.packbits(single.reshape(len(data), -1), axis=1, bitorder="little")
    assert data.shape[1] == math.ceil(numbers.shape[1] * bits / 8)
    words: NDArray[np.int32] = data.view("<i4")
    return words


def _awq_order(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return numbers (n, 8 m) in AWQ's order of a word."""
    words = numbers.reshape(len(numbers), -1, 8)[..., _AWQ_ORDER]
    return words.reshape(numbers.shape)
