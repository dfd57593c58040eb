"""The model to plan for: its specification and how its weights are stored, without the weights."""

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
from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.program import build, build_memory
from nbflow.program.records import Program
from nbflow.quantization.policy import WeightFormats, Weights, is_matrix, weight_formats
from nbflow.quantization.transforms import no_format, transformed_spec
from nbflow.spec import ModelSpec, published, resolve
from nbflow.spec.family import family_of
from nbflow.spec.from_config import build_spec
from nbflow.spec.model_file import known_models, load_model_file
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError

PUBLISHED_AS = "f16"
"""Type of the weights of a model that is only described: two bytes each, as most are published."""

_UNCHANGED = ("router.weight", "shared_gate.weight")
"""Matrices of the layers that are published as floats where the others are not."""


@dataclass(frozen=True)
class PlannedModel:
    """A model as far as a plan needs it."""

    spec: ModelSpec
    """What it is made of."""
    weights: str | WeightFormats | None = None
    """Format of the layers' matrices, or a policy file; None keeps what is stored."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Our tensor name -> the type in the checkpoint; those not named are `PUBLISHED_AS`."""
    encoder_stored: Mapping[str, str] = field(default_factory=dict)
    """The same of its encoder, if it has one."""

    @cached_property
    def encoder(self) -> PlannedModel | None:
        """The encoder whose hidden states the layers attend to, or None."""
        if self.spec.encoder is None:
            return None
        return PlannedModel(self.spec.encoder, self.weights, self.encoder_stored)

    def format_of(self, name: str) -> str:
        """Return the format that a tensor has in memory."""
        shape = self.spec.shape_of(name)
        if len(shape) == 1 or name.endswith(".bias"):  # norms are vectors, too
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
        """The formats that its matrices have in memory."""
        shapes = self.spec.tensor_shapes()
        own = {self.format_of(name) for name, shape in shapes.items() if is_matrix(name, shape)}
        return frozenset(own | (self.encoder.matrix_formats if self.encoder else set()))

    def kept_format(self, name: str) -> str | None:
        """Return the block format that a tensor keeps from the checkpoint; None for no such."""
        dtype = self.stored.get(name, PUBLISHED_AS)
        converted = self.formats and self.formats.of(name, self.spec.shape_of(name))
        if dtype in ITEM_BYTES or converted or self.spec.tensor_layout(name).turned:
            return None
        return dtype

    @cached_property
    def formats(self) -> WeightFormats | None:
        """The formats that `weights` stands for."""
        return weight_formats(self.weights)

    def bits(self, name: str) -> float:
        """Return the bits that one weight of a tensor takes."""
        return nk.FORMATS[self.format_of(name)].bits_per_weight

    @cached_property
    def kinds(self) -> tuple[tuple[int, frozenset[int]], ...]:
        """Kinds of layer that cost the same: one layer of each, and all of them."""
        spec = self.spec
        tensors: dict[int, list[object]] = {layer: [] for layer in range(spec.n_layers)}
        for name, shape in spec.tensor_shapes().items():
            if name.startswith("layers."):
                _, number, part = name.split(".", 2)
                tensors[int(number)].append((part, shape, self.bits(name)))
        members: dict[object, list[int]] = {}
        for layer, parts in tensors.items():
            key = tuple(parts), spec.window_of(layer), spec.rope_of(layer) == spec.rope
            members.setdefault(key, []).append(layer)
        return tuple((layers[0], frozenset(layers)) for layers in members.values())

    @cached_property
    def program(self) -> Program:
        """The program with one layer of each kind, nothing fused."""
        return self._of_kinds(build(self.spec))

    @cached_property
    def memory_program(self) -> Program | None:
        """The same of what makes keys and values of the encoder's hidden states."""
        return None if self.spec.encoder is None else self._of_kinds(build_memory(self.spec))

    def _of_kinds(self, whole: Program) -> Program:
        kept = {layer for layer, _ in self.kinds}
        ops = tuple(op for op in whole.ops if op.layer is None or op.layer in kept)
        return dataclasses.replace(whole, ops=ops)

    def shortened(self, max_context: int | None) -> PlannedModel:
        """Return the model with a shorter context."""
        if max_context is None or max_context >= self.spec.max_context:
            return self
        return dataclasses.replace(
            self, spec=dataclasses.replace(self.spec, max_context=max_context)
        )

    def encoded_by(self, encoder: str) -> PlannedModel:
        """Return the model as an encoder (`nbflow.load`) changes it: a tied head may come apart."""
        spec = transformed_spec(self.spec, encoder)
        if encoder != "best" and self.formats is None:
            raise no_format(encoder)
        stored = dict(self.stored)
        if spec.tied_head != self.spec.tied_head and "embed.weight" in stored:
            stored["head.weight"] = stored["embed.weight"]
        return dataclasses.replace(self, spec=spec, stored=stored)

    @property
    def block_size(self) -> int:
        """Return the columns between which tensors may be cut."""
        if self.formats is not None and self.formats.is_for_all:
            return self.formats.block_size
        stored = {*self.stored.values(), *self.encoder_stored.values()} - set(ITEM_BYTES)
        of_stored = math.lcm(1, *(nk.FORMATS[f].block_size for f in stored))
        return of_stored if self.formats is None else math.lcm(of_stored, self.formats.block_size)


