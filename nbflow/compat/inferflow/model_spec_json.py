"""Inferflow's ``model_spec.json`` as a model file, or converted to one of our family files.

The keys that describe a network become fields (`nbflow.spec.fields`), the tensor names a
``[tensors]`` table.  Numbers come from the checkpoint's config.json, as there.  A key that is
unknown or has no effect here is noted; a value that asks for another computation is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nbflow.compat.inferflow.model_spec_fields import structure_and_config
from nbflow.compat.inferflow.model_spec_file import SELF_DESCRIBED, ModelSpecFile
from nbflow.compat.inferflow.model_spec_tensors import our_names, tensor_names
from nbflow.spec.family import Family, check_family, get_family
from nbflow.spec.model_file import ModelFile
from nbflow_kernels.errors import UsageError

_PAIR = "m2m_100"
"""Family of the encoder-decoders that can be described."""
_POST_NORMS = ("self_attn.post_norm", "feed_forward.post_norm")
_BIASED = ["attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down", "router"]
"""Matrices that have a bias if the checkpoint has it."""
_IGNORED = [
    "*rotary_emb.inv_freq", "*rotary_pos_emb.inv_freq", "*.masked_bias", "*embeddings.position_ids",
    "*pooler.dense.*", "cls.seq_relationship.*", "cls.predictions.decoder.*",
]  # fmt: skip
"""Tensors of published checkpoints that are not weights, or are stored twice."""
_ONLY = {
    "use_sliding_window": [False],
    "attn_logit_softcapping": [],
    "final_logit_softcapping": [],
    "qk_layernorm": [False],
}
"""Keys of config.json that a specification cannot express."""
_OF_FOLDERS = ("model.safetensors", "pytorch_model.bin")
"""Weights that are read as a folder."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Tokenizer files that need no others; of the rest, those next to the weights are used."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load(path: Path) -> ModelFile:
    """Read a specification as a model file, for `nbflow.spec.model_file.READERS`."""
    spec = ModelSpecFile(path)
    table = _table(spec)
    first = next(iter(spec.top.get("model_files", ())), "")
    weights = path.parent / first if first else None
    if weights is not None and (first.endswith(".index.json") or first in _OF_FOLDERS):
        weights = path.parent if weights.is_file() else None
    named = (spec.top.get("tokenizer_file"), *spec.top.get("tokenizer_files", ()))
    tokenizer = next((Path(name) for name in named if name in _TOKENIZERS), None)
    return ModelFile(
        name=path.parent.resolve().name if path.stem.startswith("model_spec") else path.stem,
        description=table["description"],
        family=_family(table, path),
        path=weights if weights is not None and weights.exists() else None,
        tokenizer=tokenizer,
        notes=tuple(spec.notes),
    )


