"""Tables as text: aligned, one line per row."""

from __future__ import annotations

from nbflow.utils.tables import text_table


def test_numbers_are_aligned_to_the_right() -> None:
    rows = [("a", 1_000, "-0.5", "1e-06", "x 1"), ("bb", 7, "12.25%", "nan", "")]
    assert text_table(("name", "n", "share", "rate", "text"), rows).splitlines() == [
        "name     n   share   rate  text",
        "a     1000    -0.5  1e-06  x 1",
        "bb       7  12.25%    nan",
    ]
    assert text_table(("name", "bytes"), []) == "name  bytes"


def test_markdown() -> None:
    assert text_table(("a", "bytes"), [("x", 1)], markdown=True).splitlines() == [
        "| a | bytes |",
        "|---|-------|",
        "| x | 1     |",
    ]
