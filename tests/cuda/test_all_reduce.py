"""The all-reduce kernels, all ranks in one launch on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbflow_kernels import cuda
from nbflow_kernels.cuda import all_reduce
from nbflow_kernels.cuda.all_reduce import AllReduce, memory_bytes
from nbflow_kernels.errors import UsageError

pytestmark = pytest.mark.compiler


def group(cupy: Any, n_ranks: int, most_bytes: int) -> tuple[AllReduce, Any]:
    """Return all ranks on one device, with memory that starts as ranks' memory does."""
    memory = cupy.zeros((n_ranks, memory_bytes(most_bytes)), np.uint8)
    bases = [cuda.address(memory[r]) for r in range(n_ranks)]
    return AllReduce(bases, -1, most_bytes, cuda.device_of(memory), n_blocks=2), memory


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ranks_get_the_same_sum_in_order_round_after_round(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any
) -> None:
    monkeypatch.setattr(all_reduce, "ONE_SHOT_BYTES", 1 << 20 if name == "one_shot" else 0)
    reduce, memory = group(cupy, 4, 4 * 700)
    rng = np.random.default_rng(7)
    for n in (700, 37, 5, 700):  # both buffers, fewer units than threads, a short last unit
        x = rng.standard_normal((4, n)).astype(dtype)
        want = x[0].astype(np.float32)
        for part in x[1:]:
            want = want + part.astype(np.float32)
        got = reduce(cupy.asarray(x)).get()
        for r in range(4):
            np.testing.assert_array_equal(got[r], want.astype(dtype))
    assert memory is not None  # the addresses above point into it


def test_bfloat16_is_rounded_once(cupy: Any) -> None:
    reduce, _memory = group(cupy, 3, 64)
    x = np.float32([[1.0, 3.0], [2**-8, 2**-7], [2**-8, 2**-7]])  # each alone would be lost
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    got = reduce(cupy.asarray(bits)).get()
    np.testing.assert_array_equal(
        got[1].astype(np.uint32) << 16, np.float32([1 + 2**-7, 3 + 2**-6]).view(np.uint32)
    )


def test_wrong_groups_and_messages_are_named(cupy: Any) -> None:
    reduce, _memory = group(cupy, 2, 64)
    with pytest.raises(UsageError, match="at most 64 bytes, got 68"):
        reduce(cupy.zeros((2, 17), np.float32))
    with pytest.raises(TypeError, match="got float64"):
        reduce(cupy.zeros((2, 3)))
    device = cuda.device_of(cupy.zeros(1))
    with pytest.raises(UsageError, match=r"rank must be 0\.\.1"):
        AllReduce([1, 2], 2, 64, device)
    with pytest.raises(UsageError, match=r"1\.\.8 addresses, got 9"):
        AllReduce(range(9), 0, 64, device)
