"""What goes into a GGUF file: from a GGUF file as it is, from any other checkpoint renamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.readers import gguf
from nbflow.checkpoint.writers.gguf import U32, check_types
from nbflow.conversion.gguf_metadata import model_metadata
from nbflow.conversion.gguf_names import check_reading, divisors_of, plan_renamed, target_family
from nbflow.conversion.gguf_vocabulary import vocabulary
from nbflow.conversion.plan import FormatRules, TensorPlan, check_blocks, plan_as_stored
from nbflow.spec.resolve import ResolvedModel

_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 11, "q4_k": 14, "q5_k": 16, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23,
    "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26, "iq2_s": 28, "iq4_xs": 30, "iq1_m": 31, "bf16": 32,
    "tq1_0": 36, "tq2_0": 37,
}  # fmt: skip
"""``general.file_type`` of files that are mostly of one type.

https://github.com/ggml-org/llama.cpp/blob/b6000/include/llama.h (llama_ftype)
"""
_QUANTIZATION_VERSION = 2  # of the block layouts

Plan = tuple[dict[str, Any], list[TensorPlan], list[str]]


def plan_gguf(resolved: ResolvedModel, file: WeightFile, choice: FormatRules, where: str) -> Plan:
    """Return metadata, tensors and notes of the file that is to be written."""
    if file.format == gguf.FORMAT:
        source = file.files()[0]
        metadata: dict[str, Any] = {
            key: value
            for key, value in gguf.read_typed_metadata(source).items()
            if not key.startswith("split.")
        }
        tensors = plan_as_stored(resolved.spec, file, choice)
        notes: list[str] = []
    else:
        metadata, tensors, notes = _from_model(resolved, file, choice, where)
    check_types(tensors)
    check_blocks(tensors)
    metadata.pop("general.file_type", None)
    if choice.to in _FILE_TYPES:
        metadata["general.file_type"] = ((U32,), _FILE_TYPES[choice.to])
    if any(tensor.format not in ITEM_BYTES for tensor in tensors):
        metadata["general.quantization_version"] = ((U32,), _QUANTIZATION_VERSION)
    return metadata, tensors, notes


def _from_model(resolved: ResolvedModel, file: WeightFile, choice: FormatRules, where: str) -> Plan:
    """Return the plan for a checkpoint that is no GGUF file."""
    spec = resolved.spec
    arch, family = target_family(spec)
    tensors = plan_renamed(spec, file, family, arch, choice)
    for ours, divisors in divisors_of(spec).items():
        name = family.tensors.get(ours, (ours,))[0]
        tensors.append(TensorPlan(name, divisors.shape, "f32", "f32", (ArrayRows(divisors),)))
    metadata = model_metadata(spec, arch)
    check_reading(spec, family, metadata, [tensor.name for tensor in tensors], where)
    entries, notes = vocabulary(resolved.tokenizer, spec.vocab_size)
    if len(spec.eos_token_ids) > 2:
        notes.append("more than two ids end a sequence; GGUF names the first two")
    return {**metadata, **entries}, tensors, notes


@dataclass(frozen=True)
class ArrayRows:
    """A vector of float32 that is computed, not read."""

    values: np.ndarray[Any, Any]
    n_rows: int = 1
    dtype: str = "f32"
    group: int = 1

    @property
    def n_columns(self) -> int:
        """Its length."""
        return len(self.values)

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return it."""
        return self.values

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return its bytes."""
        return nk.quantize(self.values, "f32").data

    def raw(self) -> Iterator[bytes]:
        """Yield its bytes."""
        yield self.values.astype("<f4").tobytes()
