"""What the tiered tables of a plan do per step, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import ShardingOption

from .tier_options import TieredShardingOption
from .tiers import TierTraffic

TIER_HEADER = (
    ("tiered table", "<"), ("slots", ">"), ("memory rows", ">"), ("hit rate", ">"),
    ("rows fetched", ">"), ("fetch ms", ">"), ("page factor", ">"), ("read GB/s", ">"),
    ("written TB/day", ">"), ("file bytes", ">"),
)  # fmt: skip


@dataclass(frozen=True)
class TierReport:
    """A tiered table of a plan; of a row-wise one, all shards together.

    Args:
        name: the table's.
        cache_rows, memory_rows: of all shards.
        fetch_ms: of one shard per step, beside the step if rows are fetched ahead.
        file_bytes: once every row was written.
        traffic: of one shard per step.
        num_shards: its shards.
    """

    name: str
    cache_rows: int
    memory_rows: int
    fetch_ms: float
    file_bytes: int
    traffic: TierTraffic
    num_shards: int

    def read_gb_per_s(self, step_ms: float) -> float:
        """Pages read from storage at so long a step, in 1e9 bytes per second."""
        return self.traffic.storage_bytes_read * self.num_shards / step_ms / 1e6

    def written_tb_per_day(self, step_ms: float) -> float:
        """Pages written to storage at so long a step, in 1e12 bytes per day: its endurance."""
        return self.traffic.written_tb_per_day(step_ms) * self.num_shards

    def cells(self, step_ms: float) -> list[str]:
        """Below `TIER_HEADER`."""
        return [
            self.name,
            f"{self.cache_rows:,}",
            f"{self.memory_rows:,}",
            f"{self.traffic.hit_rate:.3f}",
            f"{self.traffic.fetched_rows * self.num_shards:,.0f}",
            f"{self.fetch_ms:.3f}",
            f"{self.traffic.page_amplification:.1f}",
            f"{self.read_gb_per_s(step_ms):.2f}",
            f"{self.written_tb_per_day(step_ms):.1f}",
            f"{self.file_bytes:,}",
        ]


def tier_reports(options: Sequence[ShardingOption]) -> tuple[TierReport, ...]:
    """Of the tiered ones among the options of a plan."""
    return tuple(
        TierReport(
            option.name,
            option.tiers.cache_rows * len(option.shards),
            option.tiers.memory_rows * len(option.shards),
            option.shards[0].perf.prefetch_compute,
            sum(shard.storage.ssd for shard in option.shards),
            option.traffic,
            len(option.shards),
        )
        for option in options
        if isinstance(option, TieredShardingOption)
    )
