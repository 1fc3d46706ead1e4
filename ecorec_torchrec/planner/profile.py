"""What batches of real data ask of every table: lookups, distinct rows and prefixes, reuse.

Legend: b samples of a batch, L lookups, U(b) distinct rows and P(b) distinct prefixes of a batch, N
rows of a table, p row factors.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.tt import TTSpec

_GB = 1e9


@dataclass(frozen=True)
class DistinctCurve:
    """How many different values `id // block` takes among the ids of a batch.

    `block` 1 counts rows, p3 the prefixes of three cores, p2 * p3 those of their first digit.
    Counts are held for blocks of 1, 2, 4, .. up to the whole table and interpolated linearly
    between the logarithms of batch sizes, blocks and counts. With batch sizes in steps of 2 too,
    that is within 8 % for uniform and for scattered Zipf ids. Above the largest batch the last
    slope goes on.

    Args:
        batch_sizes: samples, ascending.
        counts: per batch size and k the mean number of different values of `id // 2**k`.

    Raises:
        ValueError: sizes that do not ascend, rows of another length, or counts that grow with k.

    Example::

        curve = DistinctCurve((1, 2), ((1.0, 1.0), (1.8, 1.2)))
        curve.at(2)             # 1.8
        curve.at(2, block=2)    # 1.2
    """

    batch_sizes: tuple[int, ...]
    counts: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_ascending("batch_sizes", self.batch_sizes)
        if len(self.counts) != len(self.batch_sizes):
            raise ValueError(
                f"{len(self.counts)} rows of counts for {len(self.batch_sizes)} batch_sizes"
            )
        for size, row in zip(self.batch_sizes, self.counts, strict=True):
            if len(row) != len(self.counts[0]) or not row:
                raise ValueError(
                    f"counts of batch size {size}: {len(row)} values, not as the first"
                )
            falls = all(a >= b > 0 for a, b in zip(row, row[1:], strict=False))
            if not (falls and 0 < row[0] < math.inf):
                raise ValueError(f"counts of batch size {size} must be > 0 and never grow: {row}")

    def at(self, batch_size: float, block: int = 1) -> float:
        """Distinct values of `id // block` in a batch of `batch_size` samples."""
        if batch_size <= 0:
            return 0.0
        first = self.batch_sizes[0]
        if batch_size < first:
            return self.at(first, block) * batch_size / first
        column = [_between(_log2s(row), math.log2(block)) for row in self.counts]
        return 2.0 ** _beyond(_log2s(self.batch_sizes), column, math.log2(batch_size))


@dataclass(frozen=True)
class ReuseCurve:
    """How a cache of the rows used last would do, where each batch asks once for its distinct rows.

    Args:
        batch_size: samples of these batches.
        cache_rows: sizes of the cache, ascending.
        miss_ratios: per size the share of requests for rows asked for before that miss.
        first_touch_rate: share of all requests that are for rows never asked for before.
        sampled_share: of the table's rows that were followed; 1 counts exactly.
        error: standard error of the miss ratios, 0 where they are exact.

    Raises:
        ValueError: sizes that do not ascend, or a share outside of 0..1.
    """

    batch_size: int
    cache_rows: tuple[int, ...]
    miss_ratios: tuple[float, ...]
    first_touch_rate: float
    sampled_share: float = 1.0
    error: float = 0.0

    def __post_init__(self) -> None:
        _check_ascending("cache_rows", self.cache_rows)
        if len(self.miss_ratios) != len(self.cache_rows):
            raise ValueError(
                f"{len(self.miss_ratios)} miss_ratios for {len(self.cache_rows)} cache_rows"
            )
        _check_shares("miss_ratios", self.miss_ratios)
        for name in ("first_touch_rate", "sampled_share"):
            _check_shares(name, (getattr(self, name),))

    def miss_ratio(self, cache_rows: float) -> float:
        """At any cache size: linear between the sizes held, 1 without a cache."""
        return float(np.interp(cache_rows, (0, *self.cache_rows), (1.0, *self.miss_ratios)))

    def fetched_share(self, cache_rows: float) -> float:
        """Share of all requests that a cache has to fetch: misses and first touches."""
        first = self.first_touch_rate
        return first + (1.0 - first) * self.miss_ratio(cache_rows)


@dataclass(frozen=True)
class HotRows:
    """How much of the lookups the most frequent rows get.

    Args:
        rows: numbers of rows, ascending.
        shares: of all lookups, that so many of the hottest rows get.
        error: how much too small a share may be, because counts of rare rows were dropped.

    Raises:
        ValueError: numbers that do not ascend, or a share outside of 0..1.
    """

    rows: tuple[int, ...]
    shares: tuple[float, ...]
    error: float = 0.0

    def __post_init__(self) -> None:
        _check_ascending("rows", self.rows)
        if len(self.shares) != len(self.rows):
            raise ValueError(f"{len(self.shares)} shares for {len(self.rows)} rows")
        _check_shares("shares", self.shares)

    def share(self, rows: float) -> float:
        """Of the lookups that go to so many of the hottest rows."""
        return float(np.interp(rows, (0, *self.rows), (0.0, *self.shares)))


@dataclass(frozen=True)
class TableProfile:
    """One table.

    Args:
        name: the table's.
        num_embeddings: N.
        features: those that read it.
        lookups_per_sample: the mean per feature.
        by_id: distinct rows and prefixes with the ids as they are.
        by_frequency: the same if ids were numbered by how often they occur.
        reuse: what caches would do.
        hot: what the hottest rows get.
        hot_ids: the most frequent ids, the most frequent one first.

    Raises:
        ValueError: numbers that do not fit together.
    """

    name: str
    num_embeddings: int
    features: tuple[str, ...]
    lookups_per_sample: tuple[float, ...]
    by_id: DistinctCurve
    by_frequency: DistinctCurve | None = None
    reuse: ReuseCurve | None = None
    hot: HotRows | None = None
    hot_ids: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.num_embeddings < 1:
            raise ValueError(f"num_embeddings={self.num_embeddings} must be at least 1")
        if len(self.features) != len(self.lookups_per_sample):
            raise ValueError(
                f"{len(self.lookups_per_sample)} lookups_per_sample for "
                f"{len(self.features)} features"
            )
        if not all(0 <= lookups < math.inf for lookups in self.lookups_per_sample):
            raise ValueError(f"lookups_per_sample={self.lookups_per_sample} must be >= 0")
        if not self.all_lookups_per_sample > 0:
            raise ValueError("no feature has lookups")

    @property
    def all_lookups_per_sample(self) -> float:
        """Of all features together."""
        return sum(self.lookups_per_sample)

    def unique_rows(self, batch_size: float) -> float:
        """U(b): mean number of distinct rows in a batch of so many samples."""
        return min(self.by_id.at(batch_size), self._most(batch_size, self.num_embeddings))

    def unique_prefixes(
        self,
        batch_size: float,
        spec: TTSpec,
        *,
        num_digits: int | None = None,
        by_frequency: bool = False,
    ) -> float:
        """P(b): mean number of distinct prefixes of row digits in a batch.

        Args:
            batch_size: samples.
            spec: whose row factors say what a prefix is.
            num_digits: of a prefix; without it all but the last.
            by_frequency: with ids numbered by frequency.

        Raises:
            ValueError: `by_frequency` was not measured.
        """
        curve = self.by_frequency if by_frequency else self.by_id
        if curve is None:
            raise ValueError(f"table {self.name!r}: the profile has no curve by frequency")
        num_digits = spec.num_cores - 1 if num_digits is None else num_digits
        block = math.prod(spec.row_factors[num_digits:])
        prefixes = -(-self.num_embeddings // block)
        return min(curve.at(batch_size, block), self._most(batch_size, prefixes))

    def gb_per_s(
        self, samples_per_second: float, batch_size: int, row_bytes: float, cache_rows: float = 0
    ) -> float:
        """Traffic of training with the memory that holds the table, in 1e9 bytes per second.

        Each batch reads its distinct rows and writes them back; with a cache in front, those alone
        that it has to fetch.

        Args:
            samples_per_second: of all ranks together.
            batch_size: samples of a batch, of all ranks together.
            row_bytes: of a row with its optimizer state.
            cache_rows: rows of the cache; needs `reuse`.

        Raises:
            ValueError: a cache, but no `reuse`.
        """
        rows = self.unique_rows(batch_size)
        if cache_rows:
            if self.reuse is None:
                raise ValueError(f"table {self.name!r}: the profile has no reuse curve")
            rows *= self.reuse.fetched_share(cache_rows)
        return 2 * rows * row_bytes * samples_per_second / batch_size / _GB

    def _most(self, batch_size: float, population: int) -> float:
        return min(population, batch_size * self.all_lookups_per_sample)


@dataclass(frozen=True)
class Profile:
    """What a stretch of data asks of all tables.

    Args:
        tables: by name.
        samples: that were read.
        source: where they came from.

    Example::

        profile = load_profile("profile.yaml")
        profile.tables["users"].unique_rows(batch_size=65_536)
        EcoRecPlanner(topology, profile=profile)
    """

    tables: Mapping[str, TableProfile]
    samples: int
    source: str = ""


def _check_ascending(name: str, values: Sequence[int]) -> None:
    if not values or values[0] < 1 or any(a >= b for a, b in zip(values, values[1:], strict=False)):
        raise ValueError(f"{name}={values} must ascend from at least 1")


def _check_shares(name: str, values: Sequence[float]) -> None:
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{name}={values} must lie within 0..1")


def _log2s(values: Sequence[float]) -> list[float]:
    return [math.log2(value) for value in values]


def _between(values: Sequence[float], position: float) -> float:
    """Linear between values at 0, 1, 2, ..; the last one beyond them."""
    left = min(int(position), len(values) - 1)
    right = min(left + 1, len(values) - 1)
    return values[left] + (position - left) * (values[right] - values[left])


def _beyond(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between points, and on with the last slope."""
    if len(xs) == 1:
        return ys[0] + (x - xs[0])
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + slope * (x - xs[right - 1])
