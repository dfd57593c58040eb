"""Rules that choose the format of each matrix of a new checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from nbflow.quantization.policy import Weights, weight_formats
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS


class FormatRules:
    """Format of each matrix: the first matching rule, else the policy.

    Parameters
    ----------
    to : str, path or WeightFormats
        Format of the matrices selected by `nbflow.quantization.policy`, or a policy file.
    rules : sequence of str
        ``PATTERN=FORMAT`` each, a shell pattern for names in the new file or for our names.
    """

    def __init__(self, to: Weights, rules: Iterable[str] = ()) -> None:
        formats = weight_formats(to)
        assert formats is not None
        self.formats = formats
        self.to = formats.patterns[0][1] if formats.facts is None else ""
        self.rules = [_parse_rule(rule) for rule in rules]
        self._unused = {text: None for text, _, _ in self.rules}

    def of(self, name: str, ours: Sequence[tuple[str, tuple[int, ...]]]) -> str | None:
        """Return the format of a tensor, or None to keep its stored format.

        `ours` are our names and shapes of its parts; vectors are never converted.
        """
        if not ours or any(len(s) < 2 or own.endswith(".bias") for own, s in ours):
            return None
        for text, pattern, format in self.rules:
            if any(fnmatchcase(n, pattern) for n in (name, *(own for own, _ in ours))):
                self._unused.pop(text, None)
                return format
        chosen = {self.formats.of(own, shape) for own, shape in ours}
        if self.to:  # one format; a tensor with a part that is kept is kept
            return None if None in chosen else self.to
        if len(chosen) > 1:
            found = ", ".join(f"{own} {self.formats.of(own, shape)}" for own, shape in ours)
            raise UsageError(
                f"tensor {name} holds matrices that the policy gives different formats ({found}); "
                "give them one"
            )
        return chosen.pop()

    def check_rules(self) -> None:
        """Raise if a rule never was the first to match."""
        if self._unused:
            raise UsageError(
                f"rule {next(iter(self._unused))!r} is for no matrix that an earlier rule has not "
                "taken; rules match names like layers.0.attn.q.weight, or those that --dry-run "
                "prints, and vectors are not converted"
            )


def _parse_rule(text: str) -> tuple[str, str, str]:
    pattern, equals, format = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"a rule must be PATTERN=FORMAT, e.g. '*down*=q6_k', got {text!r}")
    return text, pattern, FORMATS[format].name
