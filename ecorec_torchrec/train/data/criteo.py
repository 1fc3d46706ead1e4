"""Criteo Kaggle and Terabyte click logs, streamed from their tab-separated files.

A line is: label, 13 integers, 26 hexadecimal hashes; any field but the label may be empty. Files
may be of any size and may be gzipped. Every rank reads all lines (which is quick) and parses only
those of its share (which is not), so that all ranks see the same number of batches without
anyone knowing the number of rows.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    INT_FEATURE_COUNT,
)

from ecorec_torchrec.train.data.batch import (
    EMPTY_SLOT,
    RankBatch,
    Rows,
    Schema,
    SparseFeature,
    make_batch,
    share_of_rank,
)
from ecorec_torchrec.train.data.dataset import SPLITS, Dataset, Split, epoch_seed
from ecorec_torchrec.train.data_config import DataConfig

_NUM_FIELDS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT
_INTEGER_SHIFT = 3  # as TorchRec's BinaryCriteoUtils: log(x + 3), the smallest value being -2
_COUNT_BELOW_BYTES = 1 << 30


class _Line(NamedTuple):
    text: str
    file: Path
    number: int  # 1-based


class Criteo(Dataset):
    """Criteo click logs.

    The files of `val_files` and `test_files` are the splits; where the configuration gives none,
    rows of the training files are assigned to the split by a hash of their position and the seed.

    Raises:
        ValueError: no path, a pattern that matches no file, or a file in two splits; while
            reading, a line that is not a Criteo row (with file and line number).
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.seed = seed
        self.schema = Schema(
            dense=tuple(DEFAULT_INT_NAMES),
            sparse=tuple(
                SparseFeature(name, config.num_embeddings.get(name, config.criteo.num_embeddings))
                for name in DEFAULT_CAT_NAMES
            ),
        )
        self._num_embeddings_F = [feature.num_embeddings for feature in self.schema.sparse]
        self._shuffle_buffer_rows = config.criteo.shuffle_buffer_rows
        self._files = _find_files(config)
        self._held_out_parts: dict[Split, float] = {}
        if not self._files["val"]:
            self._held_out_parts["val"] = config.val_fraction
        if not self._files["test"]:
            self._held_out_parts["test"] = config.test_fraction
        self._num_rows = self._count_rows()

    def describe(self) -> str:
        if self._num_rows is None:
            total = sum(file.stat().st_size for files in self._files.values() for file in files)
            return f"{total / 2**30:.1f} GiB of Criteo rows, streamed: too large to count first"
        sizes = ", ".join(f"{split} {rows:,}" for split, rows in self._num_rows.items())
        return f"{sum(self._num_rows.values()):,} rows: {sizes}"

    def num_batches(self, split: Split, batch_size: int) -> int | None:
        return None if self._num_rows is None else -(-self._num_rows[split] // batch_size)

    def batches(
        self,
        split: Split,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        start_batch: int = 0,
    ) -> Iterator[RankBatch]:
        lines = self._lines(split)
        if split == "train":
            lines = _shuffled(lines, self._shuffle_buffer_rows, epoch_seed(self.seed, epoch))
        lines = itertools.islice(lines, start_batch * batch_size, None)
        while chunk := list(itertools.islice(lines, batch_size)):
            share = chunk[share_of_rank(len(chunk), rank, world_size)]
            yield make_batch(self._parse(share), self.schema, len(chunk), world_size)

    def _lines(self, split: Split) -> Iterator[_Line]:
        """The lines of a split, in the order of the files."""
        own_files = self._files[split]
        for position, line in enumerate(_read_lines(own_files or self._files["train"])):
            if (own_files and split != "train") or self._split_of_row(position) == split:
                yield line

    def _split_of_row(self, position: int) -> Split:
        """The split of a row of the training files."""
        if not self._held_out_parts:
            return "train"
        draw, bound = _uniform(position, self.seed), 0.0
        for split, part in self._held_out_parts.items():
            bound += part
            if draw < bound:
                return split
        return "train"

    def _count_rows(self) -> dict[Split, int] | None:
        size = sum(file.stat().st_size for files in self._files.values() for file in files)
        if size > _COUNT_BELOW_BYTES:
            return None
        counts = {split: sum(1 for _ in self._lines(split)) for split in SPLITS}
        for split, rows in counts.items():
            if not rows:
                raise ValueError(f"the {split} split holds no row: {_names(self._files[split])}")
        return counts

    def _parse(self, lines: list[_Line]) -> Rows:
        integers = np.zeros((len(lines), INT_FEATURE_COUNT), dtype=np.float32)
        ids = np.full((len(lines), CAT_FEATURE_COUNT), EMPTY_SLOT, dtype=np.int64)
        labels = np.empty(len(lines), dtype=np.float32)
        for row, line in enumerate(lines):
            fields = line.text.split("\t")
            try:
                if len(fields) != _NUM_FIELDS:
                    raise ValueError(f"{len(fields)} fields instead of {_NUM_FIELDS}")
                labels[row] = _parse_label(fields[0])
                integers[row] = [int(x) if x else 0 for x in fields[1 : 1 + INT_FEATURE_COUNT]]
                ids[row] = [
                    int(x, 16) % num_embeddings if x else EMPTY_SLOT
                    for x, num_embeddings in zip(
                        fields[1 + INT_FEATURE_COUNT :], self._num_embeddings_F, strict=True
                    )
                ]
            except ValueError as error:
                raise ValueError(f"{line.file}:{line.number}: not a Criteo row: {error}") from None
        dense = np.log(np.maximum(integers + _INTEGER_SHIFT, 1))
        return Rows(torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels))


