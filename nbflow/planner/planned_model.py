"""Model description for planning: specification and formats, without weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.column_groups import StoredColumns
from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.kv_cache.state_storage import with_state_format
from nbflow.program import build, build_cross_kv
from nbflow.program.records import Program
from nbflow.quantization.policy import WeightFormats, Weights, is_matrix, weight_formats
from nbflow.quantization.prepare import no_format, transformed_spec
from nbflow.spec import ModelSpec, published, resolve
from nbflow.spec.family import family_of_config
from nbflow.spec.from_config import build_spec
from nbflow.spec.model_file import load_model_file
from nbflow.spec.model_names import known_models, model_name
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import AUTO

PUBLISHED_AS = "f16"
"""Weight type of a model known by its description only: most are published in two bytes."""

_UNCHANGED = ("router.weight", "shared_gate.weight")
"""Matrices that quantized checkpoints keep as floats."""


@dataclass(frozen=True)
class PlannedModel:
    """Specification and weight formats of a model."""

    spec: ModelSpec
    weights: str | WeightFormats | None = None
    """Format of the layers' matrices, or a policy file; None keeps what is stored."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Tensor name -> type in the checkpoint; `PUBLISHED_AS` for others."""
    encoder_stored: Mapping[str, str] = field(default_factory=dict)
    """Types of the encoder's tensors, if there is an encoder."""
    column_groups: Mapping[str, StoredColumns] = field(default_factory=dict)
    """Matrices whose columns have another order, or factors."""

    @cached_property
    def encoder(self) -> PlannedModel | None:
        """Encoder of an encoder-decoder model, or None."""
        if self.spec.encoder is None:
            return None
        return PlannedModel(self.spec.encoder, self.weights, self.encoder_stored)

    @cached_property
    def _formats_of(self) -> dict[str, str]:
        return {}

    def format_of(self, name: str) -> str:
        """Return the format of a tensor in memory."""
        if name not in self._formats_of:
            self._formats_of[name] = self._find_format(name)
        return self._formats_of[name]

    def _find_format(self, name: str) -> str:
        shape = self.spec.shape_of(name)
        if len(shape) == 1 or name.endswith(".bias"):
            return "f32"
        chosen = self.formats and self.formats.of(name, shape)
        if chosen:
            return chosen
        kept = self.kept_format(name)
        if kept is not None:
            return kept
        dtype = self.stored.get(name, PUBLISHED_AS)
        return dtype if dtype in ("f16", "bf16") else "f32"

    @cached_property
    def matrix_formats(self) -> frozenset[str]:
        """Formats of the matrices in memory."""
        shapes = self.spec.tensor_shapes()
        own = {self.format_of(name) for name, shape in shapes.items() if is_matrix(name, shape)}
        return frozenset(own | (self.encoder.matrix_formats if self.encoder else set()))

    def kept_format(self, name: str) -> str | None:
        """Return the block format that a tensor keeps from the checkpoint, or None."""
        dtype = self.stored.get(name, PUBLISHED_AS)
        converted = self.formats and self.formats.of(name, self.spec.shape_of(name))
        if dtype in ITEM_BYTES or converted or self.spec.tensor_layout(name).head_rows:
            return None
        return dtype

    def kept_groups(self, name: str) -> StoredColumns | None:
        """Return groups or factors of the columns of a matrix, or None."""
        groups = self.column_groups.get(name)
        return None if groups is None or self.kept_format(name) is None else groups

    @cached_property
    def formats(self) -> WeightFormats | None:
        """Formats that `weights` stands for."""
        return weight_formats(self.weights)

    def bits(self, name: str) -> float:
        """Return the bits per weight of a tensor."""
        return nk.FORMATS[self.format_of(name)].bits_per_weight

    @cached_property
    def kinds(self) -> tuple[tuple[int, frozenset[int]], ...]:
        """Kinds of equal layers: the first layer of each kind, and all of them."""
        spec = self.spec
        tensors: dict[int, list[object]] = {layer: [] for layer in range(spec.n_layers)}
        for name, shape in spec.tensor_shapes().items():
            if name.startswith("layers."):
                _, number, part = name.split(".", 2)
                tensors[int(number)].append((part, shape, self.format_of(name)))
        members: dict[object, list[int]] = {}
        for layer, parts in tensors.items():
            mask = spec.window_of(layer), spec.chunk_of(layer)
            key = tuple(parts), mask, spec.rope_of(layer)
            members.setdefault(key, []).append(layer)
        return tuple((layers[0], frozenset(layers)) for layers in members.values())

    @cached_property
    def program(self) -> Program:
        """Unfused program with one layer of each kind."""
        return self._of_kinds(build(self.spec))

    @cached_property
    def cross_kv_program(self) -> Program | None:
        """`build_cross_kv` program with one layer of each kind; None without an encoder."""
        return None if self.spec.encoder is None else self._of_kinds(build_cross_kv(self.spec))

    def _of_kinds(self, whole: Program) -> Program:
        kept = {layer for layer, _ in self.kinds}
        ops = tuple(op for op in whole.ops if op.layer is None or op.layer in kept)
        return dataclasses.replace(whole, ops=ops)

    def shortened(self, max_context: int | None) -> PlannedModel:
        """Return the model with `max_context` at most."""
        if max_context is None or max_context >= self.spec.max_context:
            return self
        return dataclasses.replace(
            self, spec=dataclasses.replace(self.spec, max_context=max_context)
        )

    def with_state_format(self, format: str) -> PlannedModel:
        """Return the model with recurrent states in a format."""
        return dataclasses.replace(self, spec=with_state_format(self.spec, format))

    def quantized_by(self, quantizer: str) -> PlannedModel:
        """Return the model as the option `quantizer` of `nbflow.load` changes it (untied head)."""
        spec = transformed_spec(self.spec, quantizer)
        if quantizer != AUTO and self.formats is None:
            raise no_format(quantizer)
        stored = dict(self.stored)
        if spec.tied_head != self.spec.tied_head and "embed.weight" in stored:
            stored["head.weight"] = stored["embed.weight"]
        return dataclasses.replace(self, spec=spec, stored=stored)

    @property
    def block_size(self) -> int:
        """Columns between which tensors can be split: the largest block."""
        if self.formats is not None and self.formats.is_for_all:
            return self.formats.block_size
        stored = {*self.stored.values(), *self.encoder_stored.values()} - set(ITEM_BYTES)
        of_stored = math.lcm(1, *(nk.FORMATS[f].block_size for f in stored))
        return of_stored if self.formats is None else math.lcm(of_stored, self.formats.block_size)


