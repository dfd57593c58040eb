"""Program for mpirun: two replicas, one process each; writes results as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import nbflow
from nbflow.distributed import SelfComm, world
from nbflow.engine.scheduler import Scheduler
from nbflow.engine.search import BeamSearch

PROMPTS = ["def f(", "class A:\n    def", "import os\n", "for i in"]
LONG = list(range(100, 200))


def asked(model, prompt, seed=0, n=20, **more):
    return model.make_request(prompt, n, "top_p", seed, True, **more)


def lead(model, engine, draft):
    handles = [engine.submit(asked(model, p, 1 + i)) for i, p in enumerate(PROMPTS)]
    told = {"ids": [h.result(60).ids for h in handles]}
    while engine.stats().finished.get("length", 0) < len(PROMPTS):  # the other's are told later
        time.sleep(0.01)
    told["each"] = [sum(n.finished.values()) for n in engine.replica_stats()]
    # two at a time, so that the second one is the other process's
    beams = [engine.submit(model.make_request(PROMPTS[0], 8, BeamSearch(n=2))) for _ in range(2)]
    one, other = [[g.ids for g in h.results(60)] for h in beams]
    assert one == other
    told["beams"] = other
    busy = engine.submit(asked(model, "x", n=400))
    engine.submit(asked(model, LONG, n=1)).result(60)
    told["cached"] = engine.submit(asked(model, LONG, n=1)).result(60).cached_tokens
    made = engine.submit(asked(model, LONG, n=2, logprobs=3, prompt_logprobs=1)).result(60)
    told["logprobs"] = [len(made.top_logprobs[1]), len(made.prompt_logprobs)]
    busy.cancel()
    # two at a time, of which one is the other process's; each would take many seconds
    wide = BeamSearch(num_beams=64)
    cut = [engine.submit(model.make_request("x", 400, wide, ignore_eos=True)) for _ in range(2)]
    for handle in cut:
        handle.cancel()
    told["cancelled"] = [list(handle)[-1].finish_reason for handle in cut]
    drafted = [
        engine.submit(model.make_request(p, 20, ignore_eos=True, draft=draft, n_draft=19))
        for p in PROMPTS[:2]
    ]
    told["accepted"] = [handle.result(60).n_accepted for handle in drafted]
    told["embedded"] = len(engine.embed([[1, 2], [3]]))
    engine.flush()
    return told


def outlive(engine, model):
    """Continue after the failure of the other replica."""
    handles = [engine.submit(asked(model, p, n=400)) for p in PROMPTS[:2]]
    ends = [list(h)[-1] for h in handles]
    told = {"ends": sorted(e.finish_reason for e in ends)}
    told["why"] = next(str(e.error) for e in ends if e.error is not None)
    told["again"] = engine.submit(asked(model, PROMPTS[0], 1)).result(60).ids
    told["alive"] = engine.alive
    return told


def fail_later():
    """Fail the engine of this process in the middle of a text."""
    next_step = Scheduler.next_step

    def planted(self, *args):
        if any(len(request.ids) > 20 for request in self.running):
            raise RuntimeError("planted")
        return next_step(self, *args)

    Scheduler.next_step = planted


def main():
    comm, mode = world(), sys.argv[1]
    with nbflow.load("tiny_python", partition="0/1", threads=1) as model:
        draft = nbflow.load("tiny_python", threads=1, comm=SelfComm())
        engine = nbflow.LLMEngine(model)
        if comm.rank:
            if mode == "fail":
                fail_later()
            engine.follow(draft)
            return
        with engine:
            told = outlive(engine, model) if mode == "fail" else lead(model, engine, draft)
        told["state"] = engine.state
        Path(sys.argv[2]).write_text(json.dumps(told))


main()
