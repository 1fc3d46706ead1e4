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

from ecorec_torchrec.planner import Calibration
from ecorec_torchrec.train.config_file import parse_config
from ecorec_torchrec.train.machine import describe_machine, differences

_GIB = 1 << 30
_BYTES_PER_MS = 1e6  # of one GB/s
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

    machine: dict[str, str] = field(default_factory=dict)
    """What was measured: names and versions; empty for values of data sheets."""

    costs_ns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Measured costs of operations, see `ecorec_torchrec.planner.calibration`."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"{entry.name}={value} must be > 0")
            if self.device == "cuda" and value is None and entry.name in _OF_GPUS:
                raise ValueError(f"{entry.name} is missing for device: cuda")
        self.calibration()  # refuses costs that do not fit

    def for_torchrec(self) -> HardwareConfig:
        """As the `HardwareConfig` of TorchRec's `TopologyFactory`, in bytes and bytes per ms."""

        def per_ms(gb_per_s: float | None) -> float | None:
            return None if gb_per_s is None else gb_per_s * _BYTES_PER_MS

        return HardwareConfig(
            hbm_cap_bytes=None if self.hbm_gib is None else int(self.hbm_gib * _GIB),
            ddr_cap_bytes=int(self.host_dram_gib * _GIB) // self.ranks_per_host,
            hbm_mem_bw=per_ms(self.hbm_gb_per_s),
            ddr_mem_bw=per_ms(self.host_dram_gb_per_s),
            hbm_to_ddr_mem_bw=per_ms(self.pcie_gb_per_s),
            intra_host_bw=per_ms(self.intra_host_gb_per_s),
            inter_host_bw=per_ms(self.inter_host_gb_per_s),
        )

    def calibration(self) -> Calibration:
        """What operations cost: as measured, or as far as the data sheet tells."""
        if self.costs_ns:
            return Calibration(self.costs_ns, self.machine)
        bandwidth = self.host_dram_gb_per_s if self.hbm_gb_per_s is None else self.hbm_gb_per_s
        return Calibration.of_data_sheet(self.fp32_tflops, bandwidth)

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
