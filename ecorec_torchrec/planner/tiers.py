"""What a tiered table costs per step: rows that move between its memories, and the time they take.

Per rank and step, for a shard of N rows with S slots and M rows of the second level:

    L            ids of a batch
    U            distinct rows of a batch
    fetched      of them, not in a slot: from the profile's reuse curve at S, no more than U
    read         of these, not in the second level either: the curve at S + M
    written      rows that leave the second level (or the slots, without one) for the file: once
                 the caches are full one for every row that is read; in training all are changed

    managing     L * lookup_ns + U * row_ns + fetched * moved_row_ns
    memory       2 * fetched records between slots and the level below (a row comes, a row leaves)
    storage      pages: a record of r bytes lies on 1 + (r - 1) / 4096 pages on average, and a page
                 that is partly written is read before. Reading takes the longer of bytes over
                 bandwidth and pages over operations per second, writing too, one after the other
    step         with lookahead the longer of fetching and of everything else, else their sum

Takes the place of TorchRec's prefetch estimate, which knows no write-back, no pages and no rates of
operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torchrec.distributed.planner.types import Topology

from .profile import TableProfile
from .tt_work import expected_distinct

PAGE_BYTES = 4096
_NS_PER_MS = 1e6
_BYTES_PER_MS = 1e6  # of one GB/s
_GB = 1e9
_SECONDS_PER_DAY = 86_400
# Quantile of the normal distribution that 99 % of batches stay below.
_P99 = 2.33


@dataclass(frozen=True)
class TierSpeeds:
    """What one rank has of its host to move rows with. GB/s are 1e9 bytes per second.

    Args:
        read_gb_per_s, write_gb_per_s: of block storage.
        read_iops, write_iops: random pages of 4 KiB per second.
        memory_gb_per_s: records at random in host memory.
        lookup_ns: finding the slot of one id of a batch.
        row_ns: managing one distinct row of a batch.
        moved_row_ns: bringing one row into a slot and another one out, beside the bytes.
        link_gb_per_s: between slots and host memory, where the slots are a GPU's; else None.

    Raises:
        ValueError: a rate that is not above 0, or a time below 0.
    """

    read_gb_per_s: float
    write_gb_per_s: float
    read_iops: float
    write_iops: float
    memory_gb_per_s: float
    lookup_ns: float
    row_ns: float
    moved_row_ns: float
    link_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            is_time = field.name.endswith("_ns")
            if not (0 <= value < math.inf if is_time else 0 < value < math.inf):
                raise ValueError(f"{field.name}={value} must be {'>= 0' if is_time else '> 0'}")

    @classmethod
    def of_topology(cls, topology: Topology) -> TierSpeeds:
        """As far as TorchRec's topology tells: one bandwidth of storage, no rate of operations.

        Managing rows counts as memory traffic of some cache lines a row, the least it can be.
        """
        storage = topology.ssd_mem_bw / _BYTES_PER_MS
        memory = topology.ddr_mem_bw / _BYTES_PER_MS / topology.local_world_size
        pages_per_s = storage * _GB / PAGE_BYTES
        line_ns = 64 / memory
        on_gpu = topology.compute_device != "cpu"
        return cls(
            storage, storage, pages_per_s, pages_per_s, memory,
            2 * line_ns, 4 * line_ns, 8 * line_ns,
            topology.hbm_to_ddr_mem_bw / _BYTES_PER_MS if on_gpu else None,
        )  # fmt: skip


@dataclass(frozen=True)
class TierTraffic:
    """Rows of one shard that move in a step.

    Args:
        lookups: L.
        unique_rows: U.
        fetched_rows: into slots; as many leave them.
        read_rows, written_rows: from and to the file.
        record_bytes: of a row with its optimizer state.
    """

    lookups: float
    unique_rows: float
    fetched_rows: float
    read_rows: float
    written_rows: float
    record_bytes: int

    @classmethod
    def of(
        cls,
        num_rows: int,
        lookups: float,
        cache_rows: int,
        memory_rows: int,
        record_bytes: int,
        profile: TableProfile | None = None,
        shares: int = 1,
    ) -> TierTraffic:
        """Of one of `shares` equal shards of a table.

        Args:
            num_rows: N of the table.
            lookups: L of the table, of the global batch.
            cache_rows, memory_rows: S and M of the shard.
            record_bytes: of a row with its optimizer state.
            profile: without it, or without its reuse curve, ids count as drawn uniformly.
            shares: shards that the rows of the table are cut into.
        """
        unique = unique_rows(num_rows, lookups, profile)
        slots, held = cache_rows * shares, (cache_rows + memory_rows) * shares
        fetched = _rows_missed(num_rows, lookups, unique, slots, profile)
        read = _rows_missed(num_rows, lookups, unique, held, profile)
        return cls(
            lookups=lookups / shares,
            unique_rows=unique / shares,
            fetched_rows=fetched / shares,
            read_rows=read / shares,
            written_rows=read / shares,
            record_bytes=record_bytes,
        )

    @property
    def hit_rate(self) -> float:
        """Share of the distinct rows of a batch that are in slots."""
        return 1 - self.fetched_rows / self.unique_rows if self.unique_rows else 1.0

    @property
    def pages_per_record(self) -> float:
        return 1 + (self.record_bytes - 1) / PAGE_BYTES

    @property
    def page_amplification(self) -> float:
        """Bytes of pages per byte of records."""
        return self.pages_per_record * PAGE_BYTES / self.record_bytes

    @property
    def storage_bytes_read(self) -> float:
        """Pages of the rows that are read, and of those that are partly written."""
        return (self.read_rows + self.written_rows) * self.pages_per_record * PAGE_BYTES

    @property
    def storage_bytes_written(self) -> float:
        return self.written_rows * self.pages_per_record * PAGE_BYTES

    def written_tb_per_day(self, step_ms: float) -> float:
        """What storage has to endure, in 1e12 bytes, at so long a step."""
        return self.storage_bytes_written * _SECONDS_PER_DAY * 1e3 / step_ms / 1e12

    def storage_ms(self, speeds: TierSpeeds) -> float:
        read, written = self.storage_bytes_read, self.storage_bytes_written
        read_ms = max(
            read / speeds.read_gb_per_s / _BYTES_PER_MS,
            read / PAGE_BYTES / speeds.read_iops * 1e3,
        )
        write_ms = max(
            written / speeds.write_gb_per_s / _BYTES_PER_MS,
            written / PAGE_BYTES / speeds.write_iops * 1e3,
        )
        return read_ms + write_ms

    def memory_ms(self, speeds: TierSpeeds) -> float:
        """Records between slots and host memory."""
        num_bytes = 2 * self.fetched_rows * self.record_bytes
        ms = num_bytes / speeds.memory_gb_per_s / _BYTES_PER_MS
        if speeds.link_gb_per_s is not None:
            ms += num_bytes / speeds.link_gb_per_s / _BYTES_PER_MS
        return ms

    def managing_ms(self, speeds: TierSpeeds) -> float:
        work_ns = self.lookups * speeds.lookup_ns + self.unique_rows * speeds.row_ns
        work_ns += self.fetched_rows * speeds.moved_row_ns
        return work_ns / _NS_PER_MS

    def fetch_ms(self, speeds: TierSpeeds) -> float:
        """All that is done to have the rows of a batch in slots."""
        return self.storage_ms(speeds) + self.memory_ms(speeds) + self.managing_ms(speeds)


def predicted_tiered_step(
    in_memory_ms: float,
    traffic: TierTraffic,
    speeds: TierSpeeds,
    *,
    prefetch_batches: int,
    io_ms: float | None = None,
) -> float:
    """Milliseconds of a training step whose table is tiered.

    Args:
        in_memory_ms: of the same step with the whole table in memory.
        traffic: predicted, or as counted.
        speeds: of the machine.
        prefetch_batches: lookahead k.
        io_ms: of the storage alone, where that was measured; else as `speeds` predict it.

    Example::

        speeds = TierSpeeds(2.0, 1.0, 5e5, 1e5, 10.0, 100, 200, 2000)
        traffic = TierTraffic(32_768, 9000, 2000, 2000, 2000, record_bytes=264)
        predicted_tiered_step(25.0, traffic, speeds, prefetch_batches=2)   # 39.2
    """
    fetch_ms = traffic.memory_ms(speeds) + traffic.managing_ms(speeds)
    fetch_ms += traffic.storage_ms(speeds) if io_ms is None else io_ms
    return max(in_memory_ms, fetch_ms) if prefetch_batches else in_memory_ms + fetch_ms


def unique_rows(num_rows: int, lookups: float, profile: TableProfile | None) -> float:
    """U of so many lookups."""
    if profile is None:
        return expected_distinct(num_rows, lookups)
    return profile.unique_rows(lookups / profile.all_lookups_per_sample)


def in_flight_rows(unique: float, prefetch_batches: int) -> int:
    """Slots that k + 1 batches need, 99 % of the time: a sum of rows that are there or not."""
    return math.ceil((prefetch_batches + 1) * (unique + _P99 * math.sqrt(unique)))


def _rows_missed(
    num_rows: int, lookups: float, unique: float, cache_rows: int, profile: TableProfile | None
) -> float:
    """Of U rows, those that a cache lacks.

    Per sample as many as in the profile's batches: a larger batch asks once for a row that would
    have come twice, and that row is one which the cache holds anyhow.
    """
    if profile is None or profile.reuse is None:
        return unique * max(0.0, 1 - cache_rows / num_rows)
    if cache_rows >= num_rows:
        return 0.0
    reuse = profile.reuse
    batches = lookups / profile.all_lookups_per_sample / reuse.batch_size
    missed = profile.unique_rows(reuse.batch_size) * reuse.fetched_share(cache_rows)
    return min(unique, batches * missed)
