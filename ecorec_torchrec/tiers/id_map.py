"""Row id -> slot, in memory that grows with the slots and not with the table."""

from __future__ import annotations

import numpy as np

from .init import mix64

_WAYS = 8  # ids of one bucket: a cache line
_EMPTY = -1


class IdMap:
    """A set-associative map from ids to slots, whole batches at a time.

    An id hashes to one bucket of 8 ways. There are about three ways per slot, so that few buckets
    overflow; what does not fit is kept in a small sorted stash, so that no id is ever refused.

    Args:
        capacity: S, the ids that it will hold at most.

    Example::

        ids = IdMap(capacity=4)
        ids.insert(np.array([70, 9]), np.array([0, 1]))
        ids.find(np.array([9, 8, 70]))   # [1, -1, 0]
    """

    def __init__(self, capacity: int) -> None:
        bits = max(1, (capacity // 3).bit_length())
        self._shift = np.uint64(64 - bits)
        self._ids = np.full((1 << bits, _WAYS), _EMPTY, np.int64)
        self._slots = np.zeros(self._ids.size, np.int32)
        self._stash_ids = np.empty(0, np.int64)
        self._stash_slots = np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        arrays = (self._ids, self._slots, self._stash_ids, self._stash_slots)
        return sum(array.nbytes for array in arrays)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The slot of each id (int64), -1 where it is absent. Ids may repeat."""
        found = np.full(len(ids), -1, np.int64)
        places, which = self._places(ids)
        found[which] = self._slots[places]
        if len(self._stash_ids):
            absent = np.flatnonzero(found < 0)
            at, stashed = self._in_stash(ids[absent])
            found[absent[stashed]] = self._stash_slots[at[stashed]]
        return found

    def insert(self, ids: np.ndarray, slots: np.ndarray) -> None:
        """Adds unique ids that are absent."""
        order, bucket, rank = self._grouped(ids)
        free = self._ids[bucket] == _EMPTY
        # The rank-th newcomer of a bucket takes its rank-th free way.
        taken = free & (free.cumsum(axis=1) == rank[:, None] + 1)
        flat = np.flatnonzero(taken)
        which, way = flat // _WAYS, flat % _WAYS
        places = bucket[which] * _WAYS + way
        self._ids.reshape(-1)[places] = ids[order[which]]
        self._slots[places] = slots[order[which]]
        if len(which) < len(ids):
            homeless = np.ones(len(ids), bool)
            homeless[order[which]] = False
            at = np.searchsorted(self._stash_ids, np.sort(ids[homeless]))
            by_id = np.argsort(ids[homeless])
            self._stash_ids = np.insert(self._stash_ids, at, ids[homeless][by_id])
            self._stash_slots = np.insert(self._stash_slots, at, slots[homeless][by_id])

    def remove(self, ids: np.ndarray) -> None:
        """Takes out unique ids that are present."""
        places, which = self._places(ids)
        self._ids.reshape(-1)[places] = _EMPTY
        if len(which) < len(ids):
            stashed = np.ones(len(ids), bool)
            stashed[which] = False
            at, found = self._in_stash(ids[stashed])
            assert found.all(), "an id to remove is not in the map"
            self._stash_ids = np.delete(self._stash_ids, at)
            self._stash_slots = np.delete(self._stash_slots, at)

    def _places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the ids that lie in their bucket: flat places, and which of `ids` they are."""
        bucket = self._bucket(ids)
        flat = np.flatnonzero(self._ids[bucket] == ids[:, None])
        which = flat // _WAYS
        return bucket[which] * _WAYS + flat % _WAYS, which

    def _bucket(self, ids: np.ndarray) -> np.ndarray:
        return (mix64(ids.view(np.uint64)) >> self._shift).view(np.int64)

    def _grouped(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Order by bucket, the buckets in that order, and each id's rank within its bucket."""
        bucket = self._bucket(ids)
        order = np.argsort(bucket, kind="stable")
        bucket = bucket[order]
        place = np.arange(len(ids))
        starts = np.ones(len(ids), bool)
        starts[1:] = bucket[1:] != bucket[:-1]
        return order, bucket, place - np.maximum.accumulate(np.where(starts, place, 0))

    def _in_stash(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(self._stash_ids, ids)
        found = np.zeros(len(ids), bool)
        inside = at < len(self._stash_ids)
        found[inside] = self._stash_ids[at[inside]] == ids[inside]
        return at, found
