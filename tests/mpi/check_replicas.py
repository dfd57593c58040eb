"""Run on ranks of several hosts by test_hosts.py: one replica per host."""

from __future__ import annotations

import platform

import nbflow
from nbflow.distributed import world


def main() -> None:
    comm = world()
    names = comm.bcast_object(comm.gather_object(platform.node()))
    assert len(set(names)) == comm.size, names
    with nbflow.load("tiny_python", partition="0/1", threads=1) as model:
        engine = nbflow.LLMEngine(model)
        if comm.rank:
            engine.follow()
            return
        with engine:
            addresses = engine._listener.address[0]
            assert not any(host.startswith("127.") for host, _ in addresses), addresses
            asked = [model.make_request("def f(", 20, ignore_eos=True) for _ in range(2)]
            handles = [engine.submit(request) for request in asked]
            first, second = [handle.result(60).ids for handle in handles]
            assert first == second
            loads = [engine.submit(r) for r in model.embedding_requests([[1, 2, 3]] * 2)]
            for handle in loads:
                handle.wait(60)
            assert (loads[0].request.vector == loads[1].request.vector).all()
        print(f"replicas on {', '.join(names)} agree")


main()
