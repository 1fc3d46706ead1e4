"""PNG plots of a run (extra `plot`: matplotlib)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


def plot_metrics(histories: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training loss by step, and validation AUC by epoch, of one or more variants.

    Args:
        histories: rows of `metrics.csv` by variant.
        path: the PNG file. Without matplotlib a warning says how to get it.
    """
    pyplot = import_pyplot()
    if pyplot is None:
        return
    figure, (loss_axes, auc_axes) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for variant, history in histories.items():
        train = [row for row in history if row["split"] == "train"]
        val = [row for row in history if row["split"] == "val"]
        loss_axes.plot([r["step"] for r in train], [r["loss"] for r in train], label=variant)
        auc_axes.plot([r["epoch"] for r in val], [r["auc"] for r in val], "o-", label=variant)
    loss_axes.set(title="training loss", xlabel="step", ylabel="log loss (nats)")
    auc_axes.set(title="validation AUC", xlabel="epoch", ylabel="AUC")
    auc_axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss_axes, auc_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_comparison(figures: dict[str, dict[str, float]], path: Path) -> None:
    """Test AUC, embedding bytes and speed of the variants, side by side.

    Args:
        figures: by variant: `auc`, `embedding_bytes`, `samples_per_second`.
        path: the PNG file.
    """
    pyplot = import_pyplot()
    if pyplot is None:
        return
    panels = {
        "auc": "test AUC",
        "embedding_bytes": "embedding bytes, optimizer state included",
        "samples_per_second": "samples per second",
    }
    figure, all_axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axes, (key, title) in zip(all_axes, panels.items(), strict=True):
        values = [figure_row[key] for figure_row in figures.values()]
        bars = axes.bar(list(figures), values, color=["C0", "C1", "C2"][: len(values)])
        axes.bar_label(bars, fmt="%.4f" if key == "auc" else "{:,.0f}", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
        if key == "embedding_bytes":
            axes.set_yscale("log")
        if key == "auc":
            axes.set_ylim(min(0.5, *values), min(1.0, max(values) + 0.05))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def import_pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        warnings.warn(
            "no plots: matplotlib is not installed; `pip install matplotlib`, or ask for none",
            stacklevel=3,
        )
        return None
    return pyplot
