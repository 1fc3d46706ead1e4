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
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .counters import Counters
from .header import HEADER_BYTES, Header
from .row_order import RowOrder
from .spec import WRITTEN, RowLayout

PAGE = 4096
_SCAN_ROWS = 1 << 15
_READ_AHEAD_BYTES = 64 << 20
# Pages of mapped files that the process may show as its memory before it lets go of them (the
# kernel keeps them as its cache all the same), and after how many accesses it looks.
_RESIDENT_BYTES = 1 << 30
_ACCESSES_BETWEEN_LOOKS = 1 << 15


class RowFile(ABC):
    """The records of N rows in a sparse file.

    Args:
        path: the file. A row file that lies there is replaced; anything else is left alone.
        header: what the file says of itself.
        layout: the columns of a record.
        order: where each row lies.
        counters: where the bytes are counted.

    Attributes:
        num_written: how many rows were ever written.

    Raises:
        ValueError: another process or table holds the file, `path` is not a row file, or the file
            system takes no file of this (nominal) size or kind.
    """

    open_flags = 0

    def __init__(
        self, path: Path, header: Header, layout: RowLayout, order: RowOrder, counters: Counters
    ) -> None:
        self.path, self.layout, self.order = path, layout, order
        self.num_written = 0
        self._counters = counters
        content_bytes = header.num_embeddings * layout.record_bytes
        self._size = HEADER_BYTES + -(-content_bytes // PAGE) * PAGE
        self._header = header.to_bytes()
        self._fd = _open_locked(path, self.open_flags)
        self._finalizer = weakref.finalize(self, _remove, self._fd, path)
        self.clear()

    @abstractmethod
    def _read_at(self, positions: np.ndarray) -> np.ndarray:
        """Records (U,) at `positions` (U,), as opaque bytes."""

    @abstractmethod
    def _write_at(self, positions: np.ndarray, records: np.ndarray) -> int:
        """Stores opaque records; how many of the places were never written before."""

    @abstractmethod
    def _announce(self, start: int, stop: int) -> None:
        """Says which bytes will be read soon, in order."""

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Records (U,) of rows `ids` (U,); zeros for rows that were never written."""
        if not len(ids):
            return self.layout.new_records(0)
        return self._read_at(self.order.positions(ids)).view(self.layout.record_dtype)

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Stores `records` (U,) of unique rows `ids`, and marks them as written."""
        if not len(ids):
            return
        records[WRITTEN] = 1
        opaque = records.view(f"V{self.layout.record_bytes}")
        self.num_written += self._write_at(self.order.positions(ids), opaque)

    def clear(self) -> None:
        """Forgets every row: the file is one hole again."""
        os.ftruncate(self._fd, 0)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be made {self._size} bytes long: {error.strerror}. Choose "
                "another folder for the tiers of this table"
            ) from error
        page = mmap.mmap(-1, HEADER_BYTES)  # begins on a page boundary, which O_DIRECT needs
        page[:] = self._header
        os.pwrite(self._fd, page, 0)
        self.num_written = 0

    def written(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, records) of all rows ever written, in file order, block by block.

        Raises:
            OSError: the file system hides data of a sparse file, so that rows would be lost.
        """
        found = 0
        for positions in self._positions_with_data():
            records = self._read_at(positions).view(self.layout.record_dtype)
            which = np.flatnonzero(records[WRITTEN])
            found += len(which)
            if len(which):
                yield self.order.ids(positions[which]), records[which]
        if found < self.num_written:
            raise OSError(
                errno.EIO,
                f"{self.num_written} rows were written, the file system shows {found} (SEEK_DATA)",
                str(self.path),
            )

    def allocated_bytes(self) -> int:
        """Bytes that the file takes on the device, which grow with the rows ever written."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Removes the file."""
        self._finalizer()

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Byte ranges that are not holes, after the header."""
        stop = HEADER_BYTES
        while stop < self._size:
            try:
                start = os.lseek(self._fd, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole to the end
                    return
                raise
            stop = os.lseek(self._fd, start, os.SEEK_HOLE)
            yield start, stop

    def _positions_with_data(self) -> Iterator[np.ndarray]:
        """Positions of all records that do not lie in holes, about `_SCAN_ROWS` at a time."""
        pieces: list[np.ndarray] = []
        count = done = 0
        for start, stop in self._extents():
            self._announce(start, stop)
            first = max(done, (start - HEADER_BYTES) // self.layout.record_bytes)
            done = -(-(stop - HEADER_BYTES) // self.layout.record_bytes)
            done = min(done, self.order.num_rows)
            for at in range(first, done, _SCAN_ROWS):
                pieces.append(np.arange(at, min(done, at + _SCAN_ROWS)))
                count += len(pieces[-1])
                if count >= _SCAN_ROWS:
                    yield np.concatenate(pieces)
                    pieces, count = [], 0
        if pieces:
            yield np.concatenate(pieces)


class MappedRowFile(RowFile):
    """A row file mapped into memory: the kernel caches it in whatever memory is free."""

    def __init__(
        self, path: Path, header: Header, layout: RowLayout, order: RowOrder, counters: Counters
    ) -> None:
        super().__init__(path, header, layout, order, counters)
        self._map = mmap.mmap(self._fd, self._size)
        self._map.madvise(mmap.MADV_RANDOM)
        num_rows, record_bytes = header.num_embeddings, layout.record_bytes
        self._records = np.frombuffer(self._map, f"V{record_bytes}", num_rows, HEADER_BYTES)
        self._marks = self._records.view(layout.record_dtype)[WRITTEN]
        self._accesses = 0

    def close(self) -> None:
        del self._records, self._marks
        self._map.close()
        super().close()

    def _read_at(self, positions: np.ndarray) -> np.ndarray:
        self._limit_resident(len(positions))
        self._counters.file_bytes_read += len(positions) * self.layout.record_bytes
        return self._records[positions]

    def _write_at(self, positions: np.ndarray, records: np.ndarray) -> int:
        self._limit_resident(len(positions))
        fresh = np.count_nonzero(self._marks[positions] == 0)
        self._check_space(int(fresh))
        self._records[positions] = records
        self._counters.file_bytes_written += len(positions) * self.layout.record_bytes
        return int(fresh)

    def _announce(self, start: int, stop: int) -> None:
        length = min(stop - start, _READ_AHEAD_BYTES)
        os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)

    def _limit_resident(self, accesses: int) -> None:
        self._accesses += accesses
        if self._accesses > _ACCESSES_BETWEEN_LOOKS:
            self._accesses = 0
            if _resident_file_bytes() > _RESIDENT_BYTES:
                self._map.madvise(mmap.MADV_DONTNEED)

    def _check_space(self, num_rows: int) -> None:
        """A full device kills a process that writes to a map; it gets an error before instead."""
        needed = num_rows * (PAGE + self.layout.record_bytes)
        free = os.fstatvfs(self._fd)
        if free.f_bavail * free.f_frsize < needed:
            raise OSError(
                errno.ENOSPC,
                f"no space for {num_rows} more rows ({needed} bytes); free some, or give the table "
                "a folder on a larger device",
                str(self.path),
            )


def _resident_file_bytes() -> int:
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10 for line in status if "RssFile" in line), 0)


def _open_locked(path: Path, flags: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o644)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise ValueError(
                f"{path.parent} takes no direct reads (O_DIRECT): set direct_reads=False, or "
                "choose a folder on block storage"
            ) from error
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size:
            _check_ours(path)
    except BlockingIOError as error:
        os.close(fd)
        raise ValueError(
            f"{path} is in use by another table or process: give each its own name or folder"
        ) from error
    except ValueError:
        os.close(fd)
        raise
    return fd


def _check_ours(path: Path) -> None:
    """What is not a row file is not overwritten."""
    with open(path, "rb") as file:
        try:
            Header.read(file.fileno(), path)
        except ValueError as error:
            raise ValueError(
                f"{error}. It is left as it is: remove it if nobody needs it"
            ) from error


def _remove(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)
