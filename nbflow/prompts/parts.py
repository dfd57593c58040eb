"""A prompt as text and tokens."""

from __future__ import annotations


class Parts:
    """Text, in which no special token is meant, and tokens between.

    Attributes
    ----------
    items : list of str or int
        For `nbflow.tokenizer.Tokenizer.encode_parts`.
    shown : str
        The same as text, tokens as they are spelt.
    """

    def __init__(self) -> None:
        self.items: list[str | int] = []
        self.shown = ""

    def text(self, text: str) -> None:
        """Add text."""
        if text:
            self.items.append(text)
            self.shown += text

    def token(self, token: tuple[int, str]) -> None:
        """Add a token: its id and its spelling."""
        self.items.append(token[0])
        self.shown += token[1]
