"""One pass over the data for counts, reuse and distinct rows, another one for ids by frequency."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from ecorec_torchrec.planner import Profile, TableProfile
from ecorec_torchrec.train.profiling.batches import FeatureBatch, IdSource
from ecorec_torchrec.train.profiling.counts import DistinctMeter, RowCounts
from ecorec_torchrec.train.profiling.reuse import ReuseMeter


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What is measured, and what may be held in memory.

    Args:
        batch_size: samples of the batches whose rows a cache is asked for.
        largest_batch: samples of the largest batch whose distinct rows are counted; so many are
            held at once.
        max_samples: to read; None reads all.
        exact_rows: rows of a table that are followed for reuse, see `ReuseMeter`.
        hot_rows: rows whose ids are listed.
        counted_rows: see `RowCounts`.
    """

    batch_size: int
    largest_batch: int = 65_536
    max_samples: int | None = None
    exact_rows: int = 1 << 20
    hot_rows: int = 100_000
    counted_rows: int = 1 << 18


def measure_profile(source: IdSource, settings: ProfileSettings) -> Profile:
    """Goes through the data twice.

    Memory does not grow with the data: the ids of `largest_batch` samples, and for each table
    about 40 bytes for each of `exact_rows` and 32 for each of `counted_rows` rows.

    Raises:
        ValueError: an id that is no row of its table; the data set's own errors.
    """
    tables = {
        name: _TableMeter(name, num_embeddings, settings)
        for name, num_embeddings in source.num_embeddings.items()
    }
    samples = 0
    for batch in _read(source, settings, "rows and reuse"):
        samples += len(next(iter(batch.values())))
        for name, feature in batch.items():
            tables[name].add(feature)
    for batch in _read(source, settings, "rows by frequency"):
        for name, feature in batch.items():
            tables[name].add_by_frequency(feature)
    profiles = {name: meter.profile(samples) for name, meter in tables.items()}
    empty = [name for name, profile in profiles.items() if profile is None]
    if empty:
        warnings.warn(f"no ids for {', '.join(empty)}: not in the profile", stacklevel=2)
    found = {name: profile for name, profile in profiles.items() if profile is not None}
    return Profile(found, samples=samples, source=source.name)


def _read(
    source: IdSource, settings: ProfileSettings, what: str
) -> Iterator[dict[str, FeatureBatch]]:
    """Batches up to `max_samples`, with a progress bar where somebody watches."""
    limit = settings.max_samples
    total = limit if source.num_samples is None else min(limit or math.inf, source.num_samples)
    read = 0
    with tqdm(total=total, desc=what, unit=" samples", unit_scale=True, disable=None) as bar:
        for batch in source.batches(settings.largest_batch):
            if limit is not None:
                batch = {name: feature.first(limit - read) for name, feature in batch.items()}
            num_samples = len(next(iter(batch.values())))
            yield batch
            bar.update(num_samples)
            read += num_samples
            if read == limit:
                return


class _TableMeter:
    """All that is measured of one table."""

    def __init__(self, name: str, num_embeddings: int, settings: ProfileSettings) -> None:
        self._name = name
        self._num_embeddings = num_embeddings
        self._settings = settings
        self._counts = RowCounts(settings.counted_rows)
        self._by_id = DistinctMeter(num_embeddings)
        self._by_frequency = DistinctMeter(num_embeddings)
        self._reuse = ReuseMeter(num_embeddings, settings.batch_size, settings.exact_rows)

    def add(self, batch: FeatureBatch) -> None:
        self._check(batch)
        self._counts.add(batch.ids_L)
        self._by_id.add(batch)
        for start in range(0, len(batch), self._settings.batch_size):
            stop = min(start + self._settings.batch_size, len(batch))
            ids = batch.ids_of(start, stop)
            _, first_uses = np.unique(ids, return_index=True)
            self._reuse.add(ids[np.sort(first_uses)])

    def add_by_frequency(self, batch: FeatureBatch) -> None:
        """A batch of the second pass, when the counts are known."""
        renumbered = self._counts.renumbered(batch.ids_L)
        self._by_frequency.add(FeatureBatch(renumbered, batch.offsets))

    def profile(self, samples: int) -> TableProfile | None:
        """None if no id occurred."""
        by_id = self._by_id.curve()
        if by_id is None:
            return None
        return TableProfile(
            self._name,
            self._num_embeddings,
            features=(self._name,),
            lookups_per_sample=(self._counts.lookups / samples,),
            by_id=by_id,
            by_frequency=self._by_frequency.curve(),
            reuse=self._reuse.curve(),
            hot=self._counts.coverage(self._settings.hot_rows),
            hot_ids=self._counts.hottest(self._settings.hot_rows),
        )

    def _check(self, batch: FeatureBatch) -> None:
        outside = batch.ids_L[(batch.ids_L < 0) | (batch.ids_L >= self._num_embeddings)]
        if len(outside):
            raise ValueError(
                f"table {self._name!r}: id {outside[0]} is no row of 0..{self._num_embeddings - 1}"
            )
