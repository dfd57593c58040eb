"""Figure of `nbflow compare-files`: divergence against stored bits."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow_experiments.compare.checkpoint_files import Row, finite, label
from nbflow_experiments.figure_style import GREY, Drawing, new_figure, series_style
from nbflow_experiments.scoring.estimates import Estimate


def draw(rows: Sequence[Row], floor: Estimate, reference: str, n_tokens: int) -> Drawing:
    """Draw the mean KL divergence of each file with its 95 % interval, over its bits."""
    drawn = [r for r in rows if finite(r.kld_mean) and finite(r.bits_per_weight)]
    with new_figure(1, height=3.4, width=5.6) as (figure, (panel,)):
        for i, row in enumerate(drawn):
            assert row.kld_mean is not None
            assert row.bits_per_weight is not None
            error = 1.96 * (row.kld_mean_stderr or 0.0)
            panel.errorbar(
                row.bits_per_weight,
                max(row.kld_mean, 1e-9),
                yerr=[[min(error, 0.99 * max(row.kld_mean, 1e-9))], [error]],
                linestyle="none",
                label=label(row.file),
                capsize=2,
                **series_style(i),
            )
        panel.axhline(max(floor.mean, 1e-9), color=GREY, linewidth=0.9, linestyle="--")
        panel.annotate(
            "noise floor: reference in bfloat16",
            (0.0, max(floor.mean, 1e-9)),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=7,
            color=GREY,
        )
        panel.set_yscale("log")
        panel.set_xlabel("stored bits per weight, all tensors")
        panel.set_ylabel("mean KL divergence (nats per token)")
        if drawn:
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7.5)
    title = f"Divergence of {len(drawn)} files from {reference} in float32"
    caption = (
        f"Mean KL divergence of {n_tokens:,} tokens with 95 % intervals over the stored bits per "
        "weight. Below the dashed line a difference is that of bfloat16 arithmetic."
    )
    return Drawing(figure, title, caption)
