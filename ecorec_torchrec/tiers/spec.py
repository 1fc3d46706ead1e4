"""What a user says about the tiers of a table, and what one row of it looks like in bytes.

Legend: N rows of the table, S slots (`cache_rows`), U unique rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

POLICIES = ("lfu", "lru")
WEIGHT = "weight"
# Last field of a record: 0 in the holes of a sparse file, so that a row knows it was never written.
WRITTEN = "written"


@dataclass(frozen=True)
class TierSpec:
    """The memories under one table.

    Args:
        cache_rows: S, slots of the first level, which the lookup kernel holds.
        folder: where the row file lies, on block storage. It is made if it is missing.
        memory_rows: rows of the second level, in byte-addressable memory; 0 for none.
        memory_folder: folder on a byte-addressable device for the second level (tmpfs, DAX, a mount
            bound to a NUMA node); None for ordinary memory.
        prefetch_batches: how many batches ahead the rows are fetched.
        policy: which rows leave first: "lfu", the least frequently used, where a use counts half
            after some hundred batches; or "lru", the least recently used.
        direct_reads: read and write the file past the page cache (O_DIRECT), so that the memory
            named here is all that is used; False maps the file into memory, which lets the kernel
            cache it in whatever memory is free.
        pinned_rows: how many of the hottest rows, known from `hot_ids_file`, never leave their
            slots; of each shard where the table is cut by rows.
        hot_ids_file: the `.npz` file that `ecorec profile` writes beside a profile. Its rows of
            this table come first in the row file, the most frequent one first.

    Raises:
        TypeError: a value is of the wrong type.
        ValueError: a value is out of its range.

    Example::

        TierSpec(cache_rows=100_000, folder="/nvme/tables", memory_rows=1_000_000)
    """

    cache_rows: int
    folder: str
    memory_rows: int = 0
    memory_folder: str | None = None
    prefetch_batches: int = 1
    policy: str = "lfu"
    direct_reads: bool = False
    pinned_rows: int = 0
    hot_ids_file: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("cache_rows", 1),
            ("memory_rows", 0),
            ("prefetch_batches", 0),
            ("pinned_rows", 0),
        ):
            _check_count(name, getattr(self, name), least)
        for name in ("folder", "memory_folder", "hot_ids_file"):
            path = getattr(self, name)
            if path is None and name != "folder":
                continue
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} must be a path, got {path!r}")
            object.__setattr__(self, name, os.fspath(path))
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name a {name.rpartition('_')[2]}")
        if not isinstance(self.direct_reads, bool):
            raise TypeError(f"direct_reads must be True or False, got {self.direct_reads!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is unknown; choose from {list(POLICIES)}")
        if self.memory_folder is not None and not self.memory_rows:
            raise ValueError(
                f"memory_folder={self.memory_folder!r} without memory_rows: say how many rows it "
                "may hold"
            )
        if self.pinned_rows >= self.cache_rows:
            raise ValueError(
                f"pinned_rows={self.pinned_rows} leave no slot of cache_rows={self.cache_rows} "
                "for other rows"
            )


@dataclass(frozen=True)
class RowLayout:
    """One row as it is stored below the slots: [weight | optimizer state], then a mark.

    Args:
        columns: (name, width, dtype) of the weight, named "weight", and of each optimizer state.

    Raises:
        ValueError: no column named "weight", a name twice or "written", a width below 1.

    Example::

        layout = RowLayout((("weight", 64, torch.float32), ("momentum1", 1, torch.float32)))
        layout.record_bytes   # 264: 256 + 4, and 4 for the mark of a written row
    """

    columns: tuple[tuple[str, int, torch.dtype], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(tuple(column) for column in self.columns))
        names = [name for name, _, _ in self.columns]
        if WEIGHT not in names:
            raise ValueError(f"columns {names} have no {WEIGHT!r}")
        if WRITTEN in names or len(set(names)) < len(names):
            raise ValueError(f"columns {names}: each name once, and {WRITTEN!r} is taken")
        for name, width, dtype in self.columns:
            _check_count(f"width of {name}", width, 1)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype of {name} must be a torch.dtype, got {dtype!r}")

    @cached_property
    def record_dtype(self) -> np.dtype:
        """The record as a numpy structure: opaque bytes per column, whatever torch's dtype."""
        fields: list[Any] = [
            (name, f"V{width * dtype.itemsize}") for name, width, dtype in self.columns
        ]
        return np.dtype([*fields, (WRITTEN, "<u4")])

    @property
    def record_bytes(self) -> int:
        """Bytes of one row in the second level and in the file."""
        return self.record_dtype.itemsize

    def width(self, column: str) -> int:
        """Elements of one column.

        Raises:
            ValueError: there is no such column.
        """
        for name, width, _ in self.columns:
            if name == column:
                return width
        raise ValueError(f"no column {column!r}; there are {[name for name, _, _ in self.columns]}")

    def new_records(self, count: int) -> np.ndarray:
        """(count,) records of zeros, which is what an unwritten place of the file reads as."""
        return np.zeros(count, self.record_dtype)

    def tensors(self, records: np.ndarray) -> dict[str, torch.Tensor]:
        """Each column of `records` (U,) as a (U, width) tensor of its own."""
        return {
            name: torch.from_numpy(np.ascontiguousarray(records[name]).view(np.uint8))
            .view(dtype)
            .view(-1, width)
            for name, width, dtype in self.columns
        }

    def set_column(self, records: np.ndarray, name: str, values: torch.Tensor) -> None:
        """Writes `values` (U, width) into a column of `records`, in the column's dtype."""
        width, dtype = next((w, d) for n, w, d in self.columns if n == name)
        assert values.shape == (len(records), width), (name, values.shape, len(records), width)
        plain = values.detach().to(device="cpu", dtype=dtype).contiguous()
        records[name] = bytes_view(plain)

    def describe(self) -> list[list[Any]]:
        """The columns as plain values, for a file header: [["weight", 64, "float32"], ...]."""
        return [[name, width, str(dtype)[6:]] for name, width, dtype in self.columns]


def bytes_view(rows: torch.Tensor) -> np.ndarray:
    """A CPU tensor (S, width) as a numpy array (S,) of opaque rows, sharing its memory."""
    num_rows, width = rows.shape
    return rows.view(torch.uint8).numpy().view(f"V{width * rows.element_size()}").reshape(num_rows)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")
