"""Figures of an analysis, drawn from its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nbflow_experiments.analysis.ratios import Table
from nbflow_experiments.figure_style import (
    COLOURS,
    GREY,
    MARKERS,
    Drawing,
    NotDrawn,
    legend_above,
    log_values,
    new_figure,
)

Tables = Mapping[str, Table]
MOST_ROWS = 60
"""Rows of a heat map; a model with more matrices is shown by kind."""
LEAST_SQNR_RANGE_DB = 3.0
"""Full colour of the SQNR heat map at least: half a bit; smaller differences look small."""
EXACT = "f32"


def draw_tensors(tables: Tables) -> Drawing:
    """Return the heat map of SQNR: matrices by formats."""
    table = _needed(tables, "tensors")
    table = table[np.isfinite(table.sqnr_db)]
    if table.empty:
        raise NotDrawn("no format loses anything")
    many = table.tensor.nunique() > MOST_ROWS
    rows = table.kind if many else table.tensor.str.removesuffix(".weight")
    order = table.groupby("weights", sort=False).stored_bits.mean().sort_values().index
    grid = table.assign(row=rows).pivot_table("sqnr_db", "row", "weights", sort=False)[order]
    middle = grid - grid.median()
    most = float(np.nanmax(np.abs(middle.to_numpy())))
    reach = max(LEAST_SQNR_RANGE_DB, most)
    columns = len(order)
    with new_figure(max(1, round((columns + 4) / 4)), 1.2 + 0.17 * len(grid)) as (figure, panels):
        panel = _one_panel(figure, panels)
        image = _heat(panel, middle, reach, [f"{x:.1f}" for x in grid.to_numpy().ravel()])
        bits = table.groupby("weights").stored_bits.mean()
        panel.set_xticks(range(columns), [f"{name}\n{bits[name]:.3g} bit" for name in order])
        panel.set_title("SQNR of each matrix in dB")
        bar = figure.colorbar(image, ax=panel, fraction=0.05, pad=0.02)
        bar.set_label("dB above the format's median")
    caption = (
        "Signal to quantization noise ratio of each matrix. Colours compare a matrix with the "
        "others in the same format: red loses more than the median. The largest difference to a "
        f"median is {most:.2g} dB; 6 dB are one bit."
    )
    return Drawing(figure, "SQNR by matrix and format", caption)


def draw_layers(tables: Tables) -> Drawing:
    """Return residual-stream and matmul errors by layer."""
    table = _needed(tables, "layers")
    if not (table.cumulative_error > 0).any():
        raise NotDrawn("no change loses anything")
    modules = tables["modules"] if len(tables.get("modules", ())) else None
    if modules is not None and not (modules.gain > 0).any():
        modules = None
    with new_figure(1 if modules is None else 2, 3.4) as (figure, panels):
        panel = panels[0]
        for i, (label, rows) in enumerate(table.groupby("change", sort=False)):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            panel.plot(rows.layer, rows.cumulative_error, marker + "-", color=colour)
            end = (rows.layer.iloc[-1], rows.cumulative_error.iloc[-1])
            panel.annotate(label, end, xytext=(6, 0), textcoords="offset points", color=colour,
                           va="center", fontsize=8, annotation_clip=False)  # fmt: skip
            panel.plot(rows.layer, rows.independent_error, ":", color=colour)
            panel.plot(rows.layer, rows.isolated_error, marker + "--", color=colour, mfc="white")
        for line, label in (
            ("-", "this and earlier layers quantized"),
            ("--", "this layer alone"),
            (":", "if errors of layers only added up"),
        ):
            panel.plot([], [], line, color=GREY, label=label)
        log_values(panel.yaxis)
        panel.set_xlabel("layer")
        panel.set_ylabel("relative error of the residual stream")
        _whole_ticks(panel, table.layer)
        if modules is not None:
            _gain_map(figure, panels[1], modules)
        legend_above(figure, panel)
    caption = (
        "Relative error of the residual stream after each layer on the evaluated text, and by what "
        "factor the inputs of a matrix make its relative error larger (red) or smaller (blue)."
    )
    return Drawing(figure, "Errors by layer", caption)


def draw_attribution(tables: Tables) -> Drawing:
    """Return the attribution by kind, layer and matrix, for the first format."""
    table = _needed(tables, "units")
    first = str(table.weights.iloc[0])
    table = table[table.weights == first]
    if not (table.kld_mean_nats > 0).any():
        raise NotDrawn(f"{first} loses nothing")
    shown = [by for by in ("kind", "layer", "tensor") if (table.by == by).any()]
    with new_figure(len(shown), 3.4) as (figure, panels):
        for panel, by in zip(panels, shown, strict=True):
            rows = table[table.by == by]
            if by == "tensor":
                _share_map(panel, rows[rows.counted])
            else:
                _bars(panel, rows)
            panel.set_title(f"{first}, by {by}" + (": share of KLD" if by == "tensor" else ""))
        legend_above(figure, *panels)
    caption = (
        f"Divergence from float32 with only this part in {first}, and what is saved by keeping "
        "only this part in float32, with standard errors. Embedding and head are float32 in the "
        "quantized model, so that nothing can be saved there."
    )
    return Drawing(figure, "Where the divergence comes from", caption)


def draw_kv(tables: Tables) -> Drawing:
    """Return divergence by key and value bits, and attention error by layer."""
    models, layers = _needed(tables, "kv_models"), _needed(tables, "kv_layers")
    sides = {
        "keys alone": (models["values"] == EXACT, "keys_bits"),
        "values alone": (models["keys"] == EXACT, "values_bits"),
        "both": (models["keys"] == models["values"], "keys_bits"),
    }
    with new_figure(2, 3.4) as (figure, panels):
        for i, (label, (chosen, bits)) in enumerate(sides.items()):
            rows = models[chosen & (models.kld_mean_nats > 0)].sort_values(bits)
            panels[0].errorbar(
                rows[bits], rows.kld_mean_nats, rows.kld_mean_nats_stderr,
                fmt=MARKERS[i] + "-", color=COLOURS[i], capsize=2,
            )  # fmt: skip
            panels[0].plot([], [], MARKERS[i] + "-", color=COLOURS[i], label=label)
        both = models[models["keys"] == models["values"]].sort_values("keys_bits")
        for row in both.itertuples():
            panels[0].annotate(row.keys, (row.keys_bits, row.kld_mean_nats), xytext=(3, 5),
                               textcoords="offset points", fontsize=7, color=GREY)  # fmt: skip
        panels[0].set_yscale("log")
        panels[0].set_title("divergence of the model")
        panels[0].set_xlabel("bits per stored key or value")
        panels[0].set_ylabel("KLD from float32 in nat")
        format = _middle_format(both)
        for i, (keys, values) in enumerate(((format, EXACT), (EXACT, format), (format, format))):
            rows = layers[(layers["keys"] == keys) & (layers["values"] == values)]
            panels[1].plot(rows.layer, rows.attention_error, MARKERS[i] + "-", color=COLOURS[i])
        log_values(panels[1].yaxis)
        panels[1].set_title(f"{format}, by layer")
        panels[1].set_xlabel("layer")
        panels[1].set_ylabel("relative error of attention")
        legend_above(figure, panels[0])
        _whole_ticks(panels[1], layers.layer)
    caption = (
        "Divergence from a float32 cache on the evaluated text when keys, values, or both are "
        "stored in fewer bits; error of the attention's results, each layer from exact inputs."
    )
    return Drawing(figure, "Bits of keys and values", caption)


def draw_tokens(tables: Tables) -> Drawing:
    """Return divergence by position in the window and by frequency of the predicted token."""
    table = _needed(tables, "tokens")
    if not (table.kld_mean_nats > 0).any():
        raise NotDrawn("no change loses anything")
    axes = {"position": "tokens before it in the window", "count": "occurrences of the token"}
    with new_figure(2, 3.4) as (figure, panels):
        for panel, (by, name) in zip(panels, axes.items(), strict=True):
            for i, (label, rows) in enumerate(table[table.by == by].groupby("change", sort=False)):
                panel.errorbar(
                    rows.low, rows.kld_mean_nats, rows.kld_mean_nats_stderr, capsize=2,
                    fmt=MARKERS[i % len(MARKERS)] + "-", color=COLOURS[i % len(COLOURS)],
                    label=label,
                )  # fmt: skip
            panel.set_xscale("log", base=2)
            log_values(panel.yaxis)
            panel.set_xlabel(f"{name}, at least")
            panel.set_ylabel("KLD in nat")
        legend_above(figure, panels[0])
    caption = (
        "Divergence from float32 by the position of the predicted token in its window, and by how "
        "often that token occurs in the evaluated text, in groups of powers of two; bars are one "
        "standard error."
    )
    return Drawing(figure, "Errors by position and by frequency", caption)


def draw_activations(tables: Tables) -> Drawing:
    """Return outlier channels and kurtosis of the inputs of matrices, by layer."""
    table = _needed(tables, "activations")
    with new_figure(2, 3.4) as (figure, panels):
        for i, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
            style = {"color": COLOURS[i % len(COLOURS)], "label": f"input of {kind}"}
            marker = MARKERS[i % len(MARKERS)] + "-"
            panels[0].plot(rows.layer, rows.channel_ratio, marker, **style)
            panels[1].plot(rows.layer, rows.input_kurtosis + 3, marker, **style)
        panels[0].set_ylabel("largest channel / median channel")
        panels[1].set_ylabel("kurtosis (3: normal)")
        for panel in panels:
            log_values(panel.yaxis)
            panel.set_xlabel("layer")
            _whole_ticks(panel, table.layer)
        legend_above(figure, panels[0])
    caption = (
        "Inputs of each matrix of the float32 model on the evaluated text: largest root mean "
        "square of a channel over the median of all channels, and kurtosis of all numbers."
    )
    return Drawing(figure, "Outlier channels and tails of activations", caption)


def draw_generation(tables: Tables) -> Drawing:
    """Return the share of greedy continuations that are still the float32 model's."""
    table = _needed(tables, "generation")
    with new_figure(1, 3.4) as (figure, panels):
        panel = panels[0]
        for i, (label, rows) in enumerate(table.groupby("change", sort=False)):
            panel.errorbar(
                rows.tokens, rows.same_share, rows.same_share_stderr, capsize=2,
                fmt=MARKERS[i % len(MARKERS)] + "-", color=COLOURS[i % len(COLOURS)], label=label,
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_ylim(-0.03, 1.03)
        panel.set_xlabel("tokens generated")
        panel.set_ylabel("share of prompts with the same text")
        legend_above(figure, panel)
    caption = (
        "Greedy continuations of the evaluated windows: share that still equals the float32 "
        "model's, token by token; bars are one standard error."
    )
    return Drawing(figure, "Drift of free generation", caption)


FIGURES: dict[str, Callable[[Tables], Drawing]] = {
    "tensors": draw_tensors,
    "layers": draw_layers,
    "attribution": draw_attribution,
    "kv": draw_kv,
    "tokens": draw_tokens,
    "activations": draw_activations,
    "generation": draw_generation,
}
"""Every figure by name; one that lacks its tables raises `NotDrawn`."""


def _needed(tables: Tables, name: str) -> Table:
    table = tables.get(name)
    if table is None or not len(table):
        raise NotDrawn(f"the table {name} is missing")
    return table


def _one_panel(figure: Any, panels: list[Any]) -> Any:
    """Replace the panels by one of full width."""
    for panel in panels:
        panel.remove()
    return figure.add_subplot(1, 1, 1)


def _heat(panel: Any, grid: Table, reach: float, texts: list[str]) -> Any:
    """Draw a table, red below 0 and blue above, with a text in each cell."""
    image = panel.imshow(grid.to_numpy(), cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
    panel.set_yticks(range(len(grid)), grid.index, fontsize=7)
    panel.grid(visible=False)
    numbers = grid.to_numpy().ravel()
    for i, (text, number) in enumerate(zip(texts, numbers, strict=True)):
        row, column = divmod(i, grid.shape[1])
        dark = np.isfinite(number) and abs(number) > 0.65 * reach
        panel.text(column, row, text, ha="center", va="center", fontsize=6.5,
                   color="white" if dark else "black")  # fmt: skip
    return image


def _gain_map(figure: Any, panel: Any, modules: Table) -> None:
    """Draw the gains of matrices, kinds by layers, for the first change that loses anything."""
    first = str(modules[modules.gain > 0].change.iloc[0])
    grid = modules[modules.change == first].pivot_table("gain", "kind", "layer", sort=False)
    gains = np.log2(grid.where(grid > 0))
    reach = max(0.1, float(np.nanmax(np.abs(gains.to_numpy()))))
    texts = [f"{x:.2f}" if grid.shape[1] <= 10 else "" for x in grid.to_numpy().ravel()]
    image = _heat(panel, -gains, reach, texts)
    panel.set_xticks(range(len(grid.columns)), grid.columns)
    panel.set_xlabel("layer")
    panel.set_title(f"gain of each matrix, {first}")
    bar = figure.colorbar(image, ax=panel, fraction=0.06, pad=0.03)
    bar.ax.invert_yaxis()
    at = np.linspace(-reach, reach, 5)
    bar.set_ticks(at, labels=[f"{2.0**-x:.2f}" for x in at])
    bar.set_label("error of outputs / error of weights")


def _share_map(panel: Any, rows: Table) -> None:
    """Draw divergence shares, kinds by layers."""
    grid = rows.pivot_table("kld_share", "kind", "layer", sort=False)
    panel.imshow(grid.to_numpy(), cmap="Blues", vmin=0, aspect="auto")
    panel.set_yticks(range(len(grid)), grid.index)
    panel.set_xticks(range(len(grid.columns)), grid.columns)
    panel.set_xlabel("layer")
    panel.grid(visible=False)
    numbers = grid.to_numpy()
    if grid.shape[1] <= 10:
        for (row, column), share in np.ndenumerate(numbers):
            panel.text(column, row, f"{share:.1%}", ha="center", va="center", fontsize=7,
                       color="white" if share > 0.6 * np.nanmax(numbers) else "black")  # fmt: skip


def _bars(panel: Any, rows: Table) -> None:
    """Draw each group's divergence when quantized alone, and the saving when kept exact."""
    at = np.arange(len(rows))
    alone, saved = rows.kld_mean_nats.to_numpy(), rows.kld_saved_mean_nats.to_numpy()
    panel.bar(at - 0.2, alone, 0.4, yerr=rows.kld_mean_nats_stderr, color=COLOURS[0],
              label="only this quantized", error_kw={"elinewidth": 0.8})  # fmt: skip
    panel.bar(at + 0.2, saved, 0.4, yerr=rows.kld_saved_mean_nats_stderr, color=COLOURS[4],
              label="saved if only this is exact", error_kw={"elinewidth": 0.8})  # fmt: skip
    names = rows.unit.str.removeprefix("layers.")
    panel.set_xticks(at, names, rotation=60 if len(rows) > 8 else 0, fontsize=8)
    panel.grid(visible=False, axis="x")
    by = str(rows.by.iloc[0])
    panel.set_xlabel("kind of matrix" if by == "kind" else by)
    panel.set_ylabel("KLD in nat")
    panel.yaxis.set_major_formatter("{x:g}")
    for x, y in zip(at[np.isnan(saved)], alone[np.isnan(saved)], strict=True):
        panel.annotate("float32", (x, y), xytext=(0, 4), fontsize=6, color=GREY,
                       textcoords="offset points", ha="center")  # fmt: skip


def _middle_format(both: Table) -> str:
    """Return the format, used for both keys and values, nearest to 4 bits."""
    if both.empty:
        raise NotDrawn("no format is used for both keys and values")
    return str(both["keys"].iloc[int(np.argmin(np.abs(both.keys_bits.to_numpy() - 4)))])


def _whole_ticks(panel: Any, layers: Table) -> None:
    last = int(layers.max())
    panel.set_xticks(range(0, last + 1, max(1, (last + 1) // 8)))
