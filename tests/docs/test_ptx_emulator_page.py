"""The reports shown in docs/ptx_emulator.md are real, and its programs run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ptx.test_planted import KERNELS, f, launch

from nbflow_ptx import Emulator, KernelFault, nvrtc

PAGE = Path(__file__).parents[2] / "docs" / "ptx_emulator.md"
_SHOWN = re.compile(r"<!-- (report|profile): (\w+) -->\n\n```text\n(.*?)\n```", re.S)


def shown_text(kind: str, name: str) -> str:
    """Return the expected content of the page."""
    emulator = Emulator((KERNELS / "planted.ptx").read_text())
    if kind == "profile":
        return str(emulator.launch(name, 1, (32, 32), f(1024), f(1024), profile=True).profile)
    with pytest.raises(KernelFault) as e:
        launch(emulator, name)
    return str(e.value.finding)


def test_reports_are_real() -> None:
    blocks = _SHOWN.findall(PAGE.read_text())
    assert len(blocks) == PAGE.read_text().count("<!-- report:") + 1
    for kind, name, text in blocks:
        assert text == shown_text(kind, name)


@pytest.mark.compiler
@pytest.mark.skipif(not nvrtc.available(), reason="needs numba-cuda: pip install -e '.[cuda-test]'")
def test_programs_run(tmp_path: Path) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    file = tmp_path / "page.py"  # Numba wants a file to read the source from
    file.write_text(program)
    names: dict[str, object] = {"__name__": "page", "__file__": str(file)}
    exec(compile(program, str(file), "exec"), names)
    assert isinstance(names["y"], np.ndarray)
