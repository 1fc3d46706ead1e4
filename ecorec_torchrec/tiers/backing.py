"""What lies below the slots: a second level in memory, the file, and rows never written.

A row is in one place only: what moves up into a slot leaves the second level, what leaves a slot
goes into the second level, and what has no room there goes to the file if it was changed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .counters import Counters
from .directory import Directory
from .init import RowInit
from .row_file import RowFile
from .spec import WEIGHT, WRITTEN, RowLayout


@dataclass
class Rows:
    """Rows on their way between levels: U of them.

    Attributes:
        ids: (U,) int64, each once.
        records: (U,) of the layout's record type.
        dirty: (U,) bool, changed since they were read from the file.
        scores: (U,) what keeps them, see `Directory`.
    """

    ids: np.ndarray
    records: np.ndarray
    dirty: np.ndarray
    scores: np.ndarray

    def __getitem__(self, which: np.ndarray | slice) -> Rows:
        return Rows(self.ids[which], self.records[which], self.dirty[which], self.scores[which])


class Backing:
    """The levels below the slots of one table.

    Args:
        file: the last level.
        init: rows that were never written.
        memory: the second level, if there is one.
        counters: where the traffic is counted.
    """

    def __init__(
        self, file: RowFile, init: RowInit, memory: MemoryLevel | None, counters: Counters
    ) -> None:
        self.file, self.init, self.memory = file, init, memory
        self._layout = file.layout
        self._counters = counters

    def fetch(self, ids: np.ndarray) -> Rows:
        """Takes unique rows out of the second level, or reads them from the file."""
        rows = Rows(
            ids,
            self._layout.new_records(len(ids)),
            np.zeros(len(ids), bool),
            np.full(len(ids), -np.inf),
        )
        below = np.arange(len(ids))
        if self.memory:
            below = self.memory.take(rows)
            self._counters.memory_hits += len(ids) - len(below)
            self._counters.memory_bytes_read += (len(ids) - len(below)) * self._record_bytes
        records = self.file.read(ids[below])
        fresh = self._initialise(ids[below], records)
        rows.records[below] = records
        self._counters.first_touches += fresh
        self._counters.file_rows += len(below) - fresh
        return rows

    def store(self, rows: Rows) -> None:
        """Takes rows that left their slots."""
        if self.memory:
            self._counters.memory_rows_written += len(rows.ids)
            self._counters.memory_bytes_written += len(rows.ids) * self._record_bytes
            rows = self.memory.put(rows)
        changed = rows[rows.dirty]
        self.write_file(changed.ids, changed.records)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Current records of unique rows, which stay where they are."""
        records = self._layout.new_records(len(ids))
        below = self.memory.read(ids, records) if self.memory else np.arange(len(ids))
        found = self.file.read(ids[below])
        self._initialise(ids[below], found)
        records[below] = found
        return records

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """New records for unique rows, in the level where they are."""
        below = self.memory.write(ids, records) if self.memory else np.arange(len(ids))
        self.write_file(ids[below], records[below])

    def write_file(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Stores unique rows in the file, which must not be in the second level."""
        self.file.write(ids, records)
        self._counters.file_rows_written += len(ids)

    def flush(self) -> None:
        """Writes the changed rows of the second level to the file; they stay there too."""
        if self.memory:
            for ids, records in self.memory.clean():
                self.write_file(ids, records)

    def clear(self) -> None:
        """Forgets every row."""
        if self.memory:
            self.memory.directory.clear()
        self.file.clear()

    def close(self) -> None:
        if self.memory:
            self.memory.close()
        self.file.close()

    @property
    def _record_bytes(self) -> int:
        return self._layout.record_bytes

    def _initialise(self, ids: np.ndarray, records: np.ndarray) -> int:
        """Gives the rows that were never written their initial weights; how many they are."""
        fresh = np.flatnonzero(records[WRITTEN] == 0)
        if len(fresh):
            drawn = self._layout.new_records(len(fresh))
            self._layout.set_column(drawn, WEIGHT, self.init.rows(torch.from_numpy(ids[fresh])))
            records[fresh] = drawn
        return len(fresh)


class MemoryLevel:
    """The second level: records in byte-addressable memory.

    Args:
        num_rows: how many.
        layout: the columns.
        policy: "lfu" or "lru".
        path: a file on a byte-addressable device to map; None for ordinary memory.

    Raises:
        ValueError: the file cannot be made, or has no room there.
    """

    def __init__(self, num_rows: int, layout: RowLayout, policy: str, path: Path | None) -> None:
        self.directory = Directory(num_rows, policy)
        self._layout = layout
        if path is None:
            self._records = np.empty(num_rows, f"V{layout.record_bytes}")
            return
        num_bytes = num_rows * layout.record_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w+b") as file:
                path.unlink()  # it lives as long as it is mapped
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise ValueError(
                f"{path}: no second level of memory_rows={num_rows} ({num_bytes} bytes): "
                f"{error.strerror}"
            ) from error
        self._records = np.frombuffer(memory, f"V{layout.record_bytes}")

    def take(self, rows: Rows) -> np.ndarray:
        """Moves what it has of `rows` out into them; which ones it does not have."""
        places = self.directory.map.find(rows.ids)
        here = np.flatnonzero(places >= 0)
        found = places[here]
        rows.records[here] = self._read(found)
        rows.dirty[here] = self.directory.dirty[found]
        rows.scores[here] = self.directory.scores[found]
        self.directory.empty(found)
        return np.flatnonzero(places < 0)

    def put(self, rows: Rows) -> Rows:
        """Takes in the rows of the highest scores; returns those that had to go."""
        directory = self.directory
        order = np.argsort(-rows.scores, kind="stable")
        kept, left_out = rows[order[: len(directory)]], rows[order[len(directory) :]]
        places = directory.victims(len(kept.ids))
        assert places is not None, "nothing pins the second level"
        leaving = places[directory.ids[places] >= 0]
        gone = Rows(
            directory.ids[leaving],
            self._read(leaving),
            directory.dirty[leaving],
            directory.scores[leaving],
        )
        directory.empty(places)
        directory.place(kept.ids, places)
        directory.dirty[places] = kept.dirty
        directory.scores[places] = kept.scores
        self._records[places] = kept.records.view(self._records.dtype)
        return Rows(
            np.concatenate([gone.ids, left_out.ids]),
            np.concatenate([gone.records, left_out.records]),
            np.concatenate([gone.dirty, left_out.dirty]),
            np.concatenate([gone.scores, left_out.scores]),
        )

    def read(self, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Copies what it has of rows `ids` into `records`; which ones it does not have."""
        places = self.directory.map.find(ids)
        here = np.flatnonzero(places >= 0)
        records[here] = self._read(places[here])
        return np.flatnonzero(places < 0)

    def write(self, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Replaces what it has of rows `ids`; which ones it does not have."""
        places = self.directory.map.find(ids)
        here = np.flatnonzero(places >= 0)
        self._records[places[here]] = records[here].view(self._records.dtype)
        self.directory.dirty[places[here]] = True
        return np.flatnonzero(places < 0)

    def clean(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, records) of the changed rows, some at a time, which count as clean from then on."""
        changed = np.flatnonzero(self.directory.dirty)
        for start in range(0, len(changed), step := 1 << 14):
            places = changed[start : start + step]
            yield self.directory.ids[places], self._read(places)
            self.directory.dirty[places] = False

    def close(self) -> None:
        self._records = np.empty(0)

    def _read(self, places: np.ndarray) -> np.ndarray:
        return self._records[places].view(self._layout.record_dtype)
