"""PNG plots of a profile (extra `plot`: matplotlib)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecorec_torchrec.planner import Profile, TableProfile
from ecorec_torchrec.train.plots import import_pyplot

_TABLES_PER_FILE = 8


def plot_profile(profile: Profile, folder: Path) -> list[Path]:
    """Distinct rows, reuse and coverage of all tables, eight tables to a file.

    Args:
        profile: what to draw.
        folder: made if needed.

    Returns:
        The files; none without matplotlib, of which a warning says how to get it.
    """
    pyplot = import_pyplot()
    if pyplot is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _plot_tables(pyplot, tables, folder / f"profile_{_file_name(tables)}.png")
        for tables in _in_parts(list(profile.tables.values()))
    ]


def _in_parts(tables: list[TableProfile]) -> Iterator[list[TableProfile]]:
    for start in range(0, len(tables), _TABLES_PER_FILE):
        yield tables[start : start + _TABLES_PER_FILE]


def _file_name(tables: list[TableProfile]) -> str:
    return re.sub(r"[^\w.-]", "_", tables[0].name)


def _plot_tables(pyplot: Any, tables: list[TableProfile], path: Path) -> Path:
    figure, all_axes = pyplot.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    distinct_axes, reuse_axes, hot_axes = all_axes
    for color, table in enumerate(tables):
        style: dict[str, Any] = {"color": f"C{color}", "label": table.name}
        sizes = table.by_id.batch_sizes
        distinct_axes.plot(sizes, [table.unique_rows(size) for size in sizes], "o-", ms=3, **style)
        if table.reuse is not None:
            reuse_axes.plot(table.reuse.cache_rows, table.reuse.miss_ratios, **style)
        if table.hot is not None:
            hot_axes.plot(table.hot.rows, table.hot.shares, **style)
    distinct_axes.set(title="distinct rows", xlabel="samples of a batch", ylabel="rows")
    distinct_axes.set_xscale("log", base=2)
    distinct_axes.set_yscale("log")
    reuse_axes.set(title="misses of an LRU cache", xlabel="rows of the cache", ylabel="miss ratio")
    hot_axes.set(title="hottest rows", xlabel="rows", ylabel="share of the lookups")
    for axes in (reuse_axes, hot_axes):
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
    for axes in all_axes:
        axes.grid(alpha=0.3)
    hot_axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
