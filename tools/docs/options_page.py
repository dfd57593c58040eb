"""Write docs/options.md, the tables of all options.

    python tools/docs/options_page.py

A test fails if the page is stale.
"""

from __future__ import annotations

from pathlib import Path

from nbflow.option_fields import OptionField, OptionSet, default_text, describe_bounds, fields
from nbflow.options import (
    EngineOptions,
    LoadOptions,
    SamplingParams,
    SearchParams,
    SpeculativeConfig,
)

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
INTRODUCTION = """\
# Options

Every option is one field of `nbflow/options.py`, from which Python keywords, the command line,
TOML files, HTTP requests and this page are made (`python tools/docs/options_page.py`). A value of
a wrong type or out of bounds gives the same error everywhere. `kv_bytes` is `--kv-bytes` on the
command line, where the table has no other spelling; an option that is on by default has `--no-...`.

"""
LOADING = """\
Keywords of `nbflow.load` (or one `LoadOptions`), options of all commands that load a model, keys of
`[models.NAME]` of a [server's file](server.md#configuration)."""
ENGINE = """\
Keywords of `nbflow.LLMEngine` (or one `EngineOptions`), options of `nbflow serve`, keys of
`[models.NAME.engine]`."""
SPECULATION = """\
Keywords of `LLM.generate`, options of `nbflow run` and `nbflow serve`, keys of `[models.NAME]`.
[Decoding](decoding.md#speculative-decoding) explains them."""
SAMPLING = """\
Keywords of `LLM.generate` (fields of `SamplingParams`), options of `nbflow run`, fields of HTTP
requests, `defaults` of `[models.NAME]`. [Decoding](decoding.md) explains them. Without a value, the
model's default or else the strategy's is taken."""
SEARCHES = """\
Keywords of `nbflow.beam_search` and `contrastive_search`, options of `nbflow run`, fields of HTTP
requests."""
SECTIONS: tuple[tuple[str, str, type[OptionSet]], ...] = (
    ("Loading", LOADING, LoadOptions),
    ("Engine", ENGINE, EngineOptions),
    ("Speculative decoding", SPECULATION, SpeculativeConfig),
    ("Sampling", SAMPLING, SamplingParams),
    ("Searches", SEARCHES, SearchParams),
)


def page() -> str:
    """Return the page."""
    parts = [f"## {title}\n\n{text}\n\n{_table(kind)}" for title, text, kind in SECTIONS]
    return INTRODUCTION + "\n".join(parts)


def _table(kind: type[OptionSet]) -> str:
    http = kind in (SamplingParams, SearchParams)
    lines = ["| option | default | values | meaning |", "|---|---|---|---|"]
    lines += [_row(known, http) for known in fields(kind).values()]
    return "\n".join(lines) + "\n"


def _row(known: OptionField, http: bool) -> str:
    here, names = known.option, [f"`{known.name}`"]
    if here.flags:
        names.append(", ".join(f"`{flag}`" for flag in here.flags))
    if http and here.http:
        names.append(f"HTTP `{here.http}`")
    text = here.help
    if not here.cli and not here.toml:
        text += "; in Python only"
    if here.more:
        text = f"{text.rstrip('.')}. {here.more}".replace(".  ", ". ")
    default = default_text(known) or ("false" if known.default is False else "")
    default = "true" if known.default is True else default
    if http and here.http_default:
        default += f"; HTTP: {here.http_default}"
    cells = ("; ".join(names), default, _values(known), text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(known: OptionField) -> str:
    """Return the values that an option can have."""
    here = known.option
    if known.choices:
        return ", ".join(map(str, known.choices))
    bounds = ""
    if here.low is not None or here.high is not None:
        high = None if here.high in (2**31 - 1, 2**60) else here.high
        bounds = describe_bounds(here.low, high, here.above).removeprefix("in ")
        bounds = bounds.replace(str(2**64 - 1), "2^64 - 1").replace(str(2**63), "2^63")
    if here.http_high is not None:
        bounds += f" (HTTP: at most {here.http_high})"
    return ", ".join(text for text in (bounds, here.unit) if text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
