"""Draw docs/architecture.svg: the packages in layers, with the hops of the two walks as numbers.

    python tools/docs/architecture_picture.py

A box uses boxes of the rows below it, never of those above.  The numbers are those of
docs/architecture.md.  A test fails if a package is missing or the picture is stale.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "architecture.svg"

ROWS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "nbflow_experiments",
        (("experiments", "sweeps, measures", "scoring, reports"),),
    ),
    (
        "nbflow: interfaces",
        (
            ("cli", "commands", ""),
            ("server", "OpenAI's API,", "streams, metrics"),
            ("compat", "Inferflow's files", "and protocol"),
            ("benchmark", "timing, llama.cpp,", "machines"),
            ("calibration", "statistics,", "bit allocation"),
            ("first_gpu_run", "facts, speed and", "tests of a GPU"),
        ),
    ),
    (
        "nbflow: requests",
        (
            ("engine", "LLM, LLMEngine,", "scheduler, worker"),
            ("sampling", "strategies,", "logits processors"),
            ("planner", "memory and speed", "of partitions"),
        ),
    ),
    (
        "nbflow: a step",
        (
            ("executor", "CPU, CUDA,", "NumPy reference"),
            ("kv_cache", "block table,", "prefix cache"),
            ("conversion", "quantized", "checkpoints"),
            ("quantization", "format policy,", "transforms"),
        ),
    ),
    (
        "nbflow: a model",
        (
            ("program", "flat list of ops,", "partition, fusion"),
            ("distributed", "ranks, devices,", "links"),
            ("spec", "structure, from", "specs/*.toml"),
            ("tokenization", "tokenizers,", "chat templates"),
            ("checkpoint", "safetensors, GGUF,", "pickles; writers"),
            ("utils", "files, schemas,", "tables"),
        ),
    ),
    (
        "nbflow_kernels: ops",
        (
            ("quantized_matmul", "GEMV, GEMM of", "packed weights"),
            ("attention", "paged, ragged,", "MLA; kv_cache"),
            ("matmul · moe", "convolution ·", "product_keys"),
            ("linear_attention", "delta_rule · hadamard", "gating · state_space"),
            ("norm · activation", "position · embedding", "row_statistics · masks"),
            ("sampling · logits", "penalties · sparse", "· exchange of arrays"),
        ),
    ),
    (
        "nbflow_kernels: formats and toolkits",
        (
            ("quantizers", "weights to formats:", "reference, GPTQ, ..."),
            ("formats", "bytes of weights;", "state_format"),
            ("cpu", "thread pool, graph,", "SIMD · compilation"),
            ("cuda", "driver, launches,", "caches"),
            ("testing", "checks, tolerances;", "benchmarks, rooflines"),
            ("nbflow_ptx", "PTX emulator", "on the CPU"),
        ),
    ),
)
COLORS = ("#b45309", "#1d4ed8")  # walk of a weight, walk of a request
WIDTH, LABEL, BOX_W, BOX_H, STEP_Y, GAP = 1140, 155, 152, 62, 92, 10


def hops(markdown: str) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return walk and numbers (runs as "9-15") of the hops, by package and room.

    A hop is a line ``3. **room** [`name`](../path)`` below a heading ``## Walk``.
    """
    numbers: dict[tuple[str, str], list[tuple[int, list[int]]]] = {}
    for walk, part in enumerate(re.split(r"^## Walk", markdown, flags=re.M)[1:]):
        pattern = r"^(\d+)\. \*\*(\w+)\*\* \[[^]]*\]\(\.\./(?:kernels/)?(\w+)"
        for number, room, package in re.findall(pattern, part, flags=re.M):
            runs = numbers.setdefault((package, room), [])
            if runs and runs[-1][0] == walk and runs[-1][1][-1] == int(number) - 1:
                runs[-1][1].append(int(number))
            else:
                runs.append((walk, [int(number)]))
    return {
        room: [(w, "-".join(str(n) for n in dict.fromkeys((r[0], r[-1])))) for w, r in runs]
        for room, runs in numbers.items()
    }


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(text)}</text>'


def _badges(x: float, y: float, numbers: list[tuple[int, str]]) -> list[str]:
    """Return pills on the upper edge of a box, right-aligned, in the order of the walks."""
    drawn, right = [], x + BOX_W - 2
    for walk, number in reversed(numbers):
        width = 11 + 7 * len(number)
        right -= width
        drawn.append(
            f'<rect x="{right:g}" y="{y - 9:g}" width="{width}" height="18" rx="9" '
            f'fill="{COLORS[walk]}"/>'
        )
        drawn.append(_text(right + width / 2, y + 4, number, 'class="n"'))
        right -= 2
    return drawn


def picture(markdown: str) -> str:
    """Return the SVG, with the hop numbers of a Markdown page."""
    numbers = hops(markdown)
    parts = []
    for row, (label, boxes) in enumerate(ROWS):
        y = 52 + row * STEP_Y
        fill = "#f1f5f9" if row % 2 else "#ffffff"
        parts.append(f'<rect x="0" y="{y - 15}" width="{WIDTH}" height="{STEP_Y}" fill="{fill}"/>')
        package, _, kind = label.partition(": ")
        parts.append(_text(14, y + 24, package, 'class="p"'))
        lines = kind.split(" and ") if len(kind) > 18 else [kind]
        for i, line in enumerate(lines):
            parts.append(_text(14, y + 42 + 15 * i, line if not i else f"and {line}", 'class="d"'))
        for column, (name, first, second) in enumerate(boxes):
            x = LABEL + 10 + column * (BOX_W + GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="5" class="b"/>'
            )
            parts += [
                _text(x + 9, y + 23, name, 'class="r"'),
                _text(x + 9, y + 40, first, 'class="d"'),
                _text(x + 9, y + 54, second, 'class="d"'),
                *_badges(x, y, numbers.get((package, name), [])),
            ]
    height = 52 + len(ROWS) * STEP_Y
    legend = [
        f'<circle cx="24" cy="18" r="9" fill="{COLORS[0]}"/>',
        _text(40, 22, "a weight, from file to GEMV", 'class="d"'),
        f'<circle cx="244" cy="18" r="9" fill="{COLORS[1]}"/>',
        _text(260, 22, "a request, from HTTP to token", 'class="d"'),
        _text(WIDTH - 330, 22, "imports go down, never up", 'class="d"'),
    ]
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#0f172a}"
        ".r{font-size:13px;font-weight:bold}.d{font-size:12px;fill:#475569}"
        ".p{font-size:13px;font-weight:bold;fill:#334155}"
        ".n{font-size:11px;font-weight:bold;fill:#fff;text-anchor:middle}"
        ".b{fill:#fff;stroke:#94a3b8}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        "<title>Packages of nbflow in layers</title>"
        f'<style>{style}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, *legend, *parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
