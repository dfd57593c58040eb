"""Specification of a model, from its family, its checkpoint and a model file."""

from nbflow.spec.check_tensors import check
from nbflow.spec.family import Family, families
from nbflow.spec.layer_specs import RopeSpec
from nbflow.spec.model_file import find_model_file, published
from nbflow.spec.model_names import known_models
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.resolve import ResolvedModel, load_tokenizer, resolve

__all__ = [
    "Family",
    "ModelSpec",
    "ResolvedModel",
    "RopeSpec",
    "check",
    "families",
    "find_model_file",
    "known_models",
    "load_tokenizer",
    "published",
    "resolve",
]