def _parse_label(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError(f"the label is {text!r}, not 0 or 1")
    return int(text)


def _find_files(config: DataConfig) -> dict[Split, list[Path]]:
    if config.path is None:
        raise ValueError("data.path=None: pass the folder of the Criteo files with --data FOLDER")
    root = Path(config.path)
    if not root.exists():
        raise ValueError(f"data.path={config.path!r} does not exist")
    patterns: dict[Split, tuple[str, ...]] = {
        "train": config.criteo.train_files,
        "val": config.criteo.val_files,
        "test": config.criteo.test_files,
    }
    if root.is_file():
        if any(patterns.values()):
            raise ValueError(
                f"data.path={config.path!r} is a file, but data.criteo.*_files name files in a "
                f"folder: --data {root.parent} --data.criteo.train-files {root.name}"
            )
        return {"train": [root], "val": [], "test": []}
    files: dict[Split, list[Path]] = {
        split: [file for pattern in patterns[split] for file in _match(root, pattern, split)]
        for split in SPLITS
    }
    if not patterns["train"]:
        held_out = {*files["val"], *files["test"]}
        files["train"] = [f for f in sorted(root.iterdir()) if f.is_file() and f not in held_out]
        if not files["train"]:
            raise ValueError(f"data.path={config.path!r} holds no file to train on")
    for one, other in itertools.combinations(SPLITS, 2):
        if shared := set(files[one]) & set(files[other]):
            raise ValueError(f"{_names(sorted(shared))} is in both the {one} and the {other} split")
    return files


def _match(root: Path, pattern: str, split: Split) -> list[Path]:
    found = sorted(file for file in root.glob(pattern) if file.is_file())
    if not found:
        raise ValueError(f"data.criteo.{split}_files: {pattern!r} matches no file in {root}")
    return found


def _names(files: list[Path]) -> str:
    return ", ".join(map(str, files))


def _read_lines(files: list[Path]) -> Iterator[_Line]:
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as stream:
            for number, text in enumerate(stream, start=1):
                yield _Line(text.rstrip("\r\n"), file, number)


def _shuffled(lines: Iterator[_Line], buffer_rows: int, seed: int) -> Iterator[_Line]:
    """Swaps every line with a random one of the last `buffer_rows`; all lines come out once."""
    rng = random.Random(seed)
    buffer = list(itertools.islice(lines, buffer_rows))
    for line in lines:
        slot = rng.randrange(len(buffer))
        yield buffer[slot]
        buffer[slot] = line
    rng.shuffle(buffer)
    yield from buffer


def _uniform(position: int, seed: int) -> float:
    """A number in [0, 1) that follows from a row's position and the seed (splitmix64)."""
    mask = (1 << 64) - 1
    x = (position * 0x9E3779B97F4A7C15 + (seed + 1) * 0xD1B54A32D192ED03) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) / 2**64
