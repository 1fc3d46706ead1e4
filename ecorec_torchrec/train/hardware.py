"""Machines that a plan is made for, as YAML: capacities and bandwidths of a host and its ranks."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from torchrec.distributed.planner.types import HardwareConfig

from ecorec_torchrec.train.config_file import parse_config

_GIB = 1 << 30
_BYTES_PER_MS = 1e6  # of one GB/s


@dataclass(kw_only=True, slots=True)
class HostHardware:
    """A host of equal ranks. GB/s are 1e9 bytes per second, of one direction."""

    ranks_per_host: int
    """GPUs, or processes on CPU."""

    device: Literal["cpu", "cuda"]
    """What a rank computes on."""

    hbm_gib: float
    """Memory of one GPU."""

    hbm_gb_per_s: float
    """Bandwidth of that memory."""

    host_dram_gib: float
    """Memory of the host, which its ranks share."""

    host_dram_gb_per_s: float
    """Bandwidth of the host's memory."""

    pcie_gb_per_s: float
    """Between one GPU and the host's memory."""

    intra_host_gb_per_s: float
    """Between the ranks of a host, per rank."""

    inter_host_gb_per_s: float
    """Between hosts, per rank."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and not 0 < value < float("inf"):
                raise ValueError(f"{field.name}={value} must be > 0")

    def for_torchrec(self) -> HardwareConfig:
        """As the `HardwareConfig` of TorchRec's `TopologyFactory`, in bytes and bytes per ms."""
        return HardwareConfig(
            hbm_cap_bytes=int(self.hbm_gib * _GIB),
            ddr_cap_bytes=int(self.host_dram_gib * _GIB) // self.ranks_per_host,
            hbm_mem_bw=self.hbm_gb_per_s * _BYTES_PER_MS,
            ddr_mem_bw=self.host_dram_gb_per_s * _BYTES_PER_MS,
            hbm_to_ddr_mem_bw=self.pcie_gb_per_s * _BYTES_PER_MS,
            intra_host_bw=self.intra_host_gb_per_s * _BYTES_PER_MS,
            inter_host_bw=self.inter_host_gb_per_s * _BYTES_PER_MS,
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
