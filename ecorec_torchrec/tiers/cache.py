"""The rows of a table in the lookup kernel's slots, above memory and file."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from .backing import Backing, Rows
from .counters import Counters
from .directory import Directory
from .slots import Slots

_FLUSH_ROWS = 1 << 14


@dataclass(frozen=True)
class PinnedBatch:
    """Where the rows of a batch are.

    Attributes:
        slots_L: (L,) int64, the slot of every id.
        slots_U: (U,) int64, each slot once: what is pinned.
    """

    slots_L: np.ndarray
    slots_U: np.ndarray


class RowCache:
    """S slots and what lies below them, for one thread that moves rows.

    `unpin` alone may be called from another thread at the same time.

    Args:
        directory: which rows are in which slots.
        slots: their contents.
        backing: the levels below.
        kept_ids: sorted ids of rows that never leave once they are in a slot.
        counters: where hits are counted.
    """

    def __init__(
        self,
        directory: Directory,
        slots: Slots,
        backing: Backing,
        kept_ids: np.ndarray,
        counters: Counters,
    ) -> None:
        self.backing = backing
        self._directory, self._slots = directory, slots
        self._kept_ids, self._counters = kept_ids, counters
        # The garbage collector may let go of a batch in the midst of anything: reentrant.
        self._pins_lock = threading.RLock()
        self._leaving: Rows | None = None

    @property
    def num_pinned(self) -> int:
        """Slots that batches in flight or the profile hold."""
        return int(np.count_nonzero(self._directory.pins))

    def pin(self, ids_L: np.ndarray, batch: int) -> PinnedBatch | None:
        """Brings the rows of a batch into slots and holds them there until `unpin`.

        Rows that leave for them are in hand only until `settle` is called, which must come next.

        Args:
            ids_L: row ids in range, which may repeat.
            batch: its number, by which rows age.

        Returns:
            None, and nothing is changed, if there are too few slots that are not pinned.
        """
        directory = self._directory
        ids_U, inverse_L = np.unique(ids_L, return_inverse=True)
        slots_U = directory.map.find(ids_U)
        absent = slots_U < 0
        hit_U, missing_U = slots_U[~absent], ids_U[absent]
        with self._pins_lock:
            directory.pins[hit_U] += 1
            filled = directory.victims(len(missing_U))
            if filled is None:
                directory.pins[hit_U] -= 1
                return None
            directory.pins[filled] += 1
        self._exchange(filled, missing_U)
        slots_U[absent] = filled
        directory.scores[slots_U] = directory.used(directory.scores[slots_U], batch)
        self._keep(missing_U, filled)
        self._counters.batches += 1
        self._counters.rows += len(slots_U)
        self._counters.slot_hits += len(hit_U)
        return PinnedBatch(slots_U[inverse_L], slots_U)

    def settle(self) -> None:
        """Puts the rows that left for the last batch one level down: training need not wait."""
        if self._leaving is not None:
            self.backing.store(self._leaving)
            self._leaving = None

    def unpin(self, batch: PinnedBatch, dirty: bool) -> None:
        """Lets the rows of a batch leave again; `dirty` says that they were changed."""
        self._slots.fence()
        with self._pins_lock:
            self._directory.pins[batch.slots_U] -= 1
            if dirty:
                self._directory.dirty[batch.slots_U] = True

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Current records of unique rows, which stay where they are."""
        slots = self._directory.map.find(ids)
        here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        found = self.backing.read(ids[below])
        if not len(here):
            return found
        records = np.empty(len(ids), found.dtype)
        records[below] = found
        self._slots.fence()
        records[here] = self._slots.read(slots[here])
        return records

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """New records for unique rows, in the level where they are."""
        slots = self._directory.map.find(ids)
        here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        self._slots.fence()
        self._slots.write(slots[here], records[here])
        with self._pins_lock:
            self._directory.dirty[slots[here]] = True
        self.backing.write(ids[below], records[below])

    def flush(self) -> None:
        """Writes every changed row to the file; rows stay where they are."""
        self._slots.fence()
        changed = np.flatnonzero(self._directory.dirty)
        for start in range(0, len(changed), _FLUSH_ROWS):
            slots = changed[start : start + _FLUSH_ROWS]
            self.backing.write_file(self._directory.ids[slots], self._slots.read(slots))
            with self._pins_lock:
                self._directory.dirty[slots] = False
        self.backing.flush()

    def clear(self) -> None:
        """Forgets every row, as if none was ever written."""
        self._directory.clear()
        self.backing.clear()

    def _exchange(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Puts rows `ids` into `slots`, and takes the rows that were there in hand."""
        directory = self._directory
        held = slots[directory.ids[slots] >= 0]
        self._leaving = Rows(
            directory.ids[held],
            self._slots.read(held),
            directory.dirty[held],
            directory.scores[held],
        )
        directory.empty(slots)
        rows = self.backing.fetch(ids)
        self._slots.write(slots, rows.records)
        directory.place(ids, slots)
        directory.dirty[slots] = rows.dirty
        directory.scores[slots] = rows.scores

    def _keep(self, ids: np.ndarray, slots: np.ndarray) -> None:
        if len(self._kept_ids):
            at = np.searchsorted(self._kept_ids, ids).clip(max=len(self._kept_ids) - 1)
            with self._pins_lock:
                self._directory.pins[slots[self._kept_ids[at] == ids]] += 1
