"""Large batches of ids for profiling: of a data set, or of a file with one index a line."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.train.data import Dataset


@dataclass(frozen=True)
class FeatureBatch:
    """The ids that a batch of samples has for one feature.

    Args:
        ids_L: sample after sample.
        offsets: where the ids of every sample start, and the end of the last one.
    """

    ids_L: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ids_of(self, start: int, stop: int) -> NDArray[np.int64]:
        """Of the samples from `start` to `stop`."""
        return self.ids_L[self.offsets[start] : self.offsets[stop]]

    def first(self, num_samples: int) -> FeatureBatch:
        """Its first samples."""
        offsets = self.offsets[: num_samples + 1]
        return FeatureBatch(self.ids_L[: offsets[-1]], offsets)


class IdSource(abc.ABC):
    """Ids that can be gone through several times.

    Attributes:
        name: for people.
        num_embeddings: rows of every table; a table's feature has the same name.
        num_samples: None where that is not known before.
    """

    name: str
    num_embeddings: dict[str, int]
    num_samples: int | None = None

    @abc.abstractmethod
    def batches(self, batch_size: int) -> Iterator[dict[str, FeatureBatch]]:
        """By table; all batches but the last have `batch_size` samples."""


class DatasetIds(IdSource):
    """The training rows of a data set in the order of the first epoch."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        self.name = name
        self.num_embeddings = {f.name: f.num_embeddings for f in dataset.schema.sparse}
        self.num_samples = dataset.num_batches("train", 1)
        self._dataset = dataset

    def batches(self, batch_size: int) -> Iterator[dict[str, FeatureBatch]]:
        for batch in self._dataset.batches("train", batch_size=batch_size):
            features = batch.sparse_features.to_dict()
            yield {
                name: FeatureBatch(
                    features[name].values().numpy().astype(np.int64),
                    features[name].offsets().numpy().astype(np.int64),
                )
                for name in self.num_embeddings
            }


class TraceIds(IdSource):
    """A text file of one index a line, for one table named like the file.

    Args:
        path: the file.
        lookups_per_sample: lines that make one sample.
        num_embeddings: N; without it the largest index and one more.

    Raises:
        ValueError: no such file, a line that is no index, or one outside of the table; with file
            and line.
    """

    def __init__(
        self, path: str, *, lookups_per_sample: int = 1, num_embeddings: int | None = None
    ) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise ValueError(f"trace {path!r}: no such file")
        self._lookups_per_sample = lookups_per_sample
        self._rows = num_embeddings
        num_lookups = largest = 0
        for ids in self._parts(1 << 20):
            num_lookups += len(ids)
            largest = max(largest, int(ids.max()))
        if not num_lookups:
            raise ValueError(f"{path}: no index")
        self.name = str(path)
        self.num_embeddings = {self._path.stem: num_embeddings or largest + 1}
        self.num_samples = -(-num_lookups // lookups_per_sample)

    def batches(self, batch_size: int) -> Iterator[dict[str, FeatureBatch]]:
        for ids in self._parts(batch_size * self._lookups_per_sample):
            samples = -(-len(ids) // self._lookups_per_sample)
            ends = np.arange(samples + 1) * self._lookups_per_sample
            yield {self._path.stem: FeatureBatch(ids, np.minimum(ends, len(ids)))}

    def _parts(self, num_lines: int) -> Iterator[NDArray[np.int64]]:
        with open(self._path, encoding="utf-8") as file:
            first_line = 1
            while lines := list(itertools.islice(file, num_lines)):
                try:
                    ids = np.array(list(map(int, lines)), dtype=np.int64)
                except (ValueError, OverflowError):
                    raise self._first_error(lines, first_line) from None
                limit = self._rows or np.iinfo(np.int64).max
                if ids.min() < 0 or ids.max() >= limit:
                    raise self._first_error(lines, first_line)
                yield ids
                first_line += len(lines)

    def _first_error(self, lines: list[str], first_line: int) -> ValueError:
        for number, line in enumerate(lines, start=first_line):
            text = line.strip()
            limit = self._rows or np.iinfo(np.int64).max
            if not text.isdecimal() or int(text) >= limit:
                return ValueError(f"{self._path}:{number}: {text!r} is no index in 0..{limit - 1}")
        raise AssertionError("a line was refused")