def to_toml(path: Path) -> tuple[str, tuple[str, ...]]:
    """Convert a specification: return the text of a family file, and notes.

    Of an encoder-decoder it is a model file that names the family.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from nbflow.compat.inferflow.model_spec_json import to_toml
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "model_spec.json")
    ...     _ = path.write_text(
    ...         '{"model_file_format": "pickle", "network_structure":'
    ...         ' {"type": "transformer.llama", "qk_column_order": 2, "kq_scale": 2}}'
    ...     )
    ...     text, notes = to_toml(path)
    >>> "[structure]" in text, notes
    (True, ('kq_scale has no effect: scores are float32',))
    """
    spec = ModelSpecFile(path)
    if spec.format in SELF_DESCRIBED:
        raise UsageError(
            f"{path}: model_file_format is {spec.format}: such a file describes itself, and needs "
            "no specification; name it as the model"
        )
    table = _table(spec)
    _family(table, path)  # raises for values out of bounds
    lines = [f"# Made from Inferflow's {path.name} by nbflow spec --toml.", ""]
    lines += [f"{k} = {_inline(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for name, entries in table.items():
        if isinstance(entries, dict):
            lines += ["", f"[{name}]", *(f"{_key(k)} = {_inline(v)}" for k, v in entries.items())]
    return "\n".join(lines) + "\n", tuple(spec.notes)


def _family(table: dict[str, Any], path: Path) -> Family:
    """Return the family that a table describes or names."""
    named = table.get("family")
    return check_family(table, path) if named is None else get_family(named, str(path))


def _table(spec: ModelSpecFile) -> dict[str, Any]:
    """Return the content of a family file, or of a model file that names a family."""
    description = f"from Inferflow's {spec.path.name}"
    if spec.format in SELF_DESCRIBED:
        spec.notes.append(f"the header of the {spec.format} file is used instead")
        return {"description": description, "family": SELF_DESCRIBED[spec.format]}
    _check_top(spec)
    if spec.kind == "pair":
        _check_pair(spec)
        return {"description": description, "family": _PAIR}
    prefix, is_post = spec.network.get("tensor_name_prefix", ""), _has_post_norms(spec)
    names = tensor_names(
        spec.kind,
        prefix,
        spec.names("tensor_name_mapping"),
        spec.names("tensor_name_pre_mapping"),
        post_norms=is_post,
        fused_w1=str(spec.network.get("activation_function")).lower() == "glu_silu",
    )
    spec.notes += names.notes
    structure, config = structure_and_config(spec, names)
    return {
        "description": description,
        "prefix": prefix,
        "structure": structure | {"norm_place": "post" if is_post else "pre"},
        "config": config,
        "biases": {"stored": _BIASED},
        "only": _ONLY,
        "tensors": {ours: n[0] if len(n) == 1 else n for ours, n in names.tensors.items()},
        "ignored": {"tensors": _IGNORED},
    }


def _check_top(spec: ModelSpecFile) -> None:
    """Note keys without effect; raise for values that would change token ids."""
    if spec.top.get("config_file", "config.json") != "config.json":
        spec.notes.append("config_file has no effect: config.json is read")
    tokens = [
        key for key in ("unk_token", "pad_token", "bos_token", "eos_token") if key in spec.top
    ]
    if tokens:
        verb = "have" if len(tokens) > 1 else "has"
        spec.notes.append(
            f"{', '.join(tokens)} {verb} no effect: the tokenizer and config.json state the "
            "special tokens"
        )
    if spec.network.get("kq_scale", 1.0) != 1.0:
        spec.notes.append("kq_scale has no effect: scores are float32")
    if spec.top.get("token_remap_file"):
        raise spec.error("token_remap_file", "must be absent: token ids are those of the tokenizer")
    if spec.top.get("output_vocab_size", 0):
        raise spec.error("output_vocab_size", "must be 0: there is one vocabulary")


def _has_post_norms(spec: ModelSpecFile) -> bool:
    """Return whether the norms follow the sublayers."""
    mapped = spec.names("tensor_name_mapping").values()
    found = tuple(name for name in _POST_NORMS if any(f".{name}." in other for other in mapped))
    after = spec.network.get("is_attn_post_as_residual", True)
    if found not in ((), _POST_NORMS if after else _POST_NORMS[:1]):
        raise UsageError(
            f"{spec.path}: tensor_name_mapping has {' and '.join(found)}, with "
            f"is_attn_post_as_residual {str(after).lower()}; supported are both with true "
            "(norms behind the sublayers), and the first alone with false (it precedes the experts)"
        )
    return found == _POST_NORMS


def _check_pair(spec: ModelSpecFile) -> None:
    """Raise unless an encoder-decoder is built and called as M2M-100."""
    instead = f"an encoder-decoder must be as M2M-100; else write family files (extends {_PAIR!r})"
    for key, values in (
        ("normalization_function", ("std",)),
        ("position_embedding", ("sinusoidal", "sinusoidal2")),
        ("tensor_name_prefix", ("model.",)),
    ):
        if str(spec.network.get(key, values[0])).lower() not in values:
            raise spec.error(key, f"must be {' or '.join(values)}: {instead}")
    decoder = get_family(_PAIR, str(spec.path))
    sides = {"dec": decoder, "enc": get_family(str(decoder.encoder), str(spec.path))}
    for theirs, standard in spec.names("tensor_name_mapping").items():
        side = sides.get(standard[:3], decoder)
        known = {
            name.removeprefix("model.")
            for ours in our_names(standard, "pair", False, False)
            for name in _with_biases(side, ours)
        }
        if theirs.removeprefix("model.") not in known:
            raise UsageError(
                f"{spec.path}: tensor_name_mapping: {theirs!r:.80} is not called so: {instead}"
            )


def _with_biases(family: Family, ours: str) -> list[str]:
    """Return the names of a tensor in a family; a bias is called as its weight."""
    if ours in family.tensors or not ours.endswith(".bias"):
        return list(family.tensors.get(ours, ()))
    weights = family.tensors.get(ours.removesuffix(".bias") + ".weight", ())
    return [name.removesuffix(".weight") + ".bias" for name in weights]


# ---- TOML ---------------------------------------------------------------------------------------


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _inline(name)


def _inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    import tomli_w  # late: a specification is converted seldom

    if isinstance(value, dict):
        inner = ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
