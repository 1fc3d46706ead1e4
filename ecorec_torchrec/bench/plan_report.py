"""The figures of `ecorec bench plan` as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from ecorec_torchrec.bench.plan import prediction_summary, regret

MARKER = "<!-- written by `ecorec bench plan --report`: do not edit below -->"

Row = Mapping[str, str]

_PREDICTION_SHOWN = (
    "number", "local_batch_size", "embedding_dim", "tables", "tt_tables", "rank", "predicted_ms",
    "measured_ms", "predicted_mib", "measured_mib", "bottleneck",
)  # fmt: skip
_REGRET_SHOWN = ("plan", "tt_tables", "predicted_ms", "measured_ms")


def write_report(folder: Path, path: Path) -> None:
    """Replaces what is below the marker line of a Markdown file by the figures of a folder.

    Args:
        folder: with `planner_prediction.csv` and `planner_regret.csv`, or one of them.
        path: the Markdown file.
    """
    head = path.read_text(encoding="utf-8").split(MARKER)[0] if path.exists() else ""
    parts = [head + MARKER]
    for runs, section in (
        (_runs(folder / "planner_prediction.csv"), _prediction),
        (_runs(folder / "planner_regret.csv"), _regret),
    ):
        for rows in runs:
            parts += ["", *section(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _runs(path: Path) -> list[list[Row]]:
    """The rows of a file, seed by seed."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [[row for row in rows if row["seed"] == seed] for seed in seeds]


def _prediction(rows: Sequence[Row]) -> list[str]:
    summary = [[name, f"{value:.3g}"] for name, value in prediction_summary(rows).items()]
    cells = [[row[column] for column in _PREDICTION_SHOWN] for row in rows]
    return [
        f"## Predicted against measured, seed {rows[0]['seed']}",
        "",
        _made_with(rows),
        "",
        *_table(("figure", "value"), summary),
        "",
        *_table(_PREDICTION_SHOWN, cells),
    ]


def _regret(rows: Sequence[Row]) -> list[str]:
    return [
        f"## Regret, seed {rows[0]['seed']}",
        "",
        f"{_made_with(rows)} The chosen plan's step is {regret(rows):.1%} longer than the best.",
        "",
        *_table(_REGRET_SHOWN, [[row[column] for column in _REGRET_SHOWN] for row in rows]),
    ]


def _made_with(rows: Sequence[Row]) -> str:
    row = rows[-1]
    return (
        f"{row['world_size']} ranks, torch {row['torch']}, torchrec {row['torchrec']}, "
        f"{row['git_sha'] or 'no git'}."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
