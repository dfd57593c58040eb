"""Read bandwidth of the memories that a model's ranks read, to compare generation with."""

from __future__ import annotations

from nbflow.engine.llm import LLM
from nbflow.executor import Device
from nbflow_kernels.benchmarks.roofline import ReadProbe
from nbflow_kernels.errors import UsageError


class Bandwidth:
    """Bandwidth of the host, or of all devices together; collective over the model's ranks.

    On the host the rank that `leads` reads with the threads of all ranks while the others wait,
    once if there are several.  Where ranks are on devices, every process reads its devices one
    after the other, and its ranks' share of the host, if some are there; the sum counts.
    """

    def __init__(self, model: LLM, leads: bool) -> None:
        self._model = model
        ranks = model.devices()
        self.on_devices = any(rank["key"] for rank in ranks)
        """True if a rank is on a device."""
        self.repeats = self.on_devices or len(ranks) == 1
        """True if every repetition has its own measurement."""
        own = model.workers if self.on_devices else []
        self._places: dict[tuple[str, int], Device] = {
            (place.name, place.ordinal): place
            for place in (worker.executor.device for worker in own)
            if not place.on_host
        }
        n_host = sum(worker.executor.device.on_host for worker in own)
        n_host = n_host if self.on_devices else len(ranks) * leads
        self._host = ReadProbe(threads=n_host * model.threads) if n_host else None

    def measures(self, i: int) -> bool:
        """Return whether repetition `i` is measured."""
        has_probe = self._host is not None or self.on_devices
        return has_probe and (i == 0 or self.repeats)

    def read(self) -> float:
        """Return the bytes per second."""
        total = 0.0 if self._host is None else self._host.bandwidth()
        if not self.on_devices:
            return total
        total += sum(map(_device_bandwidth, self._places.values()))
        if len(self._model.workers) > 1:  # all ranks are in this process
            return total
        comm = self._model.workers[0].comm
        parts = comm.bcast_object(comm.gather_object(total))
        return float(sum(parts))


def _device_bandwidth(place: Device) -> float:
    from nbflow_kernels.benchmarks.device_bandwidth import device_read_bandwidth

    place.activate()
    try:
        return device_read_bandwidth(place.xp)
    except MemoryError as error:
        full: UsageError = place.for_purpose("the probe of the read bandwidth").full(None, error)
        raise full from error
