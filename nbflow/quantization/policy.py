"""Weight format policy: the tensors that are quantized, and the format of each.

The weight format applies to the matrices of attention and feed-forward; norms, biases, expert
routers, the token embedding and the head keep their stored format, as in Inferflow, GPTQ and AWQ,
unless a pattern names them.
So do the per-head matrices of latent attention (attn.k_b, attn.v_b): the columns of a head are not
whole blocks of many formats, and these matrices are less than half a percent of such a model.

A policy file (TOML) gives matrices different formats.  Patterns are shell patterns for our names;
the first match decides, and matrices without a match keep their stored format::

    [formats]
    "layers.0.*" = "q8"
    "*.ffn.down.weight" = "q6"
    "*" = "q3h"

The token embedding, per-layer embeddings and the head follow patterns that begin with their names
and no others: ``"embed.weight" = "q8_0"``, ``"head.*" = "q6"``, ``"layer_embed.weight" = "q4_0"``.

Text with patterns does without a file: ``"*.ffn.*=q4;*.attn.*=q8"``.

A key ``min_elements`` before the table keeps smaller matrices in float16, as Inferflow's
``tensor_quant_threshold``.  A server's file can hold the same keys instead of a file's name.

``nbflow quantize --bits-per-weight`` writes such files, with a table ``[policy]`` that says how.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS

STORED = "stored"
"""Name that keeps the formats of the checkpoint."""
ENDING = ".toml"
"""Suffix that distinguishes a policy file from the name of a weight format."""
SMALL = "f16"
"""Format of matrices with fewer than `WeightFormats.min_elements` elements."""
_LARGEST_FILE_BYTES = 1 << 24


TABLES = ("embed.weight", "layer_embed.weight", "head.weight")
"""Matrices outside of the layers that patterns beginning with their names quantize."""


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return True for the weights of a product; biases of experts and convolutions are not.

    Neither are the decay rates of Mamba-1.
    """
    return len(shape) == 2 and not name.endswith((".bias", "conv.weight", "a_log.weight"))


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return True if the weight format applies to the tensor with our name `name`."""
    kept = (
        "router.weight", "shared_gate.weight", "attn.k_b.weight", "attn.v_b.weight",
        "streams.predict.weight", "streams.correct.weight", "retrieval.down.weight",
        "retrieval.up.weight",
    )  # fmt: skip
    return is_matrix(name, shape) and name.startswith("layers.") and not name.endswith(kept)


@dataclass(frozen=True)
class WeightFormats:
    """The format of each matrix: one for all, or by patterns.

    Examples
    --------
    >>> formats = WeightFormats((("*.ffn.down.weight", "q6_b64t1"), ("*", "q3h_b64t1")))
    >>> formats.of("layers.3.ffn.down.weight", (256, 768))
    'q6_b64t1'
    >>> formats.of("layers.3.attn_norm.weight", (256,)) is None
    True
    """

    patterns: tuple[tuple[str, str], ...]
    """Shell pattern for our names, explicit name of a format."""
    facts: Mapping[str, Any] | None = None
    """The table ``[policy]`` of a file, its provenance; None for a single format (one pattern)."""
    min_elements: int = 0
    """Elements from which a matrix gets its block format; a smaller one becomes `SMALL`."""

    def of(self, name: str, shape: Sequence[int]) -> str | None:
        """Return the format of one of our tensors, or None to keep the stored format."""
        _, found = self._deciding(name, shape)
        if found is None or math.prod(shape) >= self.min_elements:
            return found
        return found if FORMATS[found].block_size == 1 else SMALL

    def _deciding(self, name: str, shape: Sequence[int]) -> tuple[str, str | None]:
        """Return the pattern that decides on a tensor, and its format; empty and None if none."""
        stem = ""
        if name in TABLES and len(shape) == 2:
            stem = name.removesuffix("weight")
        elif not is_quantized(name, shape):
            return "", None
        matching = (e for e in self.patterns if e[0].startswith(stem) and fnmatchcase(name, e[0]))
        return next(matching, ("", None))

    @property
    def is_for_all(self) -> bool:
        """Return True if every matrix gets one of the formats."""
        return any(pattern == "*" for pattern, _ in self.patterns)

    @property
    def block_size(self) -> int:
        """Return the least number of columns that holds whole blocks of the layers' formats.

        Ranks cut tables by rows alone.
        """
        of_tables = tuple(name.removesuffix("weight") for name in TABLES)
        of_layers = (f for pattern, f in self.patterns if not pattern.startswith(of_tables))
        return math.lcm(1, *(FORMATS[format].block_size for format in of_layers))

    def check_used(self, shapes: Mapping[str, Sequence[int]], where: str) -> None:
        """Raise if a pattern decides on no matrix of a model with these tensors."""
        left = {pattern for pattern, _ in self.patterns}
        left -= {self._deciding(name, shape)[0] for name, shape in shapes.items()}
        if left:
            tied = min(left).startswith("head.") and "head.weight" not in shapes
            raise UsageError(
                f"{where}: pattern {min(left)!r} is for no matrix that an earlier one has not "
                "taken; patterns match our names, like layers.0.attn.q.weight"
                + ("; the head of this model is its embedding, embed.weight" if tied else "")
            )


def is_policy_file(text: str) -> bool:
    """Return whether the text names a policy file."""
    return text.lower().endswith(ENDING)


def is_policy(text: str) -> bool:
    """Return whether the text is a policy or names its file, rather than a weight format."""
    return is_policy_file(text) or ("=" in text and text not in FORMATS)


Weights = str | os.PathLike[str] | Mapping[str, Any] | WeightFormats | None
"""Name of a format, patterns with formats, a policy file or its content, formats, or None for the
stored formats."""


def weight_formats(weights: Weights) -> WeightFormats | None:
    """Return the weight formats of a format's name, or of a policy or its file (``.toml``).

    None, or the name "stored", keeps the formats of the checkpoint.

    Examples
    --------
    >>> weight_formats("*.ffn.*=q4_0; *.attn.q.weight=q8_0").patterns
    (('*.ffn.*', 'q4_0'), ('*.attn.q.weight', 'q8_0'))
    """
    if weights is None or isinstance(weights, WeightFormats):
        return weights
    if isinstance(weights, Mapping):
        return _parsed(weights, "weights")
    text = os.fspath(weights)
    if text.lower() == STORED:
        return None
    if not is_policy(text):
        return WeightFormats((("*", FORMATS[text].name),))
    if not is_policy_file(text):
        pairs = (part.partition("=") for part in text.split(";"))
        return _parsed({"formats": {p.strip(): f.strip() for p, _, f in pairs}}, "weights")
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"{path}: policy file not found")
    if path.stat().st_size > _LARGEST_FILE_BYTES:
        raise UsageError(f"{path}: not a policy file: it has {path.stat().st_size:,} bytes")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise UsageError(f"{path}: invalid TOML: {error}") from error
    return _parsed(data, str(path))


def _parsed(data: Mapping[str, Any], where: str) -> WeightFormats:
    """Return the weight formats of a parsed policy file."""
    others = set(data) - {"formats", "policy", "min_elements"}
    if others:
        raise UsageError(
            f"{where}: knows tables [formats] and [policy] and the key min_elements only, got "
            f"{min(others)!r}"
        )
    formats = data.get("formats")
    if not isinstance(formats, dict) or not formats:
        raise UsageError(f'{where}: needs a table [formats] with lines "PATTERN" = "FORMAT"')
    patterns = []
    for pattern, name in formats.items():
        if not isinstance(name, str):
            raise UsageError(f"{where}: the format of {pattern!r} must be text, got {name!r}")
        try:
            patterns.append((pattern, FORMATS[name].name))
        except UsageError as error:
            raise UsageError(f"{where}: {pattern}: {error}") from None
    facts = data.get("policy", {})
    if not isinstance(facts, dict):
        raise UsageError(f"{where}: [policy] must be a table")
    least = data.get("min_elements", 0)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise UsageError(f"{where}: min_elements must be a whole number from 0, got {least!r:.60}")
    return WeightFormats(tuple(patterns), facts, least)


def write_policy(
    out: str | os.PathLike[str], formats: Mapping[str, str], facts: Mapping[str, Any]
) -> None:
    """Write a policy file.

    Parameters
    ----------
    out : path
        The file; an existing one is replaced.
    formats : mapping
        Our name of a matrix -> format.
    facts : mapping
        Text, numbers and lists of text for the table ``[policy]``.
    """
    import tomli_w  # late: most commands read policies only

    comment = "# format of each matrix: nbflow quantize --to FILE, nbflow.load(weights=FILE)"
    tables = tomli_w.dumps({"policy": dict(facts), "formats": dict(formats)})
    Path(out).write_text(f"{comment}\n\n{tables}", encoding="utf-8")
