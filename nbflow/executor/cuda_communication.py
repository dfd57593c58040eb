"""Communication between ranks whose arrays are on devices.

Ops use the device communicators of `nbflow.distributed.device_comms` on the current stream where
there are some, else staging buffers in pinned host memory.  Quantized all-reduces always use the
host: they are for slow networks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nbflow.distributed.comm import Comm
from nbflow.executor.bind import Binder, BoundOp, PythonOp, with_status
from nbflow.executor.cuda_graphs import HostOp
from nbflow.program.cost import sends_q8
from nbflow.program.records import Op


class CudaCommunication(Binder):
    """Communication ops of the CUDA binder."""

    def _all_reduce(self, op: Op, index: int) -> BoundOp:
        ranks, x = op.attrs["ranks"], self._view(op.out)
        comm = self._executor.device_comms.groups.get(ranks)
        if comm is not None and not sends_q8(op):
            return self._communication(op, functools.partial(comm.Allreduce, x))
        group = self._executor.groups[ranks]
        reduce = group.Allreduce_q8 if sends_q8(op) else group.Allreduce

        def call() -> None:
            host = self._executor.to_host(x)
            reduce(host)
            self._executor.to_device(host, x)

        return self._communication(op, call)

    def _all_gather(self, op: Op, index: int) -> BoundOp:
        ranks, widths = op.attrs["ranks"], op.attrs["widths"]
        x, out = self._view(op.inputs[0]), self._view(op.out)
        comm = self._executor.device_comms.groups.get(ranks)
        if comm is not None:
            return self._communication(
                op, functools.partial(comm.Allgather_columns, x, out, widths)
            )
        group = self._executor.groups[ranks]

        def call() -> None:
            host = self._executor.staging_array(out.shape)
            group.Allgather_columns(self._executor.to_host(x), host, widths)
            self._executor.to_device(host, out)

        return self._communication(op, call)

    def _send(self, op: Op, index: int) -> BoundOp:
        x = self._view(op.inputs[0])
        peers = [self._executor.numbers.index(rank) for rank in op.attrs["peers"]]
        device_comm = self._executor.device_comms.comm

        def call() -> None:
            comm: Comm = device_comm or self._executor.comm
            array: Any = x if device_comm else x.get()  # a copy: it may be in flight after the step
            for peer in peers:
                comm.Send_later(array, peer)

        return self._communication(op, call)

    def _recv(self, op: Op, index: int) -> BoundOp:
        peer, out = self._executor.numbers.index(op.attrs["peer"]), self._view(op.out)
        comm = self._executor.device_comms.comm
        if comm is not None:
            return self._communication(op, functools.partial(comm.Recv, out, peer))

        def call() -> None:
            host = self._executor.staging_array(out.shape)
            self._executor.comm.Recv(host, peer)
            self._executor.to_device(host, out)

        return self._communication(op, call)

    @staticmethod
    def _communication(op: Op, call: Callable[[], Any]) -> PythonOp:
        """Return a communication op that reports its state and runs between graphs."""
        return HostOp(op.kind, with_status(op, call))
