"""What the tiers of one table have done since they were last asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """Rows and bytes moved between levels.

    Attributes:
        batches: batches prefetched.
        rows: unique rows of those batches.
        slot_hits: of these, rows that were in a slot.
        memory_hits: rows that were in the second level.
        first_touches: rows that were never written and got their initial values.
        file_rows: rows read from the file.
        memory_rows_written: rows that went from a slot to the second level.
        file_rows_written: changed rows that went to the file.
        memory_bytes_read, memory_bytes_written, file_bytes_read, file_bytes_written: their
            records; with direct reads the pages that were moved for them.
        postponed: prefetches that had to wait until an earlier batch released its slots.
        prefetch_ms: time that the worker was busy.
        wait_ms: time that training waited for it.
    """

    batches: int = 0
    rows: int = 0
    slot_hits: int = 0
    memory_hits: int = 0
    first_touches: int = 0
    file_rows: int = 0
    memory_rows_written: int = 0
    file_rows_written: int = 0
    memory_bytes_read: int = 0
    memory_bytes_written: int = 0
    file_bytes_read: int = 0
    file_bytes_written: int = 0
    postponed: int = 0
    prefetch_ms: float = 0.0
    wait_ms: float = 0.0

    def drain(self) -> dict[str, int | float]:
        """The counts, and `hit_rate`, the share of rows found in a slot; they restart at 0."""
        counts = asdict(self)
        for field in fields(self):
            setattr(self, field.name, field.default)
        return {"hit_rate": counts["slot_hits"] / max(1, counts["rows"]), **counts}
