"""The example of docs/engine.md runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert len(printed) > 60
