"""Figure: cascade attention speed-up against the number of sequences."""

from __future__ import annotations

from nbflow_experiments.figure_style import (
    Drawing,
    NotDrawn,
    equal_speed,
    legend_above,
    log_axis,
    new_figure,
    series_style,
)
from nbflow_experiments.report.data import Results
from nbflow_experiments.report.serving import from_zero, measured, spread

_MOST_PANELS = 4


def draw(results: Results) -> Drawing:
    """Return the figure: a panel per head sizes and cache format, lines per shared length."""
    rows = measured(results, "cascade_shared_speedup")
    own = int(rows.own_keys.min())
    rows = rows[rows.own_keys == own]
    if rows.batch.nunique() < 2:
        raise NotDrawn("the points that succeeded have only one number of sequences")
    panels = spread(list(rows.groupby(["heads", "kv"], sort=False)), _MOST_PANELS)
    variants = (("shared", "one work item", "-"), ("levels", "two levels", ":"))
    with new_figure(max(2, len(panels)), 3.3) as (figure, axes):
        for panel in axes[len(panels) :]:
            panel.set_axis_off()
        for panel, ((heads, kv), part) in zip(axes, panels, strict=False):
            for i, (keys, line) in enumerate(part.groupby("shared_keys")):
                line = line.drop_duplicates("batch").sort_values("batch")
                for variant, word, style in variants:
                    y = line[f"cascade_{variant}_speedup"]
                    label = f"{keys} shared keys, {word}"
                    panel.plot(line.batch, y, linestyle=style, label=label, **series_style(i))
            equal_speed(panel, "separate")
            log_axis(panel, sorted(rows.batch.unique()), "sequences at once")
            panel.set_title(f"{_heads(heads)}; cache {kv}", fontsize=8)
            from_zero(panel)
        axes[0].set_ylabel("speed-up over separate sequences")
        legend_above(figure, axes[0])
    caption = (
        f"Decode attention of sequences whose first keys are on the same pages, with {own} keys "
        "of their own: speed-up over one work item per sequence. The engine uses one work item "
        "for all sequences, which gives the same bits; two levels are two runs and a merge. "
        "Panels: heads, format of the cache. Medians."
    )
    return Drawing(figure, f"Cascade attention; {own} own keys per sequence", caption)


def _heads(heads: str) -> str:
    """Return the setting `heads` in words."""
    if heads.count("/") != 2:
        return "heads of the model"
    query, shared, size = heads.split("/")
    return f"{query} query, {shared} key/value heads of {size}"
