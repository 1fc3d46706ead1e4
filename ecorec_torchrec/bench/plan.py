"""`ecorec bench plan`: what the planner predicts and chooses, against what is measured.

Both checks train on ranks of this machine, whose costs `ecorec bench machine` has measured before.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np

from ecorec_torchrec.bench.measure import append_rows, check_columns, git_sha
from ecorec_torchrec.train.launch import launch_ranks

Row = Mapping[str, object]

PREDICTION_COLUMNS = (
    "seed", "number", "world_size", "local_batch_size", "embedding_dim", "tables", "tt_tables",
    "rank", "lookups_per_sample", "predicted_ms", "measured_ms", "predicted_mib", "measured_mib",
    "bottleneck", "torch", "torchrec", "git_sha",
)  # fmt: skip
REGRET_COLUMNS = (
    "seed", "world_size", "local_batch_size", "embedding_dim", "tables", "tt_tables", "plan",
    "predicted_ms", "measured_ms", "torch", "torchrec", "git_sha",
)  # fmt: skip
CHOSEN = "ecorec"
"""The name of the planner's own plan among the candidates."""


@dataclass(kw_only=True, slots=True)
class PlanBenchOptions:
    """Check predicted against measured steps, or the chosen plan against others.

    prediction: configurations (batch, D, TT rank, number and mix of tables) drawn by seed; step
    time and peak memory as predicted and as measured. regret: 40 tables of the `meta788` list,
    drawn by seed, under a cap that not all can stay dense in; the planner's plan beside EcoRec's
    greedy one, TorchRec's and five random ones. Run it on an otherwise idle machine.
    """

    check: Literal["prediction", "regret"] = "prediction"
    """Which of the two."""

    hardware: str = "machine.yaml"
    """The file of `ecorec bench machine --nproc N`; its number of ranks trains."""

    csv: str = ""
    """Rows are appended to this file; without it docs/benchmarks/planner_<check>.csv."""

    report: str = ""
    """Write the figures of the CSV files in that folder to this Markdown file, below its marker
    line."""

    seed: int = 0
    """Configurations, tables, ids and random plans follow from it."""

    first: int = 0
    """prediction: the first configuration to run, so that a long check can be cut in pieces."""

    last: int = 11
    """prediction: the last one."""

    steps: int = 15
    """Steps that are timed; their median counts."""

    def __post_init__(self) -> None:
        self.csv = self.csv or f"docs/benchmarks/planner_{self.check}.csv"
        if not 0 <= self.first <= self.last:
            raise ValueError(f"--first {self.first} --last {self.last}: 0 <= first <= last")
        for name in ("seed", "steps"):
            least = 0 if name == "seed" else 1
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)}: at least {least}")


def run_plan_check(options: PlanBenchOptions) -> list[Row]:
    """Measures, appends the rows to the CSV file and returns them.

    Raises:
        ValueError: the hardware file is none of this machine, or lacks measured costs.
        RunFailedError: a rank failed.
    """
    from ecorec_torchrec.train.hardware import load_hardware

    hardware = load_hardware(options.hardware)
    if "step" not in hardware.costs_ns:
        raise ValueError(f"--hardware {options.hardware}: no costs measured on CPU ranks")
    hardware.check_is_here(hardware.ranks_per_host)
    columns = PREDICTION_COLUMNS if options.check == "prediction" else REGRET_COLUMNS
    check_columns(Path(options.csv), columns)
    from ecorec_torchrec.bench.plan_prediction import predict_and_measure
    from ecorec_torchrec.bench.plan_regret import measure_plans

    measure = predict_and_measure if options.check == "prediction" else measure_plans
    found = launch_ranks(measure, options, nproc=hardware.ranks_per_host)[0]
    made_with = {
        "torch": version("torch"),
        "torchrec": version("torchrec"),
        "git_sha": git_sha(),
    }
    rows: list[Row] = [{"seed": options.seed, **row, **made_with} for row in found]
    append_rows(Path(options.csv), columns, rows)
    return rows


def read_rows(path: Path, seed: int) -> list[dict[str, str]]:
    """The rows of a seed in a CSV file."""
    with open(path, encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["seed"] == str(seed)]


def prediction_summary(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Errors of predicted steps relative to measured ones, their rank correlation (Spearman's),
    and the range of predicted over measured memory."""
    predicted, measured = (_column(rows, f"{name}_ms") for name in ("predicted", "measured"))
    errors = np.abs(predicted - measured) / measured
    same_order = np.nan  # of one configuration
    if len(rows) > 1:
        same_order = np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1]
    memory = _column(rows, "predicted_mib") / _column(rows, "measured_mib")
    return {
        "configurations": len(rows),
        "step error, median": float(np.median(errors)),
        "step error, 90th percentile": float(np.quantile(errors, 0.9)),
        "Spearman": float(same_order),
        "memory ratio, least": float(memory.min()),
        "memory ratio, greatest": float(memory.max()),
    }


def regret(rows: Sequence[Mapping[str, object]]) -> float:
    """How much longer the chosen plan's step takes than the best plan's, relative to the latter."""
    ms = {str(row["plan"]): float(str(row["measured_ms"])) for row in rows}
    return ms[CHOSEN] / min(ms.values()) - 1


def _column(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def _ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort().argsort()
