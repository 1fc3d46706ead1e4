"""Which rows lie in which slots of one level, and which of them leave when others come.

Scores follow an age-weighted frequency: a use at batch t counts 2^(t / half-life), so that the sum
orders rows as if every earlier use had decayed, and nothing is ever decayed (forward decay:
Cormode et al., "Forward decay: a practical time decay model for streaming systems", ICDE 2009).
Sums are held as base-2 logarithms, which cannot overflow.
"""

from __future__ import annotations

import numpy as np

from .id_map import IdMap

HALF_LIFE_BATCHES = 256.0
# Victims are the lowest scores among this many times as many slots, next to each other: choosing
# costs what is evicted, not what is cached.
_WINDOW = 8
_LEAST_WINDOW = 4096


class Directory:
    """The rows of one level: id, score, pins and whether they differ from what lies below.

    Args:
        num_slots: S.
        policy: "lfu" or "lru".

    Attributes:
        ids: (S,) the row in each slot, -1 for none.
        scores: (S,) what keeps a row: the lowest leave first.
        pins: (S,) int32, how many batches in flight (or the profile) hold the slot.
        dirty: (S,) bool, whether the row was changed since it was read.
    """

    def __init__(self, num_slots: int, policy: str) -> None:
        self.policy = policy
        self.map = IdMap(num_slots)
        self.ids = np.full(num_slots, -1, np.int64)
        self.scores = np.full(num_slots, -np.inf)
        self.pins = np.zeros(num_slots, np.int32)
        self.dirty = np.zeros(num_slots, bool)
        self._hand = 0

    def __len__(self) -> int:
        return len(self.ids)

    def used(self, scores: np.ndarray, batch: int) -> np.ndarray:
        """The scores of rows that had `scores` and are used by batch number `batch`."""
        if self.policy == "lru":
            return np.full_like(scores, batch)
        return np.logaddexp2(scores, batch / HALF_LIFE_BATCHES)

    def victims(self, count: int) -> np.ndarray | None:
        """`count` slots to fill, empty or of low score, none of them pinned; None if too few."""
        window = min(len(self), max(_WINDOW * count, _LEAST_WINDOW))
        while True:
            slots = (self._hand + np.arange(window)) % len(self)
            slots = slots[self.pins[slots] == 0]
            if len(slots) >= count:
                break
            if window == len(self):
                return None
            window = min(len(self), 4 * window)
        self._hand = (self._hand + window) % len(self)
        if len(slots) == count:
            return slots
        return slots[np.argpartition(self.scores[slots], count)[:count]]

    def place(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Puts absent rows `ids` into empty `slots`."""
        self.map.insert(ids, slots)
        self.ids[slots] = ids

    def empty(self, slots: np.ndarray) -> None:
        """Forgets the rows of `slots`; empty ones may be among them."""
        held = self.ids[slots]
        self.map.remove(held[held >= 0])
        self.ids[slots] = -1
        self.scores[slots] = -np.inf
        self.dirty[slots] = False

    def clear(self) -> None:
        """Forgets every row, pinned by profile or not."""
        self.pins[:] = 0
        self.empty(np.flatnonzero(self.ids >= 0))
