"""PNG plots of a plan (extra `plot`: matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ecorec_torchrec.planner import PlanReport, TableReport
from ecorec_torchrec.train.plots import import_pyplot

_GIB = 1 << 30


def plot_plan(report: PlanReport, folder: Path) -> list[Path]:
    """`ranks.png`: memory and predicted time per rank; `tables.png`: bytes and form per table.

    Args:
        report: of any plan; without predictions the memory is that of weights and cores.
        folder: made if needed.

    Returns:
        The files; none without matplotlib, of which a warning says how to get it.
    """
    pyplot = import_pyplot()
    if pyplot is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "ranks.png", folder / "tables.png"]
    for draw, path in zip((_draw_ranks, _draw_tables), paths, strict=True):
        figure = draw(pyplot, report)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
    return paths


def _draw_ranks(pyplot: Any, report: PlanReport) -> Any:
    figure, (memory_axes, time_axes) = pyplot.subplots(
        2, 1, figsize=(10, 6), sharex=True, layout="constrained"
    )
    ranks = [rank.rank for rank in report.ranks]
    weights = np.array([rank.weight_bytes for rank in report.ranks]) / _GIB
    needed = np.array([rank.needed_bytes or rank.weight_bytes for rank in report.ranks]) / _GIB
    memory_axes.bar(ranks, weights, width=1.0, label="weights and cores")
    rest = np.maximum(needed - weights, 0.0)
    memory_axes.bar(ranks, rest, width=1.0, bottom=weights, label="all that the tables need")
    caps = [rank.cap_bytes / _GIB for rank in report.ranks if rank.cap_bytes is not None]
    if len(caps) == len(ranks):
        memory_axes.step(ranks, caps, where="mid", color="black", label="what there is")
    memory_axes.set(title="memory per rank", ylabel="GiB")
    below = np.zeros(len(ranks))
    for part in report.ranks[0].parts_ms:
        times = np.array([rank.parts_ms[part] for rank in report.ranks])
        if times.any():
            time_axes.bar(ranks, times, width=1.0, bottom=below, label=part)
        below += times
    title = "predicted time per rank"
    if report.imbalance is not None:
        title += f": slowest {report.step_ms:.3f} ms, {report.imbalance:.3f} times the mean"
    time_axes.set(title=title, xlabel="rank", ylabel="ms")
    for axes in (memory_axes, time_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8)
    return figure


def _draw_tables(pyplot: Any, report: PlanReport) -> Any:
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    tables = sorted(report.tables, key=lambda table: -table.dense_bytes)
    dense = [table.dense_bytes for table in tables]
    axes.plot(dense, color="lightgray", zorder=0, label="dense")
    forms = dict.fromkeys(_form(table) for table in tables)
    for form in forms:
        places = [place for place, table in enumerate(tables) if _form(table) == form]
        stored = [tables[place].stored_bytes for place in places]
        axes.scatter(places, stored, s=12, label=f"{form} ({len(places)})")
    axes.set_yscale("log")
    axes.set(title="tables by size", xlabel="table", ylabel="bytes of one copy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _form(table: TableReport) -> str:
    if table.tt is None:
        return f"dense, {table.sharding}"
    return f"TT r={max(table.tt.ranks)}, {table.sharding}"
