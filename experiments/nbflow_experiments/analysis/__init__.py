"""Quantization analysis: column importance, weight error, layer error, attribution.

>>> from nbflow_experiments.analysis import tensor_errors
>>> tensor_errors("tiny_python", ["q3h"], tensors="layers.0.attn.q.weight").sqnr_db.round(1).item()
18.5

docs/analysis.md defines every number; ``nbflow analyze`` is the command.
"""

from nbflow_experiments.analysis.activation_statistics import activation_statistics
from nbflow_experiments.analysis.all_tensor_errors import tensor_errors, totals
from nbflow_experiments.analysis.attribution import Attribution, attribution
from nbflow_experiments.analysis.changes import Change
from nbflow_experiments.analysis.generation_drift import generation_drift
from nbflow_experiments.analysis.kv_cache_bits import kv_errors
from nbflow_experiments.analysis.layer_errors import LayerErrors, layer_errors
from nbflow_experiments.analysis.text_windows import analysis_windows
from nbflow_experiments.analysis.treatments import Format, Noise, StoredWeights, read_statistics

__all__ = [
    "Attribution",
    "Change",
    "Format",
    "LayerErrors",
    "Noise",
    "StoredWeights",
    "activation_statistics",
    "analysis_windows",
    "attribution",
    "generation_drift",
    "kv_errors",
    "layer_errors",
    "read_statistics",
    "tensor_errors",
    "totals",
]
