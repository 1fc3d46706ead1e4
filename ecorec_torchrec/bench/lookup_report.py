"""What people read of `ecorec bench lookup`: the printed cell, the Markdown tables, the plot."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ecorec_torchrec.bench.lookup import MAX_RELATIVE_ERROR, CellResults, Result

MARKER = "<!-- written by `ecorec bench lookup --report`: do not edit below -->"
_CELL = (
    "device", "id_order", "lookups", "rows", "dim", "rank", "dtype", "threads", "torch", "git_sha",
)  # fmt: skip
_OURS = ("grouped", "numba")
_OURS_IN_TORCH = ("grouped", "torch")
_ECO_REC = ("eco_rec_micro_batched", "numba")
_ECO_REC_IN_TORCH = ("eco_rec_micro_batched", "torch")
_ECO_REC_TUNED = ("eco_rec_tuned", "numba")
_FIRST_FORM = ("grouped_plain", "numba")
_GAINS = (
    ("algorithm, in numba: grouped over EcoRec as published", _ECO_REC, _OURS),
    ("algorithm, in numba: grouped over EcoRec tuned", _ECO_REC_TUNED, _OURS),
    ("algorithm, in PyTorch: grouped over EcoRec", _ECO_REC_IN_TORCH, _OURS_IN_TORCH),
    (
        "algorithm, in PyTorch: grouped over EcoRec, M = 1",
        ("eco_rec", "torch"),
        _OURS_IN_TORCH,
    ),
    ("engine: grouped over its first form, both in numba", _FIRST_FORM, _OURS),
    ("engine: EcoRec in numba over PyTorch", _ECO_REC_IN_TORCH, _ECO_REC),
    ("engine: grouped in numba over PyTorch", _OURS_IN_TORCH, _OURS),
    ("both: ours over EcoRec in PyTorch", _ECO_REC_IN_TORCH, _OURS),
    ("both: ours over EcoRec in PyTorch, M = 1", ("eco_rec", "torch"), _OURS),
    ("both: ours over EL-Rec in PyTorch", ("el_rec", "torch"), _OURS),
    ("both: ours over TT-Rec in PyTorch, chunks of 1,000", ("tt_rec", "torch"), _OURS),
    (
        "both: ours over TT-Rec in PyTorch, chunks of 20,000",
        ("tt_rec_chunk_20000", "torch"),
        _OURS,
    ),
    ("dense: ours over FBGEMM TBE, both SGD", ("dense_sgd", "fbgemm"), _OURS),
    (
        "dense: ours over FBGEMM TBE, both row-wise Adagrad",
        ("dense_rowwise_adagrad", "fbgemm"),
        ("grouped_rowwise_adagrad", "numba"),
    ),
    ("dense: ours over nn.EmbeddingBag, both SGD", ("dense_sgd", "torch"), _OURS),
)
"""(what, slower, faster): the ratio of their steps."""

Row = dict[str, str]


def print_cell(results: CellResults) -> None:
    """Prints a cell; `x ours` is left out where a result is wrong."""
    cell, spec = results.cell, results.cell.spec
    table = Table(
        title=f"{cell.id_order} ids, {len(cell.ids_L):,} lookups, N = {spec.num_embeddings:,}, "
        f"D = {spec.embedding_dim}, r = {spec.ranks[0]}, {results.threads} thread(s), "
        f"sgemm peak {results.peak_gflops:.0f} GFLOP/s",
    )
    for name in ("pattern", "engine", "forward", "backward", "update", "step (min)", "median",
                 "x ours", "of peak", "MiB", "error"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("pattern", "engine") else "right")
    ours = next((r for r in results.results if r.contender.pattern == "grouped" and r.runs), None)
    for result in results.results:
        table.add_row(*_printed(result, ours, results.peak_gflops))
    Console(width=None if Console().is_terminal else 140).print(table)


def _printed(result: Result, ours: Result | None, peak_gflops: float) -> list[str]:
    contender = result.contender
    if not result.runs:
        return [contender.pattern, contender.engine, "", "", "", f"skipped: {result.skipped}"]
    ratio = ""
    if ours is not None and ours.is_right and result.is_right:
        ratio = f"{result.step_ms / ours.step_ms:.2f}"
    fraction = "" if contender.is_dense else f"{result.fraction_of_peak(peak_gflops):.1%}"
    memory = "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f}"
    return [
        contender.pattern, contender.engine, *(f"{result.part_ms(part):.2f}" for part in range(3)),
        f"{result.step_ms:.2f}", f"{result.median_step_ms:.2f}", ratio, fraction, memory,
        f"{result.relative_error:.0e}" + ("" if result.is_right else " WRONG"),
    ]  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def last_runs(rows: list[Row]) -> list[list[Row]]:
    """Per cell the rows of its last run: only they were measured side by side."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    rank_of_run = ""
    for row in rows:  # dense tables have no rank: theirs is that of the rows before them
        rank_of_run = row["rank"] or rank_of_run
        row["rank"] = rank_of_run
    for key, run in groupby(rows, key=lambda row: tuple(row[name] for name in _CELL)):
        runs[tuple(value for name, value in zip(_CELL, key, strict=True) if name != "git_sha")] = (
            list(run)
        )
    return list(runs.values())


