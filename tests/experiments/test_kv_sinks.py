"""First tokens in floats next to a quantized cache."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_experiments.analysis.kv_sinks import _Model, sink_divergence
from nbflow_kernels.errors import UsageError

WINDOWS = np.random.default_rng(0).integers(0, 2048, (3, 24)).tolist()


def test_kept_tokens_leave_the_divergence_of_the_others() -> None:
    found = sink_divergence("tiny_python", ["q2"], WINDOWS, sinks=(0, 20, 23))
    assert found.sinks.tolist() == [0, 20, 23]
    none, most, all_but_one = found.kld
    # the last token alone is rounded: its own key and value remain
    assert none > most > all_but_one > 0
    assert found.gain.tolist() == pytest.approx([0, none - most, none - all_but_one])
    assert found.gain_stderr[0] == 0 < found.gain_stderr[1]


def test_float_caches_lose_nothing() -> None:
    found = sink_divergence("tiny_python", ["f32"], WINDOWS, sinks=(0,))
    assert abs(found.kld[0]) < 1e-9  # keys and values rounded to float32


def test_pieces_of_a_window_keep_the_same_tokens() -> None:
    model = _Model("tiny_python", "q2/f16", 5, "none")
    rows = np.random.default_rng(1).standard_normal((12, 4, 32))
    whole = model._round(rows, 0, 0)
    pieces = np.concatenate([model._round(rows[:3], 0, 0), model._round(rows[3:], 0, 3)])
    np.testing.assert_array_equal(whole, pieces)
    np.testing.assert_array_equal(whole[:5], rows[:5])
    assert (whole[5:] != rows[5:]).mean() > 0.9


def test_windows_must_be_longer_than_the_kept_tokens() -> None:
    with pytest.raises(UsageError, match="more than 4 tokens, found windows of"):
        sink_divergence("tiny_python", ["q2"], [[1, 2], [3, 4]])
