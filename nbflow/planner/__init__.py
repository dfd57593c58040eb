"""Planner: memory, communication and speed of a model's partitions on a machine.

>>> from nbflow.planner import Workload, best, compare, load_machine, planned_model
>>> model = planned_model("llama2_7b", weights="q4")
>>> predictions, refused = compare(model, load_machine("v100x4_nvlink"), Workload(batch=1))
>>> best(predictions, "latency").kind
'by tensor'
"""

from nbflow.planner.auto_partition import choose_partition
from nbflow.planner.machine import (
    Device,
    Link,
    Machine,
    known_machines,
    load_machine,
    machine_toml,
)
from nbflow.planner.planned_model import PlannedModel, planned_model, stored_model
from nbflow.planner.predict import predict
from nbflow.planner.prediction import Prediction, RankPrediction, Workload, fitting_workload
from nbflow.planner.rates import CacheCurve, CacheRates, Rates
from nbflow.planner.search import OBJECTIVES, best, candidates, compare, with_shares
from nbflow.planner.stage_cost import RunConfig

__all__ = [
    "OBJECTIVES",
    "CacheCurve",
    "CacheRates",
    "Device",
    "Link",
    "Machine",
    "PlannedModel",
    "Prediction",
    "RankPrediction",
    "Rates",
    "RunConfig",
    "Workload",
    "best",
    "candidates",
    "choose_partition",
    "compare",
    "fitting_workload",
    "known_machines",
    "load_machine",
    "machine_toml",
    "planned_model",
    "predict",
    "stored_model",
    "with_shares",
]