def planned_model(
    model: str | Path, weights: Weights = None, spec: str | Path | None = None
) -> PlannedModel:
    """Describe a model from its configuration or header.

    Parameters
    ----------
    model : str or path
        A ``config.json`` or a folder with one, a model file (``.toml``) or the name of one that
        comes with the package, or weights in any format, of which only the header is read.
    weights : str, path or WeightFormats, optional
        Format of the layers' matrices, or a policy file; None keeps what is stored.
    spec : str or path, optional
        As for `nbflow.load`, which needs the weights' header.

    Raises
    ------
    UsageError
        If the model does not exist, or its files do not describe it.

    Examples
    --------
    >>> from nbflow.planner import planned_model
    >>> planned_model("llama2_7b", "q4").format_of("layers.0.attn.q.weight")
    'q4_b32t1a'
    """
    weights = explicit(weights)
    path = Path(model)
    config = path / "config.json" if path.is_dir() else path
    if spec is not None:
        resolved = resolve(model, spec=spec)
        return stored_model(resolved.spec, resolved.path, weights)
    if config.suffix == ".json" and config.is_file() and not _has_weights(path):
        return _described(config, weights)
    if not path.exists() or path.suffix == ".toml":
        toml = path if path.suffix == ".toml" else known_models().get(model_name(str(model)) or "")
        if toml is not None:
            model_file = load_model_file(toml)
            if model_file.path is None:
                described = published(model_file)
                return PlannedModel(described, weights, _stored_as(described, model_file.config))
    resolved = resolve(model)
    return stored_model(resolved.spec, resolved.path, weights)


def stored_model(spec: ModelSpec, path: Path, weights: Weights) -> PlannedModel:
    """Return the model of a checkpoint from its header."""
    with open_weights(path) as file:
        of_decoder, *of_encoder = (
            {n: file.dtype(s.checkpoint_name(n)) for n in s.tensor_shapes()} for s in spec.parts
        )
        groups = {n: file.column_groups(spec.checkpoint_name(n)) for n in spec.tensor_shapes()}
    of_columns = {name: found for name, found in groups.items() if found is not None}
    encoder_types = of_encoder[0] if of_encoder else {}
    return PlannedModel(spec, explicit(weights), of_decoder, encoder_types, of_columns)


def explicit(weights: Weights) -> str | WeightFormats | None:
    """Return the full name of a format, or a policy as `WeightFormats`."""
    found = weight_formats(weights)
    return found.patterns[0][1] if found is not None and found.facts is None else found


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(
        next(path.glob(pattern), None) is not None
        for pattern in ("*.safetensors", "*.bin", "*.pt*")
    )


def _described(config: Path, weights: str | WeightFormats | None) -> PlannedModel:
    """Return the model of a config.json."""
    content: dict[str, Any] | None = read_object(config, missing_ok=False)
    if not content:
        raise UsageError(f"{config}: is empty; it must be the model's configuration")
    family = family_of_config(content, str(config))
    name = config.resolve().parent.name
    spec = build_spec(family, content, name=name, where=str(config), checkpoint_tensors=None)
    return PlannedModel(spec, weights, _stored_as(spec, content))


def _stored_as(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored types of matrices of a quantized checkpoint by its configuration."""
    quantization = read_quantization(config, spec.name)
    if quantization is None:
        return {}
    of_experts = quantization.format == "mxfp4"
    dtype = config.get("torch_dtype", config.get("dtype"))
    found: dict[str, str] = {}
    for name, shape in spec.tensor_shapes().items():
        if (
            is_matrix(name, shape)
            and name.startswith("layers.")
            and not name.endswith(_UNCHANGED)
            and (".moe." in name or not of_experts)
        ):
            module = spec.checkpoint_name(name).rpartition(".")[0]
            of_module = quantization.by_config(module)
            if of_module is not None:
                found[name] = of_module.planned_format(shape[1], dtype)
    return found
