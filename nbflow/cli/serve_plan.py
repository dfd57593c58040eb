"""`nbflow serve --plan`: predicted memory and speed of a server's models."""

from __future__ import annotations

import dataclasses
from typing import Any

from nbflow.distributed import world
from nbflow.engine.load import measure
from nbflow.options import MAX_SEQUENCES
from nbflow.planner import (
    RunConfig,
    fitting_workload,
    known_machines,
    load_machine,
    planned_model,
    predict,
)
from nbflow.planner.memory_plan import MemoryPlan, plan_memory
from nbflow.server.config import ModelOptions, ServerConfig
from nbflow.utils.system import available_memory_bytes
from nbflow.utils.tables import text_table
from nbflow_kernels.plugins import load_plugins


def print_plans(config: ServerConfig) -> None:
    """Print the plan of every model of a server; collective over MPI ranks."""
    load_plugins(config.plugins)
    for name, options in config.models.items():
        plan = model_plan(options)
        if world().rank:
            continue
        print(f"{name}: {options.path}, weights {options.weights or 'as stored'}, kv {options.kv}")
        print(plan)
        if options.draft not in (None, "ngram"):
            print(f"\n{name}, draft: {options.draft}, on the first rank as well")
            print(draft_plan(options))
        print()
        for line in steps(options, plan):
            print(line)


def model_plan(options: ModelOptions) -> MemoryPlan:
    """Return the memory plan of a model with the KV cache of its engine."""
    engine = options.engine.options()
    load = options.load_options()
    if engine.max_step_tokens is not None:
        load = load.replaced({"max_step_tokens": engine.max_step_tokens})
    sizes: dict[str, Any] = {
        "max_sequences": engine.max_sequences or MAX_SEQUENCES,
        "prefix_states": engine.n_prefix_states,
    }
    plan = plan_memory(options.path, load, measure=measure, **sizes)
    needed = max(rank.kv_bytes for rank in plan.ranks)
    allowed = engine.kv_bytes or available_memory_bytes() // (2 * len(plan.ranks))
    if engine.kv_bytes is None and needed <= allowed:
        return plan
    partition = plan.partition if options.partition == "auto" else options.partition
    return plan_memory(options.path, load, kv_bytes=allowed, partition=partition, **sizes)


def draft_plan(options: ModelOptions) -> MemoryPlan:
    """Return the memory plan of the draft model, with every request at full context."""
    assert options.draft is not None
    return plan_memory(
        options.draft, weights=options.draft_weights, activations=options.activations,
        kv=options.kv, state=options.state,
        max_sequences=options.engine.max_sequences or MAX_SEQUENCES,
    )  # fmt: skip


def steps(options: ModelOptions, plan: MemoryPlan) -> list[str]:
    """Return lines with the predicted speed of 1, 8, and max_sequences requests."""
    if options.machine is None:
        known = ", ".join(known_machines())
        return [f"to predict speed, name a --machine: {known}, or a file (nbflow plan --measure)"]
    machine = load_machine(options.machine)
    model = planned_model(options.path, options.weights, options.spec).quantized_by(
        options.quantizer
    )
    usual = fitting_workload(model.shortened(options.max_context).spec, 1)
    setting = RunConfig(
        kv=options.kv, activations=options.activations, all_reduce=options.all_reduce
    )
    rows = []
    for batch in sorted({1, 8, plan.max_sequences}):
        if batch > plan.max_sequences:
            continue
        workload = dataclasses.replace(usual, batch=batch)
        made = predict(model, plan.partition, machine, workload, setting)
        speeds = f"{made.prefill_tokens_per_s:,.0f}", f"{made.decode_tokens_per_s:,.1f}"
        times = f"{made.prefill_s:.3f}", *speeds, f"{made.decode_s * 1e3:.2f}"
        rows.append((batch, *times, "yes" if made.fits else "no"))
    columns = ("requests", "first token s", "prefill/s", "decode/s", "ms/step", "fits")
    head = f"on {machine.name}: prompts of {usual.prompt} tokens, {usual.generate} generated"
    return [head, *text_table(columns, rows).splitlines()]
