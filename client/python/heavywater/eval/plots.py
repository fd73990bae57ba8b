"""Figures of the evaluations as PNG. Curves differ in colour and marker; the colours are safe for colour-blind eyes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heavywater.eval.rows import ADAPTIVE, ORACLE

# Okabe and Ito's palette, and a marker each: two ways to tell curves apart.
_STYLES = {
    "streaming": ("#999999", "v"),
    "h2o": ("#E69F00", "s"),
    "snapkv": ("#56B4E9", "D"),
    "snapkv_h2o": ("#0072B2", "o"),
    "scissorhands": ("#D55E00", "^"),
    "pyramidkv": ("#009E73", "P"),
    "recall": ("#CC79A7", "*"),
}
_OTHER = ("#000000", "x")
_MOST_COLUMNS = 700  # of a map: two dots each


def _figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    import matplotlib  # slow to import, and only some commands draw

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.grid": True,
            "grid.alpha": 0.25,
        }
    )
    return pyplot.subplots(figsize=(width, height), layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def quality_plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """`rows` as `heavywater eval sweep --json` prints them: divergence and perplexity against bytes.

    Without the oracle, which keeps everything.
    """
    figure, (divergence, perplexity) = _figure(11, 5.2, ncols=2)
    for axes, key in ((divergence, "kl"), (perplexity, "ppl")):
        for (name, *variant), curve in _curves(rows).items():
            points = sorted(curve, key=lambda row: row["bytes_ratio"])
            colour, marker = _STYLES.get(name, _OTHER)
            axes.plot(
                [100 * row["bytes_ratio"] for row in points],
                [row[key] for row in points],
                color=colour,
                marker=marker,
                linewidth=1.8,
                markerfacecolor="white" if ADAPTIVE in variant else colour,
                linestyle="--" if ADAPTIVE in variant else ":" if "layer" in variant else "-",
                label=", ".join([name, *variant]),
            )
        axes.set_xlabel("KV bytes on the device, % of the full cache")
    _scale_by_factors(divergence)
    divergence.set_title("Divergence from the full cache")
    divergence.set_ylabel("KL, nats a token (lower is better)")
    perplexity.set_title("Perplexity")
    perplexity.set_ylabel("perplexity (lower is better)")
    for row in rows:
        if row["budget"] is None:
            perplexity.axhline(row["ppl"], color="black", linestyle=":", linewidth=1.2)
            perplexity.annotate(
                f"full cache, {row['ppl']:.1f}",
                (0.98, row["ppl"]),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                xytext=(0, 4),
                ha="right",
                va="bottom",
                fontsize=9,
                bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
            )
            perplexity.margins(y=0.09)  # room for the words above the line
    # Below both, where no curve runs.
    handles, labels = divergence.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9, handlelength=3)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    _save(figure, path)


def _scale_by_factors(axes: Any) -> None:
    """A logarithmic axis whose ticks are numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """By policy; where there are rows in both scopes, or with divided slots, by those, too."""
    drawn = [row for row in rows if row["budget"] is not None and row["policy"] != ORACLE]
    scopes = {row["scope"] for row in drawn}
    curves: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in drawn:
        name = ["recall" if row["recall"] else row["policy"]]
        name += [row["scope"]] if len(scopes) > 1 else []
        name += [ADAPTIVE] if row.get("head_budgets") == ADAPTIVE else []
        curves.setdefault(tuple(name), []).append(row)
    return curves


def mass_plot(shares: npt.NDArray[np.float64], fractions: Sequence[float], path: Path, title: str) -> None:
    """`shares` [layers, fractions]: of the attention, what the top `fractions` of tokens hold."""
    figure, (curves, layers) = _figure(11, 4.6, ncols=2, width_ratios=(1, 1.15))
    percent = 100 * np.asarray(fractions)
    curves.fill_between(
        percent, 100 * shares.min(axis=0), 100 * shares.max(axis=0), color="#56B4E9", alpha=0.3, linewidth=0
    )
    curves.plot(percent, 100 * shares.mean(axis=0), color="#0072B2", linewidth=2)
    curves.plot(percent, percent, color="black", linestyle=":", linewidth=1)
    curves.text(
        60, 54, "all tokens alike", rotation=45, rotation_mode="anchor", transform_rotates_text=True, fontsize=9
    )
    curves.annotate("line: mean of the layers\nband: all layers", (97, 8), ha="right", fontsize=9, color="#0072B2")
    curves.set_title("Attention mass of the heaviest tokens")
    curves.set_xlabel("tokens, % (heaviest first)")
    curves.set_ylabel("attention, %")
    curves.set_xlim(0, 100)
    curves.set_ylim(0, 101)
    image = layers.imshow(
        100 * shares,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        extent=(percent[0], percent[-1], -0.5, len(shares) - 0.5),
    )
    layers.grid(False)
    layers.set_title("By layer")
    layers.set_xlabel("tokens, % (heaviest first)")
    layers.set_ylabel("layer")
    figure.colorbar(image, ax=layers, label="attention, %")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    _save(figure, path)


def mean_columns(shares: npt.NDArray[np.float64], per_column: int) -> npt.NDArray[np.float64]:
    """The mean of every `per_column` positions; NaN where none of them exists."""
    steps, positions = shares.shape
    padded = np.full((steps, -(-positions // per_column) * per_column), np.nan)
    padded[:, :positions] = shares
    groups = padded.reshape(steps, -1, per_column)
    exist = (~np.isnan(groups)).sum(axis=-1)
    means: npt.NDArray[np.float64] = np.where(exist > 0, np.nansum(groups, axis=-1) / np.maximum(exist, 1), np.nan)
    return means


def kept_map(kept: Mapping[str, npt.NDArray[np.float64]], steps: Sequence[int], prompt: int, path: Path) -> None:
    """For each policy [steps, positions]: share of the sets in which a position has a slot, NaN before it exists.

    Long texts: the mean of neighbouring positions, so that none falls between two dots of the picture.
    """
    figure, axes = _figure(11, 0.7 + 1.35 * len(kept), nrows=len(kept), sharex=True, squeeze=False)
    for (name, shares), panel in zip(kept.items(), axes[:, 0], strict=True):
        per_column = -(-shares.shape[1] // _MOST_COLUMNS)
        columns = mean_columns(shares, per_column)
        image = panel.imshow(
            100 * columns,
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            vmin=0,
            vmax=100,
            origin="upper",
            extent=(-0.5, columns.shape[1] * per_column - 0.5, len(steps) - 0.5, -0.5),
        )
        panel.set_xlim(-0.5, shares.shape[1] - 0.5)
        for row in range(1, len(steps)):
            panel.axhline(row - 0.5, color="white", linewidth=1)
        panel.axvline(prompt - 0.5, color="#56B4E9", linewidth=1.2)
        panel.set_title(name, fontsize=10)
        panel.set_yticks(range(len(steps)), [f"+{step}" for step in steps], fontsize=8)
        panel.grid(False)
    axes[-1, 0].set_xlabel("position (the line: where the prompt ends)")
    figure.supylabel("tokens after the prompt", fontsize=10)
    figure.colorbar(image, ax=axes[:, 0], label="in a slot, % of the sets", fraction=0.03)
    _save(figure, path)
