"""Exchanges between ranks whose arrays are on devices.

Where `nbflow.distributed.links` has found a way from device to device it is taken, on the current
stream; otherwise the arrays go through pinned memory of the host.  Sums that are rounded to bytes
always do: they are for slow links between hosts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nbflow.distributed.comm import Comm
from nbflow.executor.bind import Binder, Made, PythonOp, noted
from nbflow.executor.cuda_graphs import HostOp
from nbflow.program.cost import is_rounded
from nbflow.program.records import Op


class CudaExchanges(Binder):
    """The part of a `Binder` that makes exchanges."""

    def _all_reduce(self, op: Op, index: int) -> Made:
        ranks, x = op.attrs["ranks"], self._view(op.out)
        link = self._executor.links.groups.get(ranks)
        if link is not None and not is_rounded(op):
            return self._exchange(op, functools.partial(link.Allreduce, x))
        group = self._executor.groups[ranks]
        reduce = group.Allreduce_q8 if is_rounded(op) else group.Allreduce

        def call() -> None:
            host = self._executor.to_host(x)
            reduce(host)
            self._executor.to_device(host, x)

        return self._exchange(op, call)

    def _all_gather(self, op: Op, index: int) -> Made:
        ranks, widths = op.attrs["ranks"], op.attrs["widths"]
        x, out = self._view(op.inputs[0]), self._view(op.out)
        link = self._executor.links.groups.get(ranks)
        if link is not None:
            return self._exchange(op, functools.partial(link.Allgather_columns, x, out, widths))
        group = self._executor.groups[ranks]

        def call() -> None:
            host = self._executor.landing(out.shape)
            group.Allgather_columns(self._executor.to_host(x), host, widths)
            self._executor.to_device(host, out)

        return self._exchange(op, call)

    def _send(self, op: Op, index: int) -> Made:
        x = self._view(op.inputs[0])
        peers = [self._executor.numbers.index(rank) for rank in op.attrs["peers"]]
        link = self._executor.links.comm

        def call() -> None:
            comm: Comm = link or self._executor.comm
            array: Any = x if link else x.get()  # which may be on its way for longer than a step
            for peer in peers:
                comm.Send_later(array, peer)

        return self._exchange(op, call)

    def _recv(self, op: Op, index: int) -> Made:
        peer, out = self._executor.numbers.index(op.attrs["peer"]), self._view(op.out)
        link = self._executor.links.comm
        if link is not None:
            return self._exchange(op, functools.partial(link.Recv, out, peer))

        def call() -> None:
            host = self._executor.landing(out.shape)
            self._executor.comm.Recv(host, peer)
            self._executor.to_device(host, out)

        return self._exchange(op, call)

    @staticmethod
    def _exchange(op: Op, call: Callable[[], Any]) -> PythonOp:
        """Return an exchange between ranks that says where it is; it is no part of a graph."""
        return HostOp(op.kind, noted(op, call))
