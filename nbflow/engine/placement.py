"""What lies in the host's memory, or is computed by it, beside a device.

As in Inferflow: the keys and values of the *last* layers of a rank, the token embedding, and the
*first* layers altogether.  A device's kernels read and write the pages and the embedding where they
are, in pinned memory over the bus; nothing is copied to and fro.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nbflow.execute.place import Place
from nbflow_kernels.errors import UsageError


def is_host(device: str) -> bool:
    """Return whether the names of devices are all the host's."""
    return all(name.strip() in ("auto", "cpu") for name in device.split(","))


@dataclass(frozen=True)
class Placement:
    """What is to lie in the host's memory where a rank has a device of its own."""

    kv_host_percent: float = 0.0
    """Share of the layers, 0..100, whose keys and values; the last ones of each rank."""
    embeddings_on_host: bool = False
    """Whether the tables that are only looked up, not those of a tied head."""
    cpu_layers: int = 0
    """How many of the first layers are computed by the host, too."""

    def __post_init__(self) -> None:
        if not 0 <= self.kv_host_percent <= 100:
            raise UsageError(f"kv_host_percent must be in 0..100, got {self.kv_host_percent:g}")
        if self.cpu_layers < 0:
            raise UsageError(f"cpu_layers must be at least 0, got {self.cpu_layers}")

    @property
    def note(self) -> str:
        """What to tell who has asked for something on a host without devices; empty for nothing."""
        asked = [
            f"{name}={value:g}" if not isinstance(value, bool) else name
            for name, value in dataclasses.asdict(self).items()
            if value
        ]
        if not asked:
            return ""
        return (
            f"everything lies in the host's memory and is computed by its processor, so that "
            f"{', '.join(asked)} change{'s' if len(asked) == 1 else ''} nothing"
        )

    def host_layers(self, n_layers: int) -> int:
        """Return how many of a rank's layers have their keys and values in the host's memory.

        Examples
        --------
        >>> Placement(kv_host_percent=50).host_layers(5)
        2
        """
        return int(n_layers * self.kv_host_percent / 100)

    def on(self, place: Place) -> Placement:
        """Return this, or for a rank of the host's that nothing is asked for."""
        return Placement() if place.on_host else self

    def divide(self, n_layers: int, partition: str, device: str) -> tuple[str, str]:
        """Return partition and devices with the first layers on a rank of the host's.

        Raises
        ------
        UsageError
            If there are not so many layers, or the partition has several ranks.

        Examples
        --------
        >>> Placement(cpu_layers=2).divide(8, "0", "cuda")
        ('0:2;1:6', 'cpu,cuda')
        """
        if not self.cpu_layers or is_host(device):
            return partition, device
        if self.cpu_layers > n_layers:
            raise UsageError(
                f"cpu_layers must be at most {n_layers}, the model's layers, got {self.cpu_layers}"
            )
        if partition != "0" or "," in device:
            raise UsageError(
                f"cpu_layers={self.cpu_layers} goes with one rank on one device; for several, name "
                f"the host's among them, e.g. partition='0:2;1:6', device='cpu,cuda'; got "
                f"partition={partition!r}, device={device!r}"
            )
        if self.cpu_layers == n_layers:
            return partition, "cpu"
        return f"0:{self.cpu_layers};1:{n_layers - self.cpu_layers}", f"cpu,{device}"
