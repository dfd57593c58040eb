"""Run by mpirun: two replicas, each a process.  What came out is written to a file as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import nbflow
from nbflow.decoding import BeamSearch
from nbflow.parallel import Alone, world

PROMPTS = ["def f(", "class A:\n    def", "import os\n", "for i in"]
LONG = list(range(100, 200))


def asked(model, prompt, seed=0, n=20, **more):
    return model.make_request(prompt, n, "top_p", seed, True, **more)


def lead(model, engine, draft):
    handles = [engine.submit(asked(model, p, 1 + i)) for i, p in enumerate(PROMPTS)]
    told = {"ids": [h.result(60).ids for h in handles]}
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
    told["cancelled"] = list(busy)[-1].finish_reason
    cut = [engine.submit(asked(model, "x", n=400)) for _ in range(2)]
    for handle in cut:
        handle.cancel()
        assert list(handle)[-1].finish_reason == "abort"
    drafted = [
        engine.submit(model.make_request(p, 20, ignore_eos=True, draft=draft, n_draft=19))
        for p in PROMPTS[:2]
    ]
    told["accepted"] = [handle.result(60).n_accepted for handle in drafted]
    told["embedded"] = len(engine.embed([[1, 2], [3]]))
    engine.flush()
    return told


def outlive(model, engine, comm):
    """Go on after the death of the other process."""
    handles = [engine.submit(asked(model, p, n=400)) for p in PROMPTS[:2]]
    ends = [list(h)[-1] for h in handles]
    told = {"ends": sorted(e.finish_reason for e in ends)}
    told["why"] = next(str(e.error) for e in ends if e.error is not None)
    told["again"] = engine.submit(asked(model, PROMPTS[0], 1)).result(60).ids
    told["alive"] = engine.alive
    Path(sys.argv[2]).write_text(json.dumps(told))
    os._exit(0)  # the launcher's part of the other one is no more


def main():
    comm, mode = world(), sys.argv[1]
    with nbflow.load("tiny_python", partition="0/1", threads=1) as model:
        draft = nbflow.load("tiny_python", threads=1, comm=Alone())
        engine = nbflow.Engine(model)
        if comm.rank:
            if mode == "die":
                threading.Thread(target=die_soon, args=(engine,), daemon=True).start()
            engine.follow(draft)
            return
        with engine:
            if mode == "die":
                outlive(model, engine, comm)
            told = lead(model, engine, draft)
        told["state"] = engine.state
        Path(sys.argv[2]).write_text(json.dumps(told))


def die_soon(engine):
    """End in the middle of a text."""
    while not engine._own[0].stats().generated_tokens:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


main()
