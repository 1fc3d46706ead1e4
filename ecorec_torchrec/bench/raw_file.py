"""What a file alone takes: pages or records at random places, and nothing else."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from pathlib import Path

import numpy as np

from ecorec_torchrec.tiers.page_io import make_page_io

_PAGE = mmap.PAGESIZE
_FILL_BYTES = 16 << 20


class RawFile:
    """A filled file of a table's size.

    Args:
        path: where it is made; it is removed by `close`.
        num_rows, record_bytes: of the table.
        direct: move whole pages past the page cache (O_DIRECT), as many at once as the device
            takes; False: copy records from and to a map of the file, which is cached by then.

    Raises:
        OSError: the file system has no room, or no O_DIRECT.

    Example::

        file = RawFile(Path("scratch"), num_rows=1_000_000, record_bytes=264, direct=True)
        file.time_ms(num_read=8000, num_written=4000)   # pages
        file.close()
    """

    def __init__(self, path: Path, num_rows: int, record_bytes: int, direct: bool) -> None:
        self._path, self._direct = path, direct
        self._random = np.random.default_rng(0)
        _fill(path, num_rows * record_bytes)
        self._fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        if direct:
            self._num_places = num_rows * record_bytes // _PAGE
            self._io = make_page_io(self._fd)
        else:
            self._num_places = num_rows
            self._records = np.memmap(path, f"V{record_bytes}", "r+", shape=(num_rows,))
            self._records[:].copy()

    def time_ms(self, num_read: int, num_written: int, repeats: int = 5) -> float:
        """Milliseconds to read and then write so many places; the median of `repeats` runs.

        Places are pages with `direct`, else records; different ones every time, in file order.
        """
        runs = [self._read_ms(num_read) + self._write_ms(num_written) for _ in range(repeats)]
        return statistics.median(runs)

    def close(self) -> None:
        if self._direct:
            self._io.close()
        os.close(self._fd)
        self._path.unlink()

    def _read_ms(self, count: int) -> float:
        places = self._places(count)
        if not self._direct:
            start = time.perf_counter()
            _ = self._records[places]
            return (time.perf_counter() - start) * 1e3
        buffer = mmap.mmap(-1, max(1, count) * _PAGE)  # begins on a page, as O_DIRECT needs
        return self._move_ms("read", places, np.frombuffer(buffer, np.uint8))

    def _write_ms(self, count: int) -> float:
        places = self._places(count)
        if not self._direct:
            records = self._records[self._places(count)]
            start = time.perf_counter()
            self._records[places] = records
            return (time.perf_counter() - start) * 1e3
        buffer = mmap.mmap(-1, max(1, count) * _PAGE)
        return self._move_ms("write", places, np.frombuffer(buffer, np.uint8))

    def _move_ms(self, direction: str, pages: np.ndarray, buffer: np.ndarray) -> float:
        buffer[::_PAGE] = 1  # so that the memory is there
        addresses = buffer.ctypes.data + _PAGE * np.arange(len(pages))
        lengths = np.full(len(pages), _PAGE)
        move = self._io.read if direction == "read" else self._io.write
        start = time.perf_counter()
        move(pages * _PAGE, addresses, lengths)
        return (time.perf_counter() - start) * 1e3

    def _places(self, count: int) -> np.ndarray:
        count = min(count, self._num_places)
        return np.sort(self._random.choice(self._num_places, count, replace=False))


def _fill(path: Path, num_bytes: int) -> None:
    """Bytes that no device can leave out or compress."""
    block = np.random.default_rng(1).bytes(_FILL_BYTES)
    with open(path, "wb") as file:
        for start in range(0, num_bytes, _FILL_BYTES):
            file.write(block[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
