"""The file of a table: one record per row at a fixed place, a hole where nothing was written.

The file is sparse. A record ends with a mark that is 1 once the row was written, and a hole reads
as zeros: so the file itself knows which rows it holds, and nothing of the table's size is kept in
memory. It is scratch of one process: checkpoints are other files.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .header import HEADER_BYTES, Header
from .row_order import RowOrder
from .spec import WRITTEN, RowLayout

# After reading and writing so many pages the process lets go of the map, so that what it has
# looked at does not count as its memory (the kernel keeps the pages as long as it likes).
_MAPPED_BYTES = 128 << 20
_SCAN_BYTES = 4 << 20
PAGE = mmap.PAGESIZE


class RowFile:
    """The records of N rows in a sparse file that is mapped into memory.

    Args:
        path: the file. A row file that lies there is replaced; anything else is left alone.
        header: what the file says of itself.
        layout: the columns of a record.
        order: where each row lies.

    Raises:
        ValueError: another process holds the file, `path` is not a row file, or the file system
            has no room for a file of this (nominal) size.
    """

    def __init__(self, path: Path, header: Header, layout: RowLayout, order: RowOrder) -> None:
        self.path, self.layout, self.order = path, layout, order
        self.size = HEADER_BYTES + header.num_embeddings * layout.record_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open_locked(path)
        self._finalizer = weakref.finalize(self, _remove, self._fd, path)
        self._header = header.to_bytes()
        self.clear()
        self._map = mmap.mmap(self._fd, self.size)
        self._map.madvise(mmap.MADV_RANDOM)
        self._records = np.frombuffer(
            self._map, f"V{layout.record_bytes}", header.num_embeddings, HEADER_BYTES
        )
        self._pages_per_record = 1 + (layout.record_bytes + PAGE - 2) // PAGE
        self._pages_seen = 0

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Records (U,) of rows `ids` (U,); zeros for rows that were never written."""
        records = self._records[self.order.positions(ids)].view(self.layout.record_dtype)
        self._let_go(len(ids))
        return records

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Stores `records` (U,) of unique rows `ids`, and marks them as written."""
        records[WRITTEN] = 1
        positions = self.order.positions(ids)
        self._check_space(len(ids))
        self._records[positions] = records.view(self._records.dtype)
        self._let_go(len(ids))

    def clear(self) -> None:
        """Forgets every row: the file is one hole again."""
        os.ftruncate(self._fd, 0)
        try:
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be made {self.size} bytes long: {error.strerror}. Choose "
                "another folder for the tiers of this table"
            ) from error
        os.pwrite(self._fd, self._header, 0)

    def written(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, records) of all rows ever written, in file order, some MiB at a time."""
        record_bytes = self.layout.record_bytes
        done = 0
        for start, stop in self._extents():
            first = max(done, (start - HEADER_BYTES) // record_bytes)
            done = min(self.order.num_rows, -(-(stop - HEADER_BYTES) // record_bytes))
            for at in range(first, done, step := max(1, _SCAN_BYTES // record_bytes)):
                records = self._read_range(at, min(done, at + step))
                which = np.flatnonzero(records[WRITTEN])
                if len(which):
                    yield self.order.ids(at + which), records[which]

    def allocated_bytes(self) -> int:
        """Bytes that the file takes on the device, which grow with the rows ever written."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Removes the file."""
        self._records = np.empty(0)
        self._map.close()
        self._finalizer()

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that are not holes, after the header."""
        stop = HEADER_BYTES
        while stop < self.size:
            try:
                start = os.lseek(self._fd, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole to the end
                    return
                raise
            stop = os.lseek(self._fd, start, os.SEEK_HOLE)
            yield start, stop

    def _read_range(self, first: int, stop: int) -> np.ndarray:
        """Records of the positions [first, stop), read as one piece and not through the map."""
        records = np.empty(stop - first, self.layout.record_dtype)
        read_fully(self._fd, records.view(np.uint8).data, self._offset(first))
        return records

    def _offset(self, position: int) -> int:
        return HEADER_BYTES + position * self.layout.record_bytes

    def _let_go(self, num_rows: int) -> None:
        self._pages_seen += num_rows * self._pages_per_record
        if self._pages_seen * PAGE > _MAPPED_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._pages_seen = 0

    def _check_space(self, num_rows: int) -> None:
        """A full device kills a process that writes to a map; it gets an error before instead."""
        needed = num_rows * self._pages_per_record * PAGE
        free = os.fstatvfs(self._fd)
        if free.f_bavail * free.f_frsize < needed:
            raise OSError(
                errno.ENOSPC, f"no space for {num_rows} more rows ({needed} bytes)", str(self.path)
            )


def read_fully(fd: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}")
        done += count


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size:
            Header.read(fd, path)  # what is not ours is not overwritten
    except BlockingIOError as error:
        os.close(fd)
        raise ValueError(
            f"{path} is in use by another process or table: give each its own folder"
        ) from error
    except ValueError as error:
        os.close(fd)
        raise ValueError(f"{error}; it is left as it is, remove it if nobody needs it") from error
    return fd


def _remove(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)
