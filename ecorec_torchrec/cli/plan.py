"""`ecorec plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig

if TYPE_CHECKING:
    from ecorec_torchrec.planner import Baseline, PlanReport


@dataclass(kw_only=True, slots=True)
class PlanOptions(TrainConfig):
    """Show the plan that `ecorec train` would use for a configuration, without training.

    Takes the options of `ecorec train`, and short names for what one may want to change: more
    ranks, less memory, another batch size, other machines.
    """

    world_size: int | None = None
    """Ranks to plan for, in place of `nproc`."""

    hbm: float | None = None
    """GiB of memory of one GPU, in place of `plan.hbm_cap_gib`."""

    batch_size: int | None = None
    """Rows of a batch per rank, in place of `plan.local_batch_size`."""

    hardware: str | None = None
    """a100, h100, h200 or a YAML file, in place of `plan.hardware`."""

    tier_folder: str | None = None
    """A folder on the hosts' storage where tables may be tiered, in place of `plan.tier_folder`."""

    nodes_needed: bool = False
    """For a list of tables: hosts that hold it and hosts that reach `samples_per_second`, dense,
    tiered, and with what `tt` allows; in place of a plan."""

    samples_per_second: float | None = None
    """What all hosts together are to train, for `nodes_needed`; without it memory alone counts."""

    out: str | None = None
    """Also write the plan to this file, for `ecorec train --plan`."""

    json: str | None = None
    """Also write what is predicted to this file: per rank and in sum."""

    plots: str | None = None
    """Also draw ranks and tables into this folder, as PNG files (needs matplotlib)."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        if self.nodes_needed and self.data.name != "tables":
            raise ValueError(f"--nodes-needed is of a list of tables, not of {self.data.name}")
        if self.samples_per_second is not None and not self.nodes_needed:
            raise ValueError("--samples-per-second needs --nodes-needed")
        for name in ("world_size", "hbm", "batch_size", "samples_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be > 0")

    def apply_short_names(self) -> None:
        """Writes the short options to those that they stand for."""
        self.nproc = self.world_size or self.nproc
        self.plan.hbm_cap_gib = self.hbm or self.plan.hbm_cap_gib
        self.plan.local_batch_size = self.batch_size or self.plan.local_batch_size
        self.plan.hardware = self.hardware or self.plan.hardware
        self.plan.tier_folder = self.tier_folder or self.plan.tier_folder


def run(arguments: list[str]) -> None:
    options = parse_options(PlanOptions, arguments, command="plan")
    options.apply_short_names()
    from ecorec_torchrec.plan import save_plan

    if options.nodes_needed:
        _print_nodes_needed(options)
        return
    is_list = options.data.name == "tables"
    plan, report, baselines = _plan_of_list(options) if is_list else _plan_of_data(options)
    report.print()
    for baseline in baselines:
        print(_line_of(baseline))
    if options.out is not None:
        save_plan(plan, options.out, world_size=options.nproc)
        print(f"written to {options.out}")
    if options.json is not None:
        figures = json.dumps(_figures(options, report, baselines), indent=1)
        Path(options.json).write_text(figures + "\n", encoding="utf-8")
        print(f"written to {options.json}")
    if options.plots is not None:
        from ecorec_torchrec.train.plan_plots import plot_plan

        for path in plot_plan(report, Path(options.plots)):
            print(f"written to {path}")


Planned = tuple[Any, "PlanReport", Sequence["Baseline"]]


def _print_nodes_needed(options: PlanOptions) -> None:
    from ecorec_torchrec.train.nodes_needed import COLUMNS, nodes_needed
    from ecorec_torchrec.train.report import print_table

    lines = nodes_needed(options, options.samples_per_second)
    title = "hosts needed, as predicted"
    print_table(title, COLUMNS, [line.cells() for line in lines])
    if options.json is not None:
        figures = json.dumps([dataclasses.asdict(line) for line in lines], indent=1)
        Path(options.json).write_text(figures + "\n", encoding="utf-8")
        print(f"written to {options.json}")


def _plan_of_data(options: PlanOptions) -> Planned:
    """The plan of the model that would be trained."""
    from ecorec_torchrec.train.data import load_dataset
    from ecorec_torchrec.train.model import main_variant
    from ecorec_torchrec.train.placement import make_topology, plan_model

    schema = load_dataset(options.data, options.seed).schema
    topology = make_topology(options, _device_type(options), options.nproc)
    planned = plan_model(options, schema, main_variant(options), topology)
    return planned.plan, planned.report, ()


def _plan_of_list(options: PlanOptions) -> Planned:
    """The plan of a list of tables, beside those of other planners."""
    from ecorec_torchrec.train.nodes_needed import listed_tables
    from ecorec_torchrec.train.placement import local_batch_size, make_topology, plan_tables

    tables, profile = listed_tables(options)
    topology = make_topology(options, _device_type(options), options.nproc)
    plan, planner = plan_tables(options, tables, topology, profile)
    assert planner.report is not None
    global_batch = local_batch_size(options, options.nproc) * options.nproc
    unique_ids = {table.name: table.unique_in(global_batch) for table in tables}
    return plan, planner.report, planner.baselines(unique_ids)


def _device_type(options: PlanOptions) -> str:
    if options.train.device != "auto":
        return options.train.device
    if options.plan.hardware is not None:
        from ecorec_torchrec.train.hardware import load_hardware

        return load_hardware(options.plan.hardware).device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _line_of(baseline: Baseline) -> str:
    if baseline.step_ms is None:
        return f"{baseline.rule}: no placement found"
    over = f"; {baseline.over_cap_ranks} ranks over their cap" if baseline.over_cap_ranks else ""
    return (
        f"{baseline.rule}: {baseline.step_ms:.3f} ms, {baseline.imbalance:.3f} times the mean{over}"
    )


def _figures(
    options: PlanOptions, report: PlanReport, baselines: Sequence[Baseline]
) -> dict[str, Any]:
    return {
        "world_size": options.nproc,
        "hardware": options.plan.hardware,
        "imbalance": report.imbalance,
        "step_ms": report.step_ms,
        "mean_ms": report.mean_ms,
        "indivisible_ms": report.indivisible_ms,
        "over_bound": report.over_bound,
        "bottleneck": report.bottleneck,
        "dense_bytes": report.dense_bytes,
        "stored_bytes": report.stored_bytes,
        "tt_tables": sum(table.tt is not None for table in report.tables),
        "baselines": [
            {
                "rule": baseline.rule,
                "step_ms": baseline.step_ms,
                "imbalance": baseline.imbalance,
                "over_cap_ranks": baseline.over_cap_ranks,
            }
            for baseline in baselines
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "step_ms": rank.step_ms,
                "needed_bytes": rank.needed_bytes,
                "cap_bytes": rank.cap_bytes,
            }
            for rank in report.ranks
        ],
    }
