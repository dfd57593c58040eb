"""Plan of a GGUF file: tensors and metadata copied from GGUF, or renamed from other checkpoints."""

from __future__ import annotations

from typing import Any

from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.readers import gguf
from nbflow.checkpoint.writers.gguf import U32, check_types
from nbflow.conversion.format_rules import FormatRules
from nbflow.conversion.gguf_metadata import model_metadata
from nbflow.conversion.gguf_names import check_reading, divisors_of, plan_renamed, target_family
from nbflow.conversion.gguf_vocabulary import vocabulary
from nbflow.conversion.plan import TensorConversion, check_blocks, plan_as_stored
from nbflow.conversion.tensor_rows import ArrayRows
from nbflow.spec.resolve import ResolvedModel

_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 11, "q4_k": 14, "q5_k": 16, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23,
    "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26, "iq2_s": 28, "iq4_xs": 30, "iq1_m": 31, "bf16": 32,
    "tq1_0": 36, "tq2_0": 37,
}  # fmt: skip
"""``general.file_type`` of files with one main type.

https://github.com/ggml-org/llama.cpp/blob/b6000/include/llama.h (llama_ftype)
"""
_QUANTIZATION_VERSION = 2  # of the block layouts

Plan = tuple[dict[str, Any], list[TensorConversion], list[str]]


def plan_gguf(resolved: ResolvedModel, file: WeightFile, rules: FormatRules, where: str) -> Plan:
    """Return metadata, tensors and notes of the new file."""
    if file.format == gguf.FORMAT:
        source = file.files()[0]
        metadata: dict[str, Any] = {
            key: value
            for key, value in gguf.read_typed_metadata(source).items()
            if not key.startswith("split.")
        }
        stored = plan_as_stored(resolved.spec, file, rules)
        tensors = [tensor for tensor in stored if tensor.name not in metadata]  # xIELU's numbers
        notes: list[str] = []
    else:
        metadata, tensors, notes = _from_model(resolved, file, rules, where)
    check_types(tensors)
    check_blocks(tensors)
    metadata.pop("general.file_type", None)
    if rules.to in _FILE_TYPES:
        metadata["general.file_type"] = ((U32,), _FILE_TYPES[rules.to])
    if any(tensor.format not in ITEM_BYTES for tensor in tensors):
        metadata["general.quantization_version"] = ((U32,), _QUANTIZATION_VERSION)
    return metadata, tensors, notes


def _from_model(resolved: ResolvedModel, file: WeightFile, rules: FormatRules, where: str) -> Plan:
    """Return the plan for a checkpoint that is not GGUF."""
    spec = resolved.spec
    arch, family = target_family(spec)
    tensors = plan_renamed(spec, file, family, arch, rules)
    for ours, divisors in divisors_of(spec).items():
        name = family.tensors.get(ours, (ours,))[0]
        sources = (ArrayRows(divisors),)
        tensors.append(TensorConversion(name, divisors.shape, "f32", "f32", sources))
    metadata = model_metadata(spec, arch)
    lost = check_reading(spec, family, metadata, [tensor.name for tensor in tensors], where)
    entries, notes = vocabulary(resolved.tokenizer, spec.vocab_size)
    if len(spec.eos_token_ids) > 2:
        notes.append("the model has more than two EOS ids; GGUF stores the first two")
    return {**metadata, **entries}, tensors, [*lost, *notes]
