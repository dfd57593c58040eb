"""The examples of docs/tokenizers_and_prompts.md run, and its list of templates is complete."""

from __future__ import annotations

import re
from pathlib import Path

from nbflow.tokenization.chat import ROLES, named_templates
from nbflow.tokenization.find_files import NAMES

TEXT = (Path(__file__).parents[2] / "docs" / "tokenizers_and_prompts.md").read_text(
    encoding="utf-8"
)


def test_examples() -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/tokenizers_and_prompts.md", "exec"), {})


def test_lists_are_complete() -> None:
    for name in (*named_templates(), *NAMES):
        assert f"`{name}`" in TEXT
    for role in ROLES:
        assert role in TEXT
