"""`nbflow serve --plan`: what a server's models will take, and how fast they are."""

from __future__ import annotations

from typing import Any

from nbflow.engine.limits import MAX_SEQUENCES
from nbflow.engine.load import measure
from nbflow.engine.memory_plan import MemoryPlan, plan_memory
from nbflow.parallel import world
from nbflow.planner import (
    Setting,
    Workload,
    known_machines,
    load_machine,
    planned_model,
    predict,
)
from nbflow.server.config import ModelOptions, ServerConfig
from nbflow.system import available_memory_bytes
from nbflow_kernels import load_formats

MAX_STEP_TOKENS = 512
"""Of `nbflow.load`."""
_OF_MODEL = (
    "spec", "weights", "outliers", "encoder", "activations", "kv", "device", "max_context",
    "exchange", "kv_host_percent", "embeddings_on_host", "cpu_layers",
)  # fmt: skip
"""Options of a model that its memory follows from."""
PROMPT, GENERATE = 512, 128
"""Tokens of the requests that speed is predicted for, where the context holds them."""


def print_plans(config: ServerConfig) -> None:
    """Print the plan of every model of a server; every rank must call it.

    Raises
    ------
    UsageError
        If a model's description is not there, or its partition does not fit.
    """
    for file in config.formats:
        load_formats(file)
    for name, options in config.models.items():
        plan = model_plan(options)
        if world().rank:
            continue
        print(f"{name}: {options.path}, weights {options.weights or 'as stored'}, kv {options.kv}")
        print(plan)
        if options.draft not in (None, "ngram"):
            print(f"\n{name}, draft: {options.draft}, beside it on the first rank")
            print(draft_plan(options))
        print()
        for line in steps(options, plan):
            print(line)


def model_plan(options: ModelOptions) -> MemoryPlan:
    """Return what a model takes, with the memory for keys and values that its engine will take."""
    engine = options.engine
    known: dict[str, Any] = {name: getattr(options, name) for name in _OF_MODEL}
    known["max_step_tokens"] = engine.max_step_tokens or MAX_STEP_TOKENS
    known["max_sequences"] = engine.max_sequences or MAX_SEQUENCES
    plan = plan_memory(
        options.path, partition=options.partition, optimize=options.optimize,
        machine=options.machine, measure=measure, **known,
    )  # fmt: skip
    wanted = max(rank.kv_bytes for rank in plan.ranks)
    allowed = engine.kv_bytes or available_memory_bytes() // (2 * len(plan.ranks))
    assert isinstance(allowed, int)  # a text has been read by the configuration
    if engine.kv_bytes is None and wanted <= allowed:
        return plan
    partition = plan.partition if options.partition == "auto" else options.partition
    return plan_memory(options.path, partition=partition, kv_bytes=allowed, **known)


def draft_plan(options: ModelOptions) -> MemoryPlan:
    """Return what the model that proposes tokens takes, if all requests fill its context."""
    assert options.draft is not None
    return plan_memory(
        options.draft, weights=options.draft_weights, activations=options.activations,
        kv=options.kv, max_sequences=options.engine.max_sequences or MAX_SEQUENCES,
    )  # fmt: skip


def steps(options: ModelOptions, plan: MemoryPlan) -> list[str]:
    """Return the predicted speed with one request, eight, and all there may be, a line for each."""
    if options.machine is None:
        known = ", ".join(known_machines())
        return [f"for its speed name a --machine: {known}, or a file (nbflow plan --measure)"]
    machine = load_machine(options.machine)
    model = planned_model(options.path, options.weights, options.spec).encoded_by(options.encoder)
    context = min(options.max_context or model.spec.max_context, model.spec.max_context)
    prompt = min(PROMPT, max(1, context // 2))
    generate = max(1, min(GENERATE, context - prompt))
    setting = Setting(kv=options.kv, activations=options.activations, exchange=options.exchange)
    names = "requests  first token s    prefill/s   decode/s   ms/step  fits"
    lines = [f"on {machine.name}: prompts of {prompt} tokens, {generate} generated", names]
    for batch in sorted({1, 8, plan.max_sequences}):
        if batch > plan.max_sequences:
            continue
        workload = Workload(batch, prompt, generate)
        made = predict(model, plan.partition, machine, workload, setting)
        lines.append(
            f"{batch:>8}  {made.prefill_s:13.3f}  {made.prefill_tokens_per_s:11,.0f}  "
            f"{made.decode_tokens_per_s:9,.1f}  {made.decode_s * 1e3:8.2f}  "
            f"{'yes' if made.fits else 'no'}"
        )
    return lines
