"""What the tiers of one table have done since they were last asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """Rows and bytes moved between levels.

    Attributes:
        batches: batches prefetched.
        rows: unique rows of those batches.
        slot_hits: of these, rows that were in a slot.
        memory_hits: rows that were in the second level.
        file_rows: rows read from the file.
        first_touches: rows that were never written and got their initial values.
        memory_rows_written: rows that went from a slot to the second level.
        file_rows_written: changed rows that went to the file.
        memory_bytes_read, memory_bytes_written: records from and to the second level.
        file_bytes_read, file_bytes_written: records from and to the file, also those of evaluation
            and checkpoints; with direct reads the pages that were moved for them.
        postponed: prefetches that waited until an earlier batch released its slots.
        prefetch_ms: time that the worker was busy.
        wait_ms: time that training waited for it.
    """

    batches: int = 0
    rows: int = 0
    slot_hits: int = 0
    memory_hits: int = 0
    file_rows: int = 0
    first_touches: int = 0
    memory_rows_written: int = 0
    file_rows_written: int = 0
    memory_bytes_read: int = 0
    memory_bytes_written: int = 0
    file_bytes_read: int = 0
    file_bytes_written: int = 0
    postponed: int = 0
    prefetch_ms: float = 0.0
    wait_ms: float = 0.0


@dataclass
class Meter:
    """Counters that only grow, so that two threads may count, and what was last read of them."""

    counters: Counters = field(default_factory=Counters)
    _read: Counters = field(default_factory=Counters)

    def drain(self) -> dict[str, int | float]:
        """What was counted since the last call, and `hit_rate`, the share found in a slot."""
        before, now = asdict(self._read), asdict(self.counters)
        self._read = Counters(**now)
        counts = {name: now[name] - before[name] for name in now}
        return {"hit_rate": counts["slot_hits"] / max(1, counts["rows"]), **counts}
