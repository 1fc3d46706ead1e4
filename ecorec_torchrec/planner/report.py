"""What a plan does, as a table for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.table import Table
from torch import nn
from torchrec.distributed.planner.types import Perf, ShardingOption, Topology
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from ecorec_torchrec.plan import is_tt, tiers_of
from ecorec_torchrec.plan.tables import ModelTable, model_tables
from ecorec_torchrec.tt import TTSpec

from .options import main_memory_bytes
from .step_model import StepPrediction
from .tier_report import TIER_HEADER, TierReport, tier_reports


@dataclass(frozen=True)
class TableReport:
    """One table of a plan.

    Args:
        module, name: where it is in the model.
        kernel: `tt` or TorchRec's compute kernel.
        sharding: TorchRec's sharding type.
        ranks: where its shards lie.
        num_embeddings, embedding_dim: N and D.
        dense_bytes: of the N x D weight.
        stored_bytes: of one copy as planned: of all cores for a TT table.
        weight_bytes: rank -> bytes of its shards.
        tt: the shape of the cores.
    """

    module: str
    name: str
    kernel: str
    sharding: str
    ranks: tuple[int, ...]
    num_embeddings: int
    embedding_dim: int
    dense_bytes: int
    stored_bytes: int
    weight_bytes: dict[int, int]
    tt: TTSpec | None

    @property
    def ratio(self) -> float:
        """How many times smaller than dense."""
        return self.dense_bytes / self.stored_bytes


@dataclass(frozen=True)
class RankReport:
    """One rank of a plan.

    Args:
        weight_bytes: the tables' weights and cores on it.
        needed_bytes: predicted, with gradients, optimizer state, lookups and the tables' share of
            inputs and outputs; None for a plan that no planner made.
        cap_bytes: what the rank has for tables.
        step_ms: predicted time of the tables' lookups and collectives.
        parts_ms: what it is made of.
    """

    rank: int
    weight_bytes: int
    needed_bytes: int | None = None
    cap_bytes: int | None = None
    step_ms: float | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str | None:
        """The part that takes longest."""
        return max(self.parts_ms, key=self.parts_ms.__getitem__, default=None)


@dataclass(frozen=True)
class PlanReport:
    """A plan as tables and ranks; `print()` shows it.

    Example::

        report = PlanReport.of(plan, model)
        report.dense_bytes / report.stored_bytes    # the saving over all tables
        report.print()
    """

    tables: tuple[TableReport, ...]
    ranks: tuple[RankReport, ...]
    indivisible_ms: float | None = None
    """Predicted time of the table that takes longest even in its shortest pieces, below which no
    placement can go; None for a plan that no planner made."""
    tiers: tuple[TierReport, ...] = ()
    """What the tiered tables do; empty for a plan that no planner made."""

    step: StepPrediction | None = None
    """Of the whole model; None where costs have not been measured."""

    @classmethod
    def of(
        cls,
        plan: ShardingPlan,
        model: nn.Module,
        *,
        options: Sequence[ShardingOption] = (),
        capacity: Topology | None = None,
        indivisible_ms: float | None = None,
    ) -> PlanReport:
        """Describes a plan of the (not yet sharded) model.

        Args:
            plan: any plan, of a planner, a file or by hand.
            model: as it was planned.
            options: the options behind the plan, when a planner made it: they hold predictions.
            capacity: the ranks, with what they have for tables.
            indivisible_ms: see there.
        """
        known = model_tables(model)
        tables = tuple(
            _table_report(module, name, entry, known[module][name])
            for module, module_plan in plan.plan.items()
            for name, entry in module_plan.items()
        )
        num_ranks = capacity.world_size if capacity else 0
        for table in tables:
            num_ranks = max(num_ranks, *(rank + 1 for rank in table.weight_bytes))
        ranks = _rank_reports(num_ranks, tables, options, capacity)
        return cls(tables, ranks, indivisible_ms, tier_reports(options))

    @property
    def step_ms(self) -> float | None:
        """Predicted time of the slowest rank; None for a plan that no planner made."""
        times = [rank.step_ms for rank in self.ranks if rank.step_ms is not None]
        return max(times, default=None)

    @property
    def mean_ms(self) -> float | None:
        """Predicted time of the mean rank."""
        times = [rank.step_ms for rank in self.ranks if rank.step_ms is not None]
        return sum(times) / len(times) if times else None

    @property
    def bottleneck(self) -> str | None:
        """What takes longest on the slowest rank."""
        return max(self.ranks, key=lambda rank: rank.step_ms or 0.0).bottleneck

    @property
    def imbalance(self) -> float | None:
        """How many times longer the slowest rank takes than the mean of all."""
        return self.step_ms / self.mean_ms if self.step_ms and self.mean_ms else None

    @property
    def over_bound(self) -> float | None:
        """How many times longer it takes than the larger of mean rank and `indivisible_ms`."""
        if not (self.step_ms and self.mean_ms):
            return None
        return self.step_ms / max(self.mean_ms, self.indivisible_ms or 0.0)

    @property
    def dense_bytes(self) -> int:
        return sum(table.dense_bytes for table in self.tables)

    @property
    def stored_bytes(self) -> int:
        return sum(table.stored_bytes for table in self.tables)

    def print(self, file: IO[str] | None = None) -> None:
        """A table on a terminal that is wide enough, plain text elsewhere."""
        file = file or sys.stdout
        console = Console(file=file)
        tables = _rich(_TABLE_HEADER, self._table_rows(), "tables")
        needed = console.measure(tables, options=console.options.update(width=_ANY_WIDTH)).maximum
        if console.is_terminal and needed <= console.width:
            console.print(tables)
            if self.tiers:
                console.print(_rich(TIER_HEADER, self._tier_rows(), "tiers"))
            console.print(_rich(_RANK_HEADER, self._rank_rows(), "ranks"))
            console.print(self._summary(), end="", highlight=False)
        else:
            file.write(self.text())

    def text(self) -> str:
        """Fixed-width text; the last line of the first table is the sum of the others."""
        return (
            _plain(_TABLE_HEADER, self._table_rows())
            + (_plain(TIER_HEADER, self._tier_rows()) if self.tiers else "")
            + _plain(_RANK_HEADER, self._rank_rows())
            + self._summary()
        )

    def _table_rows(self) -> list[list[str]]:
        several_modules = len({table.module for table in self.tables}) > 1
        rows = [
            [
                f"{table.module}.{table.name}" if several_modules else table.name,
                table.kernel,
                table.sharding,
                _ranks(table.ranks),
                f"{table.num_embeddings:,}",
                f"{table.embedding_dim}",
                f"{table.dense_bytes:,}",
                f"{table.stored_bytes:,}",
                f"{table.ratio:.1f}",
                _shape(table.tt),
            ]
            for table in self.tables
        ]
        ratio = f"{self.dense_bytes / self.stored_bytes:.1f}" if self.stored_bytes else "-"
        total = ["total", "", "", "", "", ""]
        return [*rows, [*total, f"{self.dense_bytes:,}", f"{self.stored_bytes:,}", ratio, ""]]

    def _tier_rows(self) -> list[list[str]]:
        step_ms = self.step_ms
        assert step_ms, "tiered tables are reported of a planner's plan"
        return [tier.cells(step_ms) for tier in self.tiers]

    def _rank_rows(self) -> list[list[str]]:
        return [
            [
                str(rank.rank),
                f"{rank.weight_bytes:,}",
                "-" if rank.needed_bytes is None else f"{rank.needed_bytes:,}",
                "-" if rank.cap_bytes is None else f"{rank.cap_bytes:,}",
                "-" if rank.step_ms is None else f"{rank.step_ms:.3f}",
            ]
            for rank in self._shown_ranks()
        ]

    def _shown_ranks(self) -> list[RankReport]:
        """All, or of many the slowest."""
        if len(self.ranks) <= _SHOWN_RANKS:
            return list(self.ranks)
        return sorted(self.ranks, key=lambda rank: -(rank.step_ms or 0.0))[:_SHOWN_RANKS]

    def _summary(self) -> str:
        """Predicted step time and its bottleneck; empty for a plan that no planner made."""
        if self.step_ms is None:
            return ""
        slowest = max(self.ranks, key=lambda rank: rank.step_ms or 0.0)
        hidden = len(self.ranks) - len(self._shown_ranks())
        return (
            (f"({hidden} faster ranks are not shown)\n" if hidden else "")
            + f"predicted step of the tables: {self.step_ms:.3f} ms on rank {slowest.rank}, "
            + f"{self.imbalance or 1:.3f} times the mean rank; bottleneck: {slowest.bottleneck}\n"
            + self._step_summary()
        )

    def _step_summary(self) -> str:
        if self.step is None:
            return ""
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in self.step.parts_ms.items())
        return (
            f"predicted step of the model: {self.step.step_ms:.2f} ms without overlap ({parts}), "
            f"at most {max(self.step.bytes_W):,} bytes per rank\n"
        )


_TABLE_HEADER = (
    ("table", "<"), ("kernel", "<"), ("sharding", "<"), ("ranks", "<"), ("rows", ">"),
    ("dim", ">"), ("dense bytes", ">"), ("stored bytes", ">"), ("ratio", ">"), ("TT shape", "<"),
)  # fmt: skip
_ANY_WIDTH = 10_000
_NO_TIME = Perf(fwd_compute=0, fwd_comms=0, bwd_compute=0, bwd_comms=0)
_SHOWN_RANKS = 16
_RANK_HEADER = (
    ("rank", ">"), ("weight bytes", ">"), ("needed bytes", ">"), ("cap bytes", ">"),
    ("predicted ms", ">"),
)  # fmt: skip


def _table_report(
    module: str, name: str, entry: ParameterSharding, table: ModelTable
) -> TableReport:
    tt = (getattr(entry, "tt", None) or table.tt) if is_tt(entry) else None
    tiers = tiers_of(entry)
    dense_bytes = table.num_embeddings * table.embedding_dim * table.dtype.itemsize
    stored_bytes = tt.nbytes(table.dtype) if tt else dense_bytes
    ranks = tuple(entry.ranks or ())
    weight_bytes: dict[int, int] = {}
    if tt or entry.sharding_type == ShardingType.DATA_PARALLEL.value:
        weight_bytes = dict.fromkeys(ranks, stored_bytes)
    else:
        for rank, shard in zip(ranks, entry.sharding_spec.shards, strict=True):
            rows = shard.shard_sizes[0] if tiers is None else tiers.cache_rows
            size = rows * shard.shard_sizes[1] * table.dtype.itemsize
            weight_bytes[rank] = weight_bytes.get(rank, 0) + size
    return TableReport(
        module=module,
        name=name,
        kernel="tt" if tt else "tiered" if tiers else entry.compute_kernel,
        sharding=entry.sharding_type,
        ranks=ranks,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        dense_bytes=dense_bytes,
        stored_bytes=stored_bytes,
        weight_bytes=weight_bytes,
        tt=tt,
    )


def _rank_reports(
    num_ranks: int,
    tables: Sequence[TableReport],
    options: Sequence[ShardingOption],
    capacity: Topology | None,
) -> tuple[RankReport, ...]:
    weight_bytes = [0] * num_ranks
    for table in tables:
        for rank, num_bytes in table.weight_bytes.items():
            weight_bytes[rank] += num_bytes
    if not options or capacity is None:
        return tuple(RankReport(rank, weight_bytes[rank]) for rank in range(num_ranks))
    needed_bytes, perfs = [0] * num_ranks, [_NO_TIME] * num_ranks
    fetch_ms = [0.0] * num_ranks  # of it, what is done while earlier batches are trained on
    for option in options:
        hidden = getattr(option, "fetch_is_hidden", False)
        for shard in option.shards:
            fetch_ms[shard.rank] += shard.perf.prefetch_compute if hidden else 0.0
            needed_bytes[shard.rank] += main_memory_bytes(shard.storage, capacity)
            perfs[shard.rank] += shard.perf
    return tuple(
        RankReport(
            rank,
            weight_bytes[rank],
            needed_bytes=needed_bytes[rank],
            cap_bytes=main_memory_bytes(device.storage, capacity),
            step_ms=max(perfs[rank].total - fetch_ms[rank], fetch_ms[rank]),
            parts_ms=_parts_ms(perfs[rank]),
        )
        for rank, device in enumerate(capacity.devices)
    )


def _parts_ms(perf: Perf) -> dict[str, float]:
    return {
        "forward lookup": perf.fwd_compute,
        "forward communication": perf.fwd_comms,
        "backward lookup": perf.bwd_compute,
        "backward communication": perf.bwd_comms,
        "fetching rows": perf.prefetch_compute,
    }


def _ranks(ranks: tuple[int, ...]) -> str:
    first_to_last = tuple(range(ranks[0], ranks[-1] + 1)) if ranks else ()
    if len(ranks) > 2 and ranks == first_to_last:
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _shape(tt: TTSpec | None) -> str:
    if tt is None:
        return ""
    rows, columns, ranks = (
        "x".join(map(str, n)) for n in (tt.row_factors, tt.col_factors, tt.ranks)
    )
    return f"p={rows} q={columns} r={ranks}"


Header = Sequence[tuple[str, str]]


def _plain(header: Header, rows: Sequence[Sequence[str]]) -> str:
    lines = [[title for title, _ in header], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = io.StringIO()
    for line in lines:
        cells = [
            f"{cell:{align}{width}}"
            for cell, (_, align), width in zip(line, header, widths, strict=True)
        ]
        text.write("  ".join(cells).rstrip() + "\n")
    return text.getvalue() + "\n"


def _rich(header: Header, rows: Sequence[Sequence[str]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name, align in header:
        table.add_column(name, justify="right" if align == ">" else "left")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "total" else None)
    return table
