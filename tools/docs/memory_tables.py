"""Tables of docs/memory.md: memory of models by weight format and partition, as planned."""

from __future__ import annotations

from functools import cache

from nbflow.planner.memory_plan import MemoryPlan, plan_memory

MODELS = ("llama2_7b", "mixtral_8x7b_instruct", "llama3.1_70b", "deepseek_v3")
FORMATS = ("f16", "q8_0", "q6_k", "q4_k", "q3h", "q2_k")
CONTEXT = 4096


@cache
def _plan(model: str, weights: str, partition: str = "0", kv: str = "f16") -> MemoryPlan:
    return plan_memory(model, weights=weights, partition=partition, kv=kv, max_context=CONTEXT)


def _gb(n: int) -> str:
    return f"{n / 1e9:,.1f}"


def by_format() -> str:
    """Return weights of each model by format, and the cache of one full sequence, in GB."""
    lines = [
        f"| model | {' | '.join(FORMATS)} | cache f16 | cache q8_0 | buffers |",
        "|---|" + "---:|" * (len(FORMATS) + 3),
    ]
    for model in MODELS:
        ranks = [_plan(model, name).ranks[0] for name in FORMATS]
        small = _plan(model, "q8_0", kv="q8_0").ranks[0]
        cells = [*(_gb(rank.weight_bytes) for rank in ranks), f"{ranks[0].kv_bytes / 1e9:.2f}"]
        cells += [f"{small.kv_bytes / 1e9:.2f}", f"{ranks[0].workspace_bytes / 1e9:.2f}"]
        lines.append(f"| `{model}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_partition() -> str:
    """Return the memory of the fullest rank by partition, in GB, for the 70B model."""
    partitions = ("0", "0;1", "0&1", "0&1;2&3", "0&1&2&3")
    names = ("q8_0", "q4_k", "q3h")
    lines = [
        f"| partition | {' | '.join(names)} |",
        "|---|" + "---:|" * len(names),
    ]
    for partition in partitions:
        plans = [_plan("llama3.1_70b", name, partition) for name in names]
        cells = [_gb(max(rank.total_bytes for rank in plan.ranks)) for plan in plans]
        lines.append(f"| `{partition}` | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"memory by format": by_format, "memory by partition": by_partition}
