"""The folder of a run: configuration, plan, metrics, summary, plots, checkpoints."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

SUMMARY_FILE = "summary.json"  # a run that has it is complete
METRIC_COLUMNS = (
    "step", "epoch", "split", "loss", "auc", "ne", "samples_per_second",
    # Of a step, on the mean rank; see `StepTimes`.
    "step_ms", "lookup_ms", "exposed_comm_ms", "dense_ms", "wait_ms",
    # Of tiered tables, see `tier_figures`.
    "tier_hit_rate", "tier_wait_ms", "tier_memory_bytes", "tier_file_read_bytes",
    "tier_file_written_bytes",
)  # fmt: skip


def prepare_run_folder(folder: Path, *, resume: bool) -> None:
    """Makes the folder; a run that is there already is moved aside, unless it goes on.

    Raises:
        ValueError: `resume` without a run to go on with.
    """
    if resume:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"resume=True: there is no run in {folder}")
        return
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"the earlier run in {folder} is now in {aside}")
    folder.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


class MetricsWriter:
    """Rows of `metrics.csv`, and TensorBoard scalars when asked for.

    Args:
        folder: of the run.
        history: rows of the run so far, when it goes on.
        tensorboard: also write events below `folder/tensorboard`.

    Raises:
        ValueError: `tensorboard` is asked for and not installed.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]], tensorboard: bool) -> None:
        self.history = history
        self._path = folder / "metrics.csv"
        self._events = _summary_writer(folder / "tensorboard") if tensorboard else None
        with open(self._path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, METRIC_COLUMNS)
            writer.writeheader()
            writer.writerows(history)

    def add(self, **row: Any) -> None:
        """Appends a row; the keys are of `METRIC_COLUMNS`."""
        self.history.append(row)
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, METRIC_COLUMNS).writerow(row)
        if self._events is not None:
            for name in METRIC_COLUMNS[3:]:
                if name in row:
                    self._events.add_scalar(f"{row['split']}/{name}", row[name], row["step"])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "output.tensorboard=True: TensorBoard is not installed; "
            "`pip install tensorboard`, or leave the option out"
        ) from None
    return SummaryWriter(str(folder))