def planned_model(
    model: str | Path, weights: Weights = None, spec: str | Path | None = None
) -> PlannedModel:
    """Find out what a model is made of, from its description alone.

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
        If there is no such model, or what is found does not say what it is made of.

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
        toml = path if path.suffix == ".toml" else known_models().get(str(model))
        if toml is not None:
            model_file = load_model_file(toml)
            if model_file.path is None:
                described = published(model_file)
                return PlannedModel(described, weights, _stored_as(described, model_file.config))
    resolved = resolve(model)
    return stored_model(resolved.spec, resolved.path, weights)


def stored_model(spec: ModelSpec, path: Path, weights: Weights) -> PlannedModel:
    """Return the model in a checkpoint, of which only the header is read."""
    specs = [spec] if spec.encoder is None else [spec, spec.encoder]
    with open_weights(path) as file:
        stored = [{n: file.dtype(s.checkpoint_name(n)) for n in s.tensor_shapes()} for s in specs]
    return PlannedModel(spec, explicit(weights), *stored)


def explicit(weights: Weights) -> str | WeightFormats | None:
    """Return the explicit name of a format, or formats that differ."""
    found = weight_formats(weights)
    return found.patterns[0][1] if found is not None and found.facts is None else found


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(
        next(path.glob(pattern), None) is not None
        for pattern in ("*.safetensors", "*.bin", "*.pt*")
    )


def _described(config: Path, weights: str | WeightFormats | None) -> PlannedModel:
    """Return the model that a config.json gives."""
    content: dict[str, Any] | None = read_object(config, missing_ok=False)
    if not content:
        raise UsageError(f"{config}: is empty and does not say what model it is")
    family = family_of(content.get("model_type"), str(config))
    name = config.resolve().parent.name
    spec = build_spec(family, content, name=name, where=str(config), checkpoint_tensors=None)
    return PlannedModel(spec, weights, _stored_as(spec, content))


def _stored_as(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """Return how the matrices are stored that a configuration says are not `PUBLISHED_AS`.

    FP8 counts as float32, which its products with their scales are read as.
    """
    quantization = read_quantization(config, spec.name)
    if quantization is None:
        return {}
    of_experts = quantization.format == "mxfp4"
    return {
        name: "mxfp4" if of_experts else "f32"
        for name, shape in spec.tensor_shapes().items()
        if is_matrix(name, shape)
        and name.startswith("layers.")
        and not name.endswith(_UNCHANGED)
        and (".moe." in name or not of_experts)
    }
