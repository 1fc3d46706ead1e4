"""Counts of distinct rows by batch size, and of how often each row occurs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.planner import DistinctCurve, HotRows
from ecorec_torchrec.train.profiling.batches import FeatureBatch

_WINDOWS = 4  # batches of one size that are looked at per part of the data


class DistinctMeter:
    """Mean numbers of distinct values of `id // 2**k` in batches of 1, 2, 4, .. samples.

    Args:
        num_embeddings: N.
    """

    def __init__(self, num_embeddings: int) -> None:
        self._num_blocks = (num_embeddings - 1).bit_length() + 1
        self._sums: dict[int, NDArray[np.float64]] = {}
        self._windows: dict[int, int] = {}

    def add(self, batch: FeatureBatch) -> None:
        """Looks at up to four batches of each size that lie in `batch`, evenly apart."""
        for size, ids in _windows(batch):
            sums = self._sums.setdefault(size, np.zeros(self._num_blocks))
            self._windows[size] = self._windows.get(size, 0) + 1
            values = np.unique(ids)
            for k in range(self._num_blocks):
                sums[k] += len(values)
                values >>= 1
                values = values[np.append(True, values[1:] != values[:-1])[: len(values)]]

    def curve(self) -> DistinctCurve | None:
        """Of all batches so far, from the smallest size in which ids occurred; None without ids."""
        means = {size: self._sums[size] / self._windows[size] for size in sorted(self._sums)}
        seen = {size: mean for size, mean in means.items() if mean[-1] > 0}
        if not seen:
            return None
        counts = tuple(tuple(float(f"{count:.6g}") for count in mean) for mean in seen.values())
        return DistinctCurve(tuple(seen), counts)


def _windows(batch: FeatureBatch) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(samples, their ids) of the batches to look at."""
    size = 1
    while size <= len(batch):
        num_windows = min(_WINDOWS, len(batch) // size)
        for start in np.linspace(0, len(batch) - size, num_windows).astype(int).tolist():
            yield size, batch.ids_of(start, start + size)
        size *= 2


class RowCounts:
    """How often rows occur: exactly while there are few, of the frequent ones if there are many.

    When more than twice `capacity` rows are held, the count that all but `capacity` of them reach
    at most is taken from every count, and rows left with nothing are dropped (Misra and Gries,
    1982; for parts of a stream Agarwal et al., 2012). No count is then too large, and none is too
    small by more than `most_missing`, which is at most lookups / capacity.

    Args:
        capacity: rows to hold; memory is 16 bytes for each of twice as many.
    """

    def __init__(self, capacity: int) -> None:
        self.lookups = 0
        self.most_missing = 0
        self._capacity = capacity
        self._ids = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)

    def add(self, ids: NDArray[np.int64]) -> None:
        """All ids of a part, with repetitions."""
        self.lookups += len(ids)
        new_ids, new_counts = np.unique(ids, return_counts=True)
        self._ids, places = np.unique(np.concatenate([self._ids, new_ids]), return_inverse=True)
        counts = np.concatenate([self._counts, new_counts])
        self._counts = np.zeros(len(self._ids), np.int64)
        np.add.at(self._counts, places, counts)
        if len(self._ids) > 2 * self._capacity:
            cut = int(np.partition(self._counts, -self._capacity - 1)[-self._capacity - 1])
            kept = self._counts > cut
            self._ids, self._counts = self._ids[kept], self._counts[kept] - cut
            self.most_missing += cut

    def hottest(self, num_rows: int) -> NDArray[np.int64]:
        """So many of the most frequent ids, the most frequent first; fewer where fewer occur."""
        return self._ids[self._order()[:num_rows]]

    def coverage(self, num_rows: int) -> HotRows | None:
        """Shares of the lookups that 1, 2, 4, .. up to `num_rows` rows get; None without ids."""
        num_rows = min(num_rows, len(self._ids))
        if not num_rows:
            return None
        rows = (*(1 << k for k in range((num_rows - 1).bit_length())), num_rows)
        reached = self._counts[self._order()].cumsum()[np.array(rows) - 1]
        missing = min(num_rows * self.most_missing, self.lookups - int(self._counts.sum()))
        shares = tuple(float(f"{count / self.lookups:.6g}") for count in reached)
        return HotRows(rows, shares, error=missing / self.lookups)

    def renumbered(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids if rows were numbered by frequency; rows that are not held follow in their order."""
        if not len(self._ids):
            return ids
        rank_of = np.empty(len(self._ids), np.int64)
        rank_of[self._order()] = np.arange(len(self._ids))
        place = np.searchsorted(self._ids, ids)
        found = np.minimum(place, len(self._ids) - 1)
        held = self._ids[found] == ids
        return np.where(held, rank_of[found], len(self._ids) + ids - place)

    def _order(self) -> NDArray[np.int64]:
        return np.argsort(-self._counts, kind="stable")  # equally frequent ones by id
