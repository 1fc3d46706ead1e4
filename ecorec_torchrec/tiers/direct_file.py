"""A row file read and written past the page cache, whole pages at a time."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from .counters import Counters
from .header import HEADER_BYTES, Header
from .page_io import make_page_io
from .row_file import PAGE, RowFile
from .row_order import RowOrder
from .spec import WRITTEN, RowLayout

_LEAST_BUFFER_PAGES = 1024


class DirectRowFile(RowFile):
    """A row file opened with O_DIRECT: no memory is used but a buffer for one batch.

    Rows share pages, so a write reads the pages first. Pages that lie side by side are moved by one
    request.
    """

    open_flags = os.O_DIRECT

    def __init__(
        self, path: Path, header: Header, layout: RowLayout, order: RowOrder, counters: Counters
    ) -> None:
        super().__init__(path, header, layout, order, counters)
        self._io = make_page_io(self._fd)
        self._buffer = np.empty(0, np.uint8)
        self._grow(_LEAST_BUFFER_PAGES)

    def close(self) -> None:
        self._io.close()
        super().close()

    def _read_at(self, positions: np.ndarray) -> np.ndarray:
        return self._load(positions)[0]

    def _write_at(self, positions: np.ndarray, records: np.ndarray) -> int:
        before, places, requests = self._load(positions)
        marks = before.view(self.layout.record_dtype)[WRITTEN]
        self._windows()[places] = records
        self._io.write(*requests)
        self._counters.file_bytes_written += int(requests[2].sum())
        return int(np.count_nonzero(marks == 0))

    def _announce(self, start: int, stop: int) -> None:
        """Nothing is read ahead where nothing is cached."""

    def _load(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple]:
        """Reads the pages of records into the buffer.

        Returns:
            The records; where each begins in the buffer; and the requests (file offsets, memory
            addresses, lengths) that read the pages and would write them.
        """
        start = HEADER_BYTES + positions * self.layout.record_bytes
        first, last = start // PAGE, (start + self.layout.record_bytes - 1) // PAGE
        spans = first[:, None] + np.arange(int((last - first).max()) + 1)
        pages = np.unique(spans[spans <= last[:, None]])
        self._grow(len(pages))
        runs = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
        lengths = np.diff(runs, append=len(pages)) * PAGE
        requests = (pages[runs] * PAGE, self._address + runs * PAGE, lengths)
        self._io.read(*requests)
        self._counters.file_bytes_read += len(pages) * PAGE
        places = np.searchsorted(pages, first) * PAGE + start % PAGE
        return self._windows()[places], places, requests

    def _windows(self) -> np.ndarray:
        """A record at every byte of the buffer: [place] is the record that begins there."""
        record_bytes = self.layout.record_bytes
        count = len(self._buffer) - record_bytes + 1
        return np.ndarray((count,), f"V{record_bytes}", self._buffer, strides=(1,))

    def _grow(self, num_pages: int) -> None:
        if num_pages * PAGE > len(self._buffer):
            # Anonymous memory begins on a page boundary, which O_DIRECT needs.
            self._buffer = np.frombuffer(mmap.mmap(-1, num_pages * PAGE), np.uint8)
            self._address = self._buffer.ctypes.data
