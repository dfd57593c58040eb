"""Communication of device arrays through staging buffers in pinned host memory.

It serves ranks without device communicators (`nbflow.distributed.device_comms`), and quantized
all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbflow.distributed.comm import Comm


class StagedComm:
    """Communicator of device arrays over one of host arrays; methods as in `Comm`.

    The executor (`CudaExecutor`) owns the staging buffers.
    """

    on_stream = False  # the host waits

    def __init__(self, executor: Any, host: Comm) -> None:
        self._executor, self._host = executor, host

    def Allreduce(self, x: Any) -> None:
        """See `Comm.Allreduce`."""
        self._reduce(self._host.Allreduce, x)

    def Allreduce_q8(self, x: Any) -> None:
        """See `Comm.Allreduce_q8`."""
        self._reduce(self._host.Allreduce_q8, x)

    def _reduce(self, reduce: Callable[[np.ndarray], None], x: Any) -> None:
        staged = self._executor.to_host(x)
        reduce(staged)
        self._executor.to_device(staged, x)

    def Allgather_columns(self, part: Any, whole: Any, widths: Sequence[int]) -> None:
        """See `Comm.Allgather_columns`."""
        staged = self._executor.staging_array(whole.shape)
        self._host.Allgather_columns(self._executor.to_host(part), staged, widths)
        self._executor.to_device(staged, whole)

    def send_all(self, x: Any, peers: Sequence[int]) -> None:
        """See `Comm.send_all`."""
        self._host.send_all(self._executor.to_host(x), peers)  # sends a copy

    def Recv(self, x: Any, source: int) -> None:
        """See `Comm.Recv`."""
        staged = self._executor.staging_array(x.shape)
        self._host.Recv(staged, source)
        self._executor.to_device(staged, x)
