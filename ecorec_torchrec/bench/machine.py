"""Microbenchmarks of this machine, for the planner: a hardware file with measured costs.

Takes the place of the bandwidths that TorchRec's `planner/constants.py` lists by kernel.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import yaml

from ecorec_torchrec.bench.cost_fit import fit_costs, median_error
from ecorec_torchrec.bench.measure import git_sha
from ecorec_torchrec.train.hardware import HostHardware, load_hardware
from ecorec_torchrec.train.launch import launch_ranks
from ecorec_torchrec.train.machine import describe_machine, differences

_GIB = 1 << 30
_DIGITS = 4


@dataclass(kw_only=True, slots=True)
class MachineBenchOptions:
    """Measure what copies, products, lookups, collectives and files cost on this machine.

    Writes a hardware file for `ecorec plan --hardware FILE` and `plan.hardware`. A file that is
    there and was measured on this machine, with these versions, is left as it is. Run it on an
    otherwise idle machine; it takes less than two minutes.
    """

    out: str = "machine.yaml"
    """The file to write."""

    nproc: int = 1
    """Ranks of this machine that train together: they share its cores and measure together."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a GPU is found."""

    renew: bool = False
    """Measure even if the file is still valid."""

    scale: float = 1.0
    """Sizes of what is measured, as a multiple of the usual ones."""

    repeats: int = 7
    """Times that each size is measured; the median counts."""

    rounds: int = 2
    """Times that all of it is done; the faster one counts, so that a slow moment of the machine
    does not fall on one operation."""

    folder: str = "."
    """Where a file is written and read to measure block storage."""

    def __post_init__(self) -> None:
        for name in ("nproc", "repeats", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: at least 1")
        if not 0 < self.scale <= 1:
            raise ValueError(f"--scale {self.scale}: above 0, at most 1")
        if not Path(self.folder).is_dir():
            raise ValueError(f"--folder {self.folder}: no such folder")


def measure_machine(options: MachineBenchOptions) -> tuple[HostHardware, dict[str, float]]:
    """Measures on `nproc` ranks at once.

    Returns:
        The machine, and by operation how far its fitted costs are from the measured times in the
        median, relative to these.

    Raises:
        RunFailedError: a rank failed.
    """
    from ecorec_torchrec.bench.machine_rank import measure_on_rank

    samples = launch_ranks(measure_on_rank, options, nproc=options.nproc)[0]
    costs_ns = {name: _rounded(costs) for name, costs in samples.costs_ns().items()}
    errors = {name: median_error(found, fit_costs(found)) for name, found in samples.ms.items()}
    step_bytes = _rounded(fit_costs(samples.step_bytes)) if samples.step_bytes else {}
    return _hardware(options, costs_ns, step_bytes), errors


def still_valid(options: MachineBenchOptions) -> str | None:
    """Why a new measurement is needed, or None: the file holds one of this machine."""
    if options.renew or not Path(options.out).is_file():
        return "--renew" if options.renew else f"{options.out}: no such file"
    measured = load_hardware(options.out)
    if not measured.machine:
        raise ValueError(f"--out {options.out}: a file of data sheet values, not replaced")
    differ = differences(measured.machine, describe_machine(options.nproc))
    if measured.device != _device(options):
        differ.append(f"device: {measured.device} there, {_device(options)} asked for")
    return "; ".join(differ) or None


def _device(options: MachineBenchOptions) -> Literal["cpu", "cuda"]:
    import torch

    return "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"


def write_hardware(hardware: HostHardware, path: Path) -> None:
    """As YAML, with what was measured when in its head."""
    head = (
        f"# Measured by `ecorec bench machine` on {hardware.ranks_per_host} ranks at once "
        f"(torch {version('torch')}, {git_sha() or 'no git'}).\n"
        "# costs_ns: nanoseconds per unit of work, see ecorec_torchrec/planner/calibration.py.\n"
    )
    values = {name: value for name, value in asdict(hardware).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def _hardware(
    options: MachineBenchOptions,
    costs_ns: dict[str, dict[str, float]],
    step_bytes: dict[str, float],
) -> HostHardware:
    import torch

    on_gpu = _device(options) == "cuda"
    copy_gb_per_s = 2 / costs_ns["copy"]["bytes"]  # a copied byte is read and written
    host_copy = costs_ns["host_copy" if on_gpu else "copy"]
    link = costs_ns.get("all_to_all", {}).get("bytes", 0.0)
    return HostHardware(
        ranks_per_host=options.nproc,
        device=_device(options),
        host_dram_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 2),
        host_dram_gb_per_s=_round(2 / host_copy["bytes"]),
        # One rank alone talks to nobody; what it would find is the memory's bandwidth.
        intra_host_gb_per_s=_round(1 / link if link else copy_gb_per_s),
        fp32_tflops=_round(1e-3 / costs_ns["gemm"]["flops"]),
        hbm_gib=torch.cuda.mem_get_info()[1] / _GIB if on_gpu else None,
        hbm_gb_per_s=_round(copy_gb_per_s) if on_gpu else None,
        pcie_gb_per_s=_round(1 / costs_ns["to_device"]["bytes"]) if on_gpu else None,
        inter_host_gb_per_s=_round(1 / link if link else copy_gb_per_s) if on_gpu else None,
        machine=describe_machine(options.nproc),
        costs_ns=costs_ns,
        step_bytes=step_bytes,
    )


def _rounded(costs: dict[str, float]) -> dict[str, float]:
    return {unit: _round(cost) for unit, cost in costs.items()}


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
