"""How many hosts a list of tables needs: to be held, and to be trained at a given speed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import Topology

from ecorec_torchrec.planner import PlanReport, Profile
from ecorec_torchrec.planner.options import main_memory_bytes
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.drawn_tables import draw_tables, drawn_profile
from ecorec_torchrec.train.hardware import load_hardware
from ecorec_torchrec.train.placement import local_batch_size, make_topology, plan_tables
from ecorec_torchrec.train.table_list import ListedTable, read_tables

COLUMNS = (
    "tables", "to hold it", "samples/s", "to reach the rate", "samples/s", "step ms", "bottleneck",
    "tiered", "TT", "read GB/s per host", "written TB/day per host",
)  # fmt: skip
_MOST_HOSTS = 256
_FLOAT_BYTES = 4
_RANK_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)


@dataclass(frozen=True)
class HostsNeeded:
    """Hosts for one way of storing tables; None where no number of them was enough.

    Attributes:
        forms: in which forms tables may be.
        to_hold: the least hosts that have the memory.
        to_hold_samples_per_s: what they train, as predicted.
        to_reach: the least hosts that reach the wanted rate, or `to_hold` without one.
        samples_per_s, step_ms, bottleneck: of these.
        tiered_tables, tt_tables: in their plan.
        read_gb_per_s, written_tb_per_day: of the storage of one of them.
    """

    forms: str
    to_hold: int | None = None
    to_hold_samples_per_s: float | None = None
    to_reach: int | None = None
    samples_per_s: float | None = None
    step_ms: float | None = None
    bottleneck: str | None = None
    tiered_tables: int = 0
    tt_tables: int = 0
    read_gb_per_s: float = 0.0
    written_tb_per_day: float = 0.0

    def cells(self) -> list[str]:
        """Below `COLUMNS`."""

        def text(value: float | None, digits: int = 0) -> str:
            return "-" if value is None else f"{value:,.{digits}f}"

        return [
            self.forms,
            text(self.to_hold),
            text(self.to_hold_samples_per_s),
            text(self.to_reach),
            text(self.samples_per_s),
            text(self.step_ms, 1),
            self.bottleneck or "-",
            str(self.tiered_tables),
            str(self.tt_tables),
            text(self.read_gb_per_s, 2),
            text(self.written_tb_per_day, 1),
        ]


def listed_tables(config: TrainConfig) -> tuple[list[ListedTable], Profile | None]:
    """The tables of a configuration, and what is known of their ids where they may be tiered."""
    if config.data.path is not None:
        return read_tables(config.data.path), None
    drawn = config.data.tables
    return draw_tables(drawn), drawn_profile(drawn) if config.plan.tier_folder else None


def nodes_needed(config: TrainConfig, samples_per_second: float | None) -> list[HostsNeeded]:
    """Plans for ever more hosts, with the global batch of the configuration.

    Args:
        config: a list of tables, `plan.hardware`, and `plan.tier_folder` for the tiered ways.
        samples_per_second: the wanted rate; None for what memory alone asks for.

    Returns:
        Dense in the ranks' own memory; on GPUs, dense with TorchRec's kernels for host memory too
        (UVM); tiered, with a `plan.tier_folder`; TT, where `tt.tables` allows it; and both.

    Raises:
        ValueError: no `plan.hardware`.
    """
    if config.plan.hardware is None:
        raise ValueError("--nodes-needed plans for hosts: say which with --hardware")
    tiers, tt = config.plan.tier_folder is not None, bool(config.tt.tables)
    on_gpu = load_hardware(config.plan.hardware).device == "cuda"
    ways = [_Way("dense", kernels=_RANK_KERNELS)]
    ways += [_Way("dense or UVM")] if on_gpu else []
    ways += [_Way("tiered", tiers=True)] if tiers else []
    ways += [_Way("TT", tt=True)] if tt else []
    ways += [_Way("tiered or TT", tiers=True, tt=True)] if tiers and tt else []
    search = _HostSearch(config, samples_per_second)
    return [search.needed(way) for way in ways]


@dataclass(frozen=True)
class _Way:
    """In which forms tables may be; kernels None stands for all of TorchRec's."""

    name: str
    tiers: bool = False
    tt: bool = False
    kernels: tuple[str, ...] | None = None


class _HostSearch:
    def __init__(self, config: TrainConfig, wanted: float | None) -> None:
        assert config.plan.hardware is not None
        self._config, self._wanted = config, wanted
        self._hardware = load_hardware(config.plan.hardware)
        self._tables, self._profile = listed_tables(config)
        rows = sum(table.num_embeddings for table in self._tables)
        self._dense_bytes = rows * config.model.embedding_dim * _FLOAT_BYTES
        self._global_batch = local_batch_size(config, config.nproc) * config.nproc

    def needed(self, way: _Way) -> HostsNeeded:
        """The least hosts among 1, 2, 3, 4, 6, 8, 12, 16, ..; a step that more hosts do not make
        shorter ends the search."""
        held: HostsNeeded | None = None
        fastest = 0.0
        for hosts in _numbers_of_hosts():
            report = self._report(hosts, way)
            if report is None:
                continue
            line = self._line(way.name, hosts, report, held)
            held = held or line
            rate = line.samples_per_s or 0.0
            if self._wanted is None or rate >= self._wanted:
                return line
            if rate <= fastest:
                break
            fastest = rate
        if held is None:
            return HostsNeeded(way.name)
        return HostsNeeded(way.name, held.to_hold, held.to_hold_samples_per_s)

    def _report(self, hosts: int, way: _Way) -> PlanReport | None:
        config = copy.deepcopy(self._config)
        config.nproc = hosts * self._hardware.ranks_per_host
        config.plan.local_batch_size = -(-self._global_batch // config.nproc)
        config.plan.tier_folder = config.plan.tier_folder if way.tiers else None
        config.tt.tables = config.tt.tables if way.tt else ()
        topology = make_topology(config, self._hardware.device, config.nproc)
        if way.kernels == _RANK_KERNELS and self._dense_bytes > _rank_bytes(topology):
            return None  # without the search for cures that an error comes with
        try:
            _, planner = plan_tables(
                config, self._tables, topology, self._profile, compute_kernels=way.kernels
            )
        except ValueError:  # it does not fit
            return None
        return planner.report

    def _line(
        self, forms: str, hosts: int, report: PlanReport, held: HostsNeeded | None
    ) -> HostsNeeded:
        step_ms = report.step_ms
        assert step_ms
        rate = self._global_batch / step_ms * 1e3
        return HostsNeeded(
            forms,
            held.to_hold if held else hosts,
            held.to_hold_samples_per_s if held else rate,
            hosts,
            rate,
            step_ms,
            report.bottleneck,
            len(report.tiers),
            sum(table.tt is not None for table in report.tables),
            sum(tier.read_gb_per_s(step_ms) for tier in report.tiers) / hosts,
            sum(tier.written_tb_per_day(step_ms) for tier in report.tiers) / hosts,
        )


def _rank_bytes(topology: Topology) -> int:
    """Of the memory that tables without tiers lie in."""
    return sum(main_memory_bytes(device.storage, topology) for device in topology.devices)


def _numbers_of_hosts() -> Sequence[int]:
    """1, 2, 3, 4, 6, 8, 12, ..: a third or half more each."""
    powers = [2**k for k in range(_MOST_HOSTS.bit_length())]
    return sorted({n for p in powers for n in (p, 3 * p // 2) if n <= _MOST_HOSTS})
