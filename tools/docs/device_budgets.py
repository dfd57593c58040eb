"""Table of docs/cuda.md: instruction budgets of several devices, from published numbers."""

from __future__ import annotations

from dataclasses import dataclass

READ_SHARE = 0.9
"""Part of the published bandwidth that reads reach."""
ISSUE_LIMIT = 0.85
"""Share of the issue slots up to which bandwidth is the limit."""


@dataclass(frozen=True)
class Device:
    """Published numbers of a device (NVIDIA's data sheets and architecture papers)."""

    name: str
    terabytes_per_s: float
    n_sms: int
    teraflops: float
    """Dense float16 products with float32 sums."""
    flops_per_cycle: int
    """The same per multiprocessor and cycle: gives the clock."""
    mma_share: float = 1.0
    """Part of the rate that ``mma.sync`` reaches."""

    @property
    def gigahertz(self) -> float:
        """Clock at which the published rate is reached."""
        return self.teraflops * 1e3 / (self.n_sms * self.flops_per_cycle)

    @property
    def slots_per_byte(self) -> float:
        """Issue slots of a lane per byte read."""
        return self.n_sms * 128 * self.gigahertz / (1e3 * READ_SHARE * self.terabytes_per_s)

    @property
    def mma_flops_per_byte(self) -> float:
        """Operations of ``mma.sync`` per byte read."""
        return self.mma_share * self.teraflops / (READ_SHARE * self.terabytes_per_s)


HOPPER_MMA = 0.5
"""``mma.sync`` on Hopper: 490 of 989 TFLOP/s, an estimate; Blackwell is assumed to be alike."""
DEVICES = (
    Device("A100 80 GB", 2.04, 108, 312, 2048),
    Device("RTX 4090", 1.01, 128, 165, 512),
    Device("L40S", 0.864, 142, 362, 1024),
    Device("H100 SXM", 3.35, 132, 989, 4096, HOPPER_MMA),
    Device("H200", 4.8, 132, 989, 4096, HOPPER_MMA),
    Device("B200", 8.0, 148, 2250, 8192, HOPPER_MMA / 2),
)
GEMV = {"q8_0": (1.0625, 1.67), "q4_0": (0.5625, 1.86), "q4_k": (0.578, 2.07), "q3h": (0.5, 2.79),
        "q2_k": (0.328, 2.27)}  # fmt: skip
"""Bytes and instructions of a weight for one token, as in docs/cuda_products.md."""
ATTENTION = (32 << 10, 4 * 32 * 616, 64 * 128 * 2 * 2 * 2 * 16)
"""A chunk of 64 keys of 128 float16 numbers and its values, with float32 queries: bytes,
instructions of all lanes, and operations of 16 rows in two parts, as in docs/attention.md."""
LAYER_BYTES = 139.5e6
"""Bytes of a layer of a decode step, as in docs/cuda.md."""


def budgets() -> str:
    """Return budget, shares of the issue slots and predictions by device."""
    names = " | ".join(f"`{name}`" for name in GEMV)
    lines = [
        "| device | TB/s | SMs | GHz | slots per byte | " + names + " | attention: issue | tensor "
        "| a layer |",
        "|---|" + "---:|" * (len(GEMV) + 7),
    ]
    for device in DEVICES:
        shares = [n / (size * device.slots_per_byte) for size, n in GEMV.values()]
        cells = [f"{device.terabytes_per_s:.2f}", str(device.n_sms), f"{device.gigahertz:.2f}"]
        cells += [f"{device.slots_per_byte:.1f}", *map(_share, shares)]
        n_bytes, instructions, operations = ATTENTION
        cells.append(f"{instructions / (n_bytes * device.slots_per_byte):.0%}")
        cells.append(f"{operations / (n_bytes * device.mma_flops_per_byte):.0%}")
        cells.append(f"{LAYER_BYTES / (READ_SHARE * device.terabytes_per_s * 1e6):.1f} us")
        lines.append(f"| {device.name} | " + " | ".join(cells).replace("%", " %") + " |")
    return "\n".join(lines)


def _share(issue: float) -> str:
    """Return the share of the issue slots, and the predicted bandwidth where it is the limit."""
    return f"{issue:.0%}" + (f" ({READ_SHARE / issue:.0%})" if issue > ISSUE_LIMIT else "")
