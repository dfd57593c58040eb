"""The keys of Inferflow's ``model_spec.json``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbflow.spec.fields import MAX_ITEMS
from nbflow.utils.binary_file import read_file
from nbflow.utils.json_file import parse_object
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import Kind, check_value
from nbflow_kernels.errors import UsageError

MAX_BYTES = 10_000_000
SELF_DESCRIBED = {"gguf": "gguf", "ggml": "llama_ggml", "llama2.c": "llama2c"}
"""Formats whose headers describe the network -> family of the model file."""
FORMATS = ("pickle", "safetensors", *SELF_DESCRIBED)

TOP: dict[str, Kind] = {
    "config_file": str, "model_files": [str], "model_file_format": str, "network_structure": dict,
    "vocab_size": int, "input_vocab_size": int, "padded_vocab_size": int, "output_vocab_size": int,
    "tokenizer_files": [str], "tokenizer_file": str, "token_bytes_mapping": int,
    "token_remap_file": str, "tokenization_algorithm": str, "generation_config": str,
    "unk_token": str, "pad_token": str, "bos_token": str, "eos_token": str,
}  # fmt: skip
"""Keys at the top, and their types."""
NETWORK: dict[str, Kind] = {
    "type": str, "normalization_function": str, "activation_function": str,
    "position_embedding": str, "has_embedding_linear_norm": bool, "embedding_linear_scale": float,
    "linear_norm_before_sinusoidal": bool, "rope_theta": float, "rope_dim": int,
    "partial_rotary_factor": float, "pos_embedding_offset": int, "qk_column_order": int,
    "qkv_format": int, "kq_scale": float, "normalize_lm_head": bool,
    "is_attn_post_as_residual": bool, "is_parallel_attn": bool, "mlp_attn_share_input": bool,
    "use_self_attn_pre_norm": bool, "attn_pre_norm_base": float, "ffn_pre_norm_base": float,
    "output_norm_base": float, "attn_out_scale": float, "ffn_out_scale": float, "out_scale": float,
    "expert_count": int, "using_expert_count": int, "moe_top_k": int, "moe_norm_top_k_prob": bool,
    "moe_layer_start": int, "moe_layer_end": int, "has_shared_expert": bool,
    "tensor_name_prefix": str, "tensor_name_mapping": dict, "tensor_name_pre_mapping": dict,
}  # fmt: skip
"""Keys of ``network_structure``, and their types."""
TYPES = {
    "llama": "llama",
    "bloom": "bloom",
    "decoder_only": "decoder",
    "decoder_only.sparse_moe": "decoder",
    "encoder_only": "encoder",
    "bert": "encoder",
    "encoder_decoder": "pair",
}
"""Type of a network, without ``transformer.`` -> its kind."""


class ModelSpecFile:
    """One specification file, the types of its values checked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        """Keys that are unknown or have no effect."""
        text = read_file(path, MAX_BYTES, "a model specification")
        table = parse_object(_without_comments(text), str(path))
        if "network_structure" not in table:
            raise UsageError(
                f"{path}: is not a model specification of Inferflow: network_structure is missing; "
                "for a checkpoint of Hugging Face name the folder"
            )
        self.top = self._known(table, TOP, "")
        self.network = self._known(self.top["network_structure"], NETWORK, "network_structure.")
        self.format = str(self.top.get("model_file_format")).lower()
        if self.format not in FORMATS:
            raise self.error("model_file_format", f"must be one of {', '.join(FORMATS)}")
        word = str(self.network.get("type")).lower().removeprefix("transformer.")
        if word not in TYPES:
            known = ", ".join(f"transformer.{name}" for name in TYPES)
            raise self.error("type", f"must be one of {known}")
        self.kind = TYPES[word]
        """Type of the network, a value of `TYPES`."""

    def _known(self, table: dict[str, Any], kinds: Mapping[str, Kind], at: str) -> dict[str, Any]:
        """Return the known keys, checked; note the others."""
        unknown = [key for key in table if key not in kinds and key != "COMMENTS"]
        if unknown:
            more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
            names = ", ".join(shown(at + key) for key in unknown[:20])
            self.notes.append(f"unknown keys have no effect: {names}{more}")
        return {
            key: check_value(table[key], f"{self.path}: {at}{key}", kind)
            for key, kind in kinds.items()
            if table.get(key) is not None
        }

    def error(self, key: str, wanted: str) -> UsageError:
        """Return the error for the value of a key."""
        of_network = key in NETWORK
        table, at = (self.network, "network_structure.") if of_network else (self.top, "")
        return UsageError(f"{self.path}: {at}{key} {wanted}, got {shown(table.get(key)):.80}")

    def word(self, key: str, default: str, values: Mapping[str, str]) -> str:
        """Return our word for the value of a key."""
        word = str(self.network.get(key, default)).lower()
        if word not in values:
            raise self.error(key, f"must be one of {', '.join(filter(None, values))}")
        return values[word]

    def number(self, keys: tuple[str, ...], default: float) -> float:
        """Return the number that keys must have in common."""
        numbers = [float(self.network.get(key, default)) for key in keys]
        if len(set(numbers)) > 1:
            raise self.error(keys[0], f"must be equal to {' and '.join(keys[1:])}")
        return numbers[0]

    def names(self, key: str) -> dict[str, str]:
        """Return a table of tensor names."""
        table = self.network.get(key, {})
        if len(table) > MAX_ITEMS:
            raise UsageError(
                f"{self.path}: {key} may have at most {MAX_ITEMS} entries, got {len(table)}"
            )
        return {
            name: check_value(other, f"{self.path}: {key} {name:.80}", str)
            for name, other in table.items()
        }


def _without_comments(text: bytes) -> bytes:
    """Return the text without the comments and blank lines at its beginning."""
    lines = text.split(b"\n")
    n = 0
    while n < len(lines) and (not lines[n].strip() or lines[n].lstrip().startswith(b"#")):
        n += 1
    return b"\n".join(lines[n:])
