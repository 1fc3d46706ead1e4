"""`ecorec plan`."""

from __future__ import annotations

from dataclasses import dataclass

from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig


@dataclass(kw_only=True, slots=True)
class PlanOptions(TrainConfig):
    """Show the plan that `ecorec train` would use for a configuration, without training.

    Takes the options of `ecorec train`; `--nproc` is the number of ranks planned for.
    """

    out: str | None = None
    """Also write the plan to this file, for `ecorec train --plan.file`."""


def run(arguments: list[str]) -> None:
    options = parse_options(PlanOptions, arguments, command="plan")
    import torch

    from ecorec_torchrec.plan import save_plan
    from ecorec_torchrec.train.data import load_dataset
    from ecorec_torchrec.train.model import DENSE, TT
    from ecorec_torchrec.train.placement import make_topology, plan_model

    schema = load_dataset(options.data, options.seed).schema
    device_type = options.train.device
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    topology = make_topology(options, device_type, options.nproc)
    variant = TT if options.tt.tables else DENSE
    planned = plan_model(options, schema, variant, topology)
    planned.report.print()
    if options.out is not None:
        save_plan(planned.plan, options.out, world_size=options.nproc)
        print(f"written to {options.out}")
