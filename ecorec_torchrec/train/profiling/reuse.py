"""How long a row stays unused: stack distances of least-recently-used caches, in one pass.

The stack distance of a request is the number of other rows asked for since this row was asked for
last; a cache of S rows that drops the least recently used one serves it if the distance is below S
(Mattson et al., 1970). Distances of a few rows drawn by a hash of their ids, divided by their share
of all rows, give the curve of a large table (SHARDS: Waldspurger et al., 2015).

Legend: L requests of a call, S rows on the stack.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.planner import ReuseCurve
from ecorec_torchrec.train.data.hashing import hash_ids

FIRST_TOUCH = -1
_GROUPS = 8
_HASH_SLOTS = 1 << 40
_REQUESTS_AT_ONCE = 1 << 18


class LruDistances:
    """Exact stack distances of a stream that comes in parts.

    Holds every row seen, the least recently used one first. A part of L requests takes
    O(L log L + S log S), so parts should not be much shorter than the stack.

    Example::

        LruDistances().add(np.array([5, 7, 5, 5]))  # [FIRST_TOUCH, FIRST_TOUCH, 1, 0]
    """

    def __init__(self) -> None:
        self._stack_S = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._stack_S)

    def add(self, ids_L: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distance of every request, or `FIRST_TOUCH`.

        A request's earlier position p (on the stack, or in this part behind it) tells its distance:
        each row asked for since then has one request whose own earlier position lies below p, and
        so have all p + 1 requests up to p.
        """
        size = len(self._stack_S)
        earlier_L, is_last_L = self._positions(ids_L)
        known_L = earlier_L >= 0
        smaller_L = size + _smaller_before(_ranks(earlier_L, size + len(ids_L)))
        distances_L = np.where(known_L, smaller_L - earlier_L - 1, FIRST_TOUCH)
        kept_S = np.ones(size, bool)
        kept_S[earlier_L[known_L & (earlier_L < size)]] = False
        self._stack_S = np.concatenate([self._stack_S[kept_S], ids_L[is_last_L]])
        return distances_L

    def _positions(self, ids_L: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where each row was asked for before (-1: nowhere), and which requests are its last."""
        size = len(self._stack_S)
        order_L = np.argsort(ids_L, kind="stable")
        sorted_L = ids_L[order_L]
        is_first_L = np.append(True, sorted_L[1:] != sorted_L[:-1])[: len(ids_L)]
        earlier_L = np.empty(len(ids_L), np.int64)
        earlier_L[order_L[1:]] = size + order_L[:-1]
        first_L = order_L[is_first_L]
        earlier_L[first_L] = self._on_stack(ids_L[first_L])
        is_last_L = np.empty(len(ids_L), bool)
        is_last_L[order_L] = np.append(is_first_L[1:], True)[: len(ids_L)]
        return earlier_L, is_last_L

    def _on_stack(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._stack_S):
            return np.full(len(ids), -1)
        order_S = np.argsort(self._stack_S)
        sorted_S = self._stack_S[order_S]
        found = np.minimum(np.searchsorted(sorted_S, ids), len(sorted_S) - 1)
        return np.where(sorted_S[found] == ids, order_S[found], -1)


def _ranks(earlier_L: NDArray[np.int64], num_positions: int) -> NDArray[np.int64]:
    """Places in the order of `earlier_L`, whose values differ but for -1."""
    known_L = earlier_L >= 0
    is_earlier = np.zeros(num_positions, np.int64)
    is_earlier[earlier_L[known_L]] = 1
    num_first = len(earlier_L) - int(known_L.sum())
    ranks_L = np.empty(len(earlier_L), np.int64)
    ranks_L[~known_L] = np.arange(num_first)
    ranks_L[known_L] = num_first - 1 + np.cumsum(is_earlier)[earlier_L[known_L]]
    return ranks_L


def _smaller_before(ranks_L: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many values before each one are smaller than it; the values are 0, 1, .. in any order.

    From the highest bit on, values are divided by that bit in every group of equal higher bits,
    keeping their order: those with a 1 are larger than the ones with a 0 before them.
    """
    levels = max(len(ranks_L) - 1, 0).bit_length()
    padded = 1 << levels
    values = np.append(ranks_L, np.arange(len(ranks_L), padded)).astype(np.int32)
    counts = np.zeros(padded, np.int32)
    positions = np.arange(padded, dtype=np.int32)
    for level in reversed(range(levels)):
        half = 1 << level
        is_large = (values & half) != 0
        zeros_before = np.cumsum(~is_large, dtype=np.int32) - (positions >> (level + 1)) * half
        counts += np.where(is_large, zeros_before, 0).astype(np.int32)
        values, counts = (
            np.concatenate(
                [array[~is_large].reshape(-1, half), array[is_large].reshape(-1, half)], axis=1
            ).ravel()
            for array in (values, counts)
        )
    return counts[ranks_L].astype(np.int64)  # the values are in order now


class ReuseMeter:
    """The reuse curve of one table from the requests of its batches.

    Args:
        num_embeddings: N.
        batch_size: samples of the batches, for the record.
        exact_rows: up to so many rows every row is followed; of a larger table so many, in eight
            groups that each give a curve: their mean is the result, and its standard error tells
            how far they are apart.

    Raises:
        ValueError: `exact_rows` is below 1.
    """

    def __init__(self, num_embeddings: int, batch_size: int, exact_rows: int) -> None:
        if exact_rows < 1:
            raise ValueError(f"exact_rows={exact_rows} must be at least 1")
        self._batch_size = batch_size
        self._share = min(1.0, exact_rows / num_embeddings)
        num_groups = 1 if self._share == 1.0 else _GROUPS
        self.cache_rows = _powers_of_two_up_to(num_embeddings)
        self._groups = [LruDistances() for _ in range(num_groups)]
        self._misses = np.zeros((num_groups, len(self.cache_rows)))
        self._first_touches = np.zeros(num_groups)
        self._requests = 0
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """The distinct rows of one batch, in the order of their first use."""
        self._requests += len(ids)
        if self._share < 1.0:
            ids = ids[hash_ids(ids, _HASH_SLOTS) < self._share * _HASH_SLOTS]
        self._waiting.append(ids)
        self._num_waiting += len(ids)
        if self._num_waiting >= max(_REQUESTS_AT_ONCE, sum(map(len, self._groups))):
            self._count()

    def curve(self) -> ReuseCurve | None:
        """Of all requests so far; None when there were none."""
        self._count()
        if not self._requests:
            return None
        num_groups = len(self._groups)
        requests = self._requests * self._share / num_groups  # that a group stands for
        known = np.maximum(requests - self._first_touches, 1e-9)
        ratios = np.clip(self._misses / known[:, None], 0.0, 1.0)
        spread = ratios.std(axis=0, ddof=1) if num_groups > 1 else np.zeros(1)
        first_touches = self._first_touches.sum() / self._share
        return ReuseCurve(
            self._batch_size,
            self.cache_rows,
            tuple(_rounded(ratios.mean(axis=0))),
            min(1.0, float(first_touches) / self._requests),
            sampled_share=self._share,
            error=float(spread.max() / math.sqrt(num_groups)),
        )

    def _count(self) -> None:
        ids = np.concatenate([np.zeros(0, np.int64), *self._waiting])
        self._waiting, self._num_waiting = [], 0
        num_groups = len(self._groups)
        group_of = hash_ids(ids, _HASH_SLOTS) % num_groups
        for group, distances in enumerate(self._groups):
            found = distances.add(ids[group_of == group])
            self._first_touches[group] += np.count_nonzero(found == FIRST_TOUCH)
            scaled = found[found != FIRST_TOUCH] * (num_groups / self._share)
            served = np.searchsorted(self.cache_rows, scaled, side="right")  # by sizes from here on
            missed = np.bincount(served, minlength=len(self.cache_rows) + 1)[::-1].cumsum()[::-1]
            self._misses[group] += missed[1:]


def _powers_of_two_up_to(num_rows: int) -> tuple[int, ...]:
    return (*(1 << k for k in range((num_rows - 1).bit_length())), num_rows)


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