def ratio(run: list[Row], slower: tuple[str, str], faster: tuple[str, str]) -> float | None:
    """How many times `faster` fits into `slower`; None if one is missing, skipped or wrong."""
    steps = []
    for pattern, engine in (slower, faster):
        row = next((r for r in run if (r["pattern"], r["engine"]) == (pattern, engine)), None)
        if row is None or not row["max_relative_error"]:
            return None
        if not float(row["max_relative_error"]) <= MAX_RELATIVE_ERROR:
            return None
        steps.append(float(row["step_ms"]))
    return steps[0] / steps[1]


def write_report(rows: list[Row], path: Path) -> None:
    """Replaces what is below the marker line of a Markdown file by the tables of the rows."""
    head = path.read_text(encoding="utf-8").split(MARKER)[0] if path.exists() else ""
    runs = last_runs(rows)
    parts = [head + MARKER, "", *_summary(runs)]
    for run in runs:
        parts += ["", f"## {_title(run)}", "", *_gains(run), "", *_cell_table(run)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _title(run: list[Row]) -> str:
    row = run[0]
    return (
        f"{row['id_order']}, {int(row['lookups']):,} lookups, N = {int(row['rows']):,}, "
        f"D = {row['dim']}, r = {row['rank']}, {row['device']}, {row['threads']} thread(s)"
    )


def _summary(runs: list[list[Row]]) -> list[str]:
    """The gains that tell algorithm from engine, a line per cell."""
    columns = {
        "algorithm, in numba: over EcoRec as published": (_ECO_REC, _OURS),
        "algorithm, in numba: over EcoRec tuned": (_ECO_REC_TUNED, _OURS),
        "algorithm, in PyTorch: over EcoRec": (_ECO_REC_IN_TORCH, _OURS_IN_TORCH),
        "engine: numba over PyTorch": (_OURS_IN_TORCH, _OURS),
        "engine: over our first form": (_FIRST_FORM, _OURS),
        "both: over EcoRec in PyTorch": (_ECO_REC_IN_TORCH, _OURS),
        "both: over TT-Rec in PyTorch": (("tt_rec", "torch"), _OURS),
        "over FBGEMM's dense table, SGD": (("dense_sgd", "fbgemm"), _OURS),
        "over FBGEMM's dense table, row-wise Adagrad": (
            ("dense_rowwise_adagrad", "fbgemm"),
            ("grouped_rowwise_adagrad", "numba"),
        ),
    }
    lines = ["| cell | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for run in runs:
        values = [ratio(run, slower, faster) for slower, faster in columns.values()]
        shown = ["" if value is None else f"{value:.2f}" for value in values]
        lines.append(f"| {_title(run)} | " + " | ".join(shown) + " |")
    return lines


def _gains(run: list[Row]) -> list[str]:
    lines = ["| gain | ratio of step times |", "|---|---|"]
    for what, slower, faster in _GAINS:
        value = ratio(run, slower, faster)
        if value is not None:
            lines.append(f"| {what} | {value:.2f} |")
    return lines


def _cell_table(run: list[Row]) -> list[str]:
    shown = ("pattern", "engine", "forward_ms", "backward_ms", "update_ms", "step_ms",
             "fraction_of_peak", "peak_workspace_mib", "gflop", "gbyte",
             "max_relative_error")  # fmt: skip
    lines = [f"git {run[0]['git_sha']}, torch {run[0]['torch']}", ""]
    lines += ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    return [*lines, *("| " + " | ".join(row[name] for name in shown) + " |" for row in run)]


def draw(rows: list[Row], path: Path) -> None:
    """One panel of bars per cell: step times, logarithmic; needs matplotlib.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'ecorec-torchrec[plot]'") from error
    runs = last_runs(rows)
    figure = Figure(figsize=(9, 2.6 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), squeeze=False)[:, 0], runs, strict=True):
        measured = [row for row in run if row["max_relative_error"]]
        names = [f"{row['pattern']} ({row['engine']})" for row in measured]
        steps = [float(row["step_ms"]) for row in measured]
        axes.barh(names, steps, color=["C1" if "grouped" in name else "C0" for name in names])
        axes.set(xscale="log", xlabel="step, ms", title=_title(run))
        axes.title.set_fontsize(9)
        axes.tick_params(labelsize=7)
        axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
