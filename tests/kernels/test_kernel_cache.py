"""Kernels made for a format come from the disk in the next process: nothing is compiled twice."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import numpy as np
from numba.core import event
import nbflow_kernels as nk

x = np.ones((5, 64), np.float32)
w = nk.quantize(x, "q4_0", encoder="plain")
with event.install_recorder("numba:compile") as compiled:
    for activations in ("f32", "bf16", "int8"):
        for rows in (x, x[:1]):
            nk.qmatmul(rows, w, activations=activations)
names = [str(e.data["dispatcher"]) for _, e in compiled.buffer if e.is_start]
print(len(names), names)
"""


def test_kernels_of_formats_are_cached_on_disk(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    assert int(first.split()[0]) >= 4
    assert second.split()[0] == "0", second
