"""Checkpoint files of one table: the rows ever written, in checksummed blocks.

A header page, then blocks of [ids | records], each behind its number, row count and checksum. The
file is written under another name, flushed to the device and renamed when it is whole; the header
is written last and counts rows and blocks, so that a file cut off anywhere is known as such.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from .header import HEADER_BYTES, Header
from .spec import RowLayout

_PARTIAL = ".partial"
_BLOCK = struct.Struct("<III")  # number of the block, rows, checksum of ids and records


def checkpoint_path(folder: str | Path, table: str) -> Path:
    """The file of a table in a checkpoint folder."""
    return Path(folder) / f"{quote(table, safe='')}.tier"


def write_checkpoint(
    path: Path, header: Header, blocks: Iterable[tuple[np.ndarray, np.ndarray]]
) -> Header:
    """Writes (ids, records) blocks to `path`, which is the old file until it is the whole new one.

    Returns:
        The header with the numbers of rows and blocks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + _PARTIAL)
    with open(partial, "wb") as file:
        file.seek(HEADER_BYTES)
        num_rows = num_blocks = 0
        for ids, records in blocks:
            content = (ids.astype("<i8", copy=False).tobytes(), records.tobytes())
            checksum = zlib.crc32(content[1], zlib.crc32(content[0]))
            file.write(_BLOCK.pack(num_blocks, len(ids), checksum))
            file.writelines(content)
            num_rows += len(ids)
            num_blocks += 1
        header = replace(header, num_rows=num_rows, num_blocks=num_blocks)
        file.seek(0)
        file.write(header.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)
    return header


class CheckpointReader:
    """A checkpoint file, opened and its header checked.

    Args:
        path: the file.
        layout: the columns that its records must have.
        num_embeddings: the N that it must be of.

    Raises:
        ValueError: the file is missing, damaged, or of another table shape.
    """

    def __init__(self, path: Path, layout: RowLayout, num_embeddings: int) -> None:
        self.path, self.layout = path, layout
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except FileNotFoundError as error:
            raise ValueError(f"no checkpoint at {path}") from error
        try:
            self.header = Header.read(self._file.fileno(), path)
            if self.header.kind != "checkpoint":
                raise ValueError(f"{path} is a {self.header.kind!r} file, not a checkpoint")
            for name, found, wanted in (
                ("num_embeddings", self.header.num_embeddings, num_embeddings),
                ("columns", self.header.columns, layout.describe()),
            ):
                if found != wanted:
                    raise ValueError(f"{path} has {name} {found}, the table has {wanted}")
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self) -> None:
        """Reads everything.

        Raises:
            ValueError: as `blocks`.
        """
        for _ in self.blocks():
            pass

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, records) block by block.

        Raises:
            ValueError: a block is damaged or missing; which one, and where in the file.
        """
        self._file.seek(HEADER_BYTES)
        record_bytes = self.layout.record_bytes
        for number in range(self.header.num_blocks):
            at = self._file.tell()
            found, num_rows, checksum = _BLOCK.unpack(self._take(_BLOCK.size, number))
            if found != number or not 0 < num_rows <= self.header.num_rows:
                raise ValueError(
                    f"{self.path} is damaged: no beginning of block {number} at byte {at}"
                )
            content = self._take(num_rows * (8 + record_bytes), number)
            if zlib.crc32(content) != checksum:
                raise ValueError(
                    f"{self.path} is damaged: block {number} of {self.header.num_blocks} "
                    f"({num_rows} rows, bytes {at} to {self._file.tell()}) does not fit its "
                    "checksum"
                )
            ids = np.frombuffer(content, "<i8", num_rows)
            yield ids, np.frombuffer(content, self.layout.record_dtype, num_rows, 8 * num_rows)
        if self._file.read(1):
            raise ValueError(
                f"{self.path} is damaged: it goes on after its last block, at byte "
                f"{self._file.tell() - 1}"
            )

    def _take(self, count: int, number: int) -> bytes:
        content = self._file.read(count)
        if len(content) < count:
            raise ValueError(
                f"{self.path} is cut off at byte {self._file.tell()}, within block {number} of "
                f"{self.header.num_blocks}"
            )
        return content
