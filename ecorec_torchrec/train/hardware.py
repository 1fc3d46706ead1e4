"""Machines that a plan is made for, as YAML: capacities and speeds of a host and its ranks.

`configs/hardware` has values of data sheets; `ecorec bench machine` writes such a file of this
machine, with what it has measured.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from torchrec.distributed.planner.types import HardwareConfig

from ecorec_torchrec.planner import Calibration, TierSpeeds
from ecorec_torchrec.train.config_file import parse_config
from ecorec_torchrec.train.machine import describe_machine, differences

_GIB = 1 << 30
_BYTES_PER_MS = 1e6  # of one GB/s
_OF_TIERS = (
    "storage_read_gb_per_s",
    "storage_write_gb_per_s",
    "storage_iops",
    "storage_write_iops",
    "tier_lookup_ns",
    "tier_row_ns",
    "tier_moved_row_ns",
)
_OF_GPUS = ("hbm_gib", "hbm_gb_per_s", "pcie_gb_per_s", "inter_host_gb_per_s")


@dataclass(kw_only=True, slots=True)
class HostHardware:
    """A host of equal ranks. GB/s are 1e9 bytes per second, of one direction."""

    ranks_per_host: int
    """GPUs, or processes on CPU."""

    device: Literal["cpu", "cuda"]
    """What a rank computes on."""

    host_dram_gib: float
    """Memory of the host, which its ranks share."""

    host_dram_gb_per_s: float
    """Bandwidth of the host's memory."""

    intra_host_gb_per_s: float
    """Between the ranks of a host, per rank."""

    fp32_tflops: float
    """1e12 operations per second of one rank in fp32 products, a multiply-add counted as two."""

    hbm_gib: float | None = None
    """Memory of one GPU."""

    hbm_gb_per_s: float | None = None
    """Bandwidth of that memory."""

    pcie_gb_per_s: float | None = None
    """Between one GPU and the host's memory."""

    inter_host_gb_per_s: float | None = None
    """Between hosts, per rank; without it TorchRec's default."""

    storage_gib: float | None = None
    """Block storage of the host for tiered tables; without it TorchRec's default per rank."""

    storage_read_gb_per_s: float | None = None
    """Bandwidth of reading it."""

    storage_write_gb_per_s: float | None = None
    """Bandwidth of writing it."""

    storage_iops: float | None = None
    """Pages of 4 KiB that it reads at random, per second."""

    storage_write_iops: float | None = None
    """Pages of 4 KiB that it writes at random, per second."""

    tier_lookup_ns: float | None = None
    """What a rank's host takes to find the slot of one id of a batch."""

    tier_row_ns: float | None = None
    """What it takes to manage one distinct row of a batch."""

    tier_moved_row_ns: float | None = None
    """What it takes to bring a row into its slot and another one out, beside their bytes."""

    machine: dict[str, str] = field(default_factory=dict)
    """What was measured: names and versions; empty for values of data sheets."""

    costs_ns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Measured costs of operations, see `ecorec_torchrec.planner.calibration`."""

    step_bytes: dict[str, float] = field(default_factory=dict)
    """Measured memory of a training step beside its tables, by unit of work of `step`."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"{entry.name}={value} must be > 0")
            if self.device == "cuda" and value is None and entry.name in _OF_GPUS:
                raise ValueError(f"{entry.name} is missing for device: cuda")
        given = [getattr(self, name) is not None for name in _OF_TIERS]
        if any(given) and not all(given):
            missing = [name for name in _OF_TIERS if getattr(self, name) is None]
            raise ValueError(f"{', '.join(missing)} missing: values for tiers come together")
        self.calibration()  # refuses costs that do not fit

    def for_torchrec(self) -> HardwareConfig:
        """As the `HardwareConfig` of TorchRec's `TopologyFactory`, in bytes and bytes per ms."""

        def per_ms(gb_per_s: float | None) -> float | None:
            return None if gb_per_s is None else gb_per_s * _BYTES_PER_MS

        return HardwareConfig(
            hbm_cap_bytes=None if self.hbm_gib is None else int(self.hbm_gib * _GIB),
            ddr_cap_bytes=int(self.host_dram_gib * _GIB) // self.ranks_per_host,
            ssd_cap_bytes=None
            if self.storage_gib is None
            else int(self.storage_gib * _GIB) // self.ranks_per_host,
            hbm_mem_bw=per_ms(self.hbm_gb_per_s),
            ddr_mem_bw=per_ms(self.host_dram_gb_per_s),
            hbm_to_ddr_mem_bw=per_ms(self.pcie_gb_per_s),
            intra_host_bw=per_ms(self.intra_host_gb_per_s),
            inter_host_bw=per_ms(self.inter_host_gb_per_s),
        )

    def calibration(self) -> Calibration:
        """What operations cost: as measured, or as far as the data sheet tells."""
        if self.costs_ns:
            return Calibration(self.costs_ns, self.step_bytes, self.machine)
        bandwidth = self.host_dram_gb_per_s if self.hbm_gb_per_s is None else self.hbm_gb_per_s
        return Calibration.of_data_sheet(self.fp32_tflops, bandwidth)

    def tier_speeds(self) -> TierSpeeds | None:
        """A rank's share of memory and storage; None if the file says nothing of storage."""
        values = [getattr(self, name) for name in _OF_TIERS]
        if None in values:
            return None
        read, write, read_iops, write_iops, *times = values
        lookup_ns, row_ns, moved_row_ns = times
        share = 1 / self.ranks_per_host
        return TierSpeeds(
            read_gb_per_s=read * share,
            write_gb_per_s=write * share,
            read_iops=read_iops * share,
            write_iops=write_iops * share,
            memory_gb_per_s=self.host_dram_gb_per_s * share,
            lookup_ns=lookup_ns,
            row_ns=row_ns,
            moved_row_ns=moved_row_ns,
            link_gb_per_s=self.pcie_gb_per_s,
        )

    def check_is_here(self, ranks_per_host: int) -> None:
        """Refuses measured costs of another machine, or of another number of ranks on this one.

        Raises:
            ValueError: names what differs.
        """
        differ = differences(self.machine, describe_machine(ranks_per_host))
        if self.machine and differ:
            raise ValueError(
                f"plan.hardware was measured elsewhere ({'; '.join(differ)}): renew it by "
                f"`ecorec bench machine --nproc {ranks_per_host}`"
            )


def load_hardware(name_or_path: str) -> HostHardware:
    """Reads a hardware file, or one that ships with the package (`a100`, `h100`, `h200`).

    Raises:
        ValueError: no such file or name, or a file that does not fit; with file and line.
    """
    folder = importlib.resources.files("ecorec_torchrec.configs") / "hardware"
    shipped = {Path(file.name).stem: file for file in folder.iterdir()}
    path = Path(name_or_path)
    if path.is_file():
        return parse_config(path.read_text(encoding="utf-8"), HostHardware, str(path))
    if name_or_path in shipped:
        text = shipped[name_or_path].read_text(encoding="utf-8")
        return parse_config(text, HostHardware, f"{name_or_path}.yaml")
    raise ValueError(
        f"plan.hardware={name_or_path!r}: no such file, and no hardware of that name ships with "
        f"the package (there are: {', '.join(sorted(shipped))})"
    )
