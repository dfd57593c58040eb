"""`nbflow board`: formats at equal stored bits on the bundled model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow.cli import main
from nbflow_experiments.commands import board as command
from nbflow_experiments.compare.board import BUDGETS, N_WINDOWS, board, measure, published

PLUGIN = '''
import numpy as np
import nbflow_kernels as nk
from nbflow_kernels.formats.block_bytes import get_f16, put_f16


class Thirds:
    """Levels -1, 0 and 1 in two bits, and a scale for 16 weights."""

    name = "board_thirds_b16"
    block_size = 16
    block_bytes = 6

    @staticmethod
    def quantize_block(x, out):
        scale = 1.2 * np.abs(x).mean()
        put_f16(out, 0, scale)
        for i in range(4):
            out[2 + i] = 0
        for i in range(16):
            level = 0
            if x[i] > 0.5 * scale:
                level = 2
            elif x[i] > -0.5 * scale:
                level = 1
            out[2 + i // 4] |= level << (2 * (i % 4))

    @staticmethod
    def dequantize_block(block, out):
        for i in range(16):
            out[i] = get_f16(block, 0) * (float((block[2 + i // 4] >> (2 * (i % 4))) & 3) - 1.0)


nk.register_format(Thirds)
'''


def test_parts_are_ordered_and_complete():
    parts = board(published())
    assert tuple(parts) == BUDGETS
    for budget, part in parts.items():
        assert part
        assert all(entry.bits <= budget and len(entry.windows) == N_WINDOWS for entry in part)
        assert [e.divergence for e in part] == sorted(e.divergence for e in part)
    known = {entry.format for entry in published()}
    assert {"q3h_b64t1", "q4_k", "iq2_xxs", "nvfp4"} <= known


def test_published_rows_are_measured_again():
    found = measure("q4_0")
    entry = next(e for e in published() if e.format == "q4_0")
    # float32 sums of other machines: 1e-6 of logits of about 10, in a divergence of 0.02 per window
    np.testing.assert_allclose(found.windows, entry.windows, rtol=2e-3)
    change = found.against(next(e for e in published() if e.format == "mxfp4"))
    assert change.low < change.change < change.high < 0  # q4_0 is clearly better


def test_a_format_of_ones_own_is_placed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", cache(measure))  # for both ways to print it
    file = tmp_path / "my_format.py"
    file.write_text(PLUGIN)
    try:
        with pytest.raises(SystemExit, match="0"):
            main(["board", str(file)])
        lines = capsys.readouterr().out.splitlines()
        (row,) = [line for line in lines if "board_thirds_b16 *" in line]
        assert row.split()[3] == "3"  # (2 + 16 * 2 / 8) bytes for 16 weights
        places = [line.split()[0] for line in lines if " auto " in line]
        assert places.index("iq2_s") < places.index("board_thirds_b16") < places.index("iq3_s")
        with pytest.raises(SystemExit, match="0"):
            main(["board", "board_thirds_b16", "--json"])
        mine = json.loads(capsys.readouterr().out)["entries"][-1]
        assert (mine["format"], mine["published"]) == ("board_thirds_b16", False)
        assert f"{np.mean(mine['windows']):.4f}" == row.split()[4]
    finally:
        nk.unregister_format("board_thirds_b16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q9", "unknown format 'q9'"),
        ("q8_0", "stores 8.5 bits per weight; the board ends at 5"),
        ("empty.py", "registers nothing"),
    ],
)
def test_mistakes(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("'''No format.'''\n")
    given = str(tmp_path / name) if name.endswith(".py") else name
    with pytest.raises(SystemExit, match="2"):
        main(["board", given])
    assert message in capsys.readouterr().err
