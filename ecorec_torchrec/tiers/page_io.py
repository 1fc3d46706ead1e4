"""Many reads or writes of a file at once, so that the device works on all of them.

Linux' asynchronous I/O takes a whole batch in one system call, without Python's lock, where threads
would take turns at it for each page. Where the kernel offers none, such threads do it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

# io_setup, io_destroy, io_getevents, io_submit
_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_DEPTH = 512
_THREADS = 8
_READ, _WRITE = 0, 1
# struct iocb and struct io_event of linux/aio_abi.h, little-endian
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("file", "<u4"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_file", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])


class PageIO(Protocol):
    """Reads and writes of one file between (offsets) in it and (addresses) in memory.

    All three arrays are int64 of one length; offsets, addresses and lengths are multiples of the
    page size. The memory must live until the call returns.

    Raises:
        OSError: a request failed or ended early.
    """

    def read(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None: ...

    def write(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None: ...

    def close(self) -> None: ...


def make_page_io(fd: int) -> PageIO:
    """Asynchronous I/O for an open file, or threads where there is none (some containers)."""
    try:
        return AsyncIO(fd)
    except OSError:
        return ThreadedIO(fd)


class AsyncIO:
    """`PageIO` by Linux' asynchronous I/O.

    Raises:
        OSError: the kernel has none for us.
    """

    def __init__(self, fd: int) -> None:
        numbers = _SYSCALLS.get(platform.machine())
        if numbers is None or os.uname().sysname != "Linux":
            raise OSError(errno.ENOSYS, "no asynchronous I/O on this platform")
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._fd = fd
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._context = ctypes.c_ulong(0)
        self._open()

    def read(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
        self._run(_READ, offsets, addresses, lengths)

    def write(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
        self._run(_WRITE, offsets, addresses, lengths)

    def close(self) -> None:
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context.value = 0

    def _open(self) -> None:
        self._call(self._setup, ctypes.c_long(_DEPTH), ctypes.byref(self._context))

    def _run(
        self, operation: int, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray
    ) -> None:
        try:
            self._move(operation, offsets, addresses, lengths)
        except BaseException:
            # Requests may be in flight, into memory that the caller lets go of next, and their
            # answers would pass for the next call's: destroying the context waits for them all.
            self.close()
            self._open()
            raise

    def _move(
        self, operation: int, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray
    ) -> None:
        requests = np.zeros(len(offsets), _REQUEST)
        requests["data"] = np.arange(len(offsets))
        requests["operation"], requests["file"] = operation, self._fd
        requests["address"], requests["length"], requests["offset"] = addresses, lengths, offsets
        pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(len(requests))
        events = np.zeros(_DEPTH, _EVENT)
        results = np.zeros(len(requests), np.int64)
        submitted = done = 0
        while done < len(requests):
            room = min(len(requests) - submitted, _DEPTH - (submitted - done))
            if room:
                first = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * submitted)
                taken = self._call(self._submit, self._context, ctypes.c_long(room), first)
                submitted += taken
            if submitted > done:
                into = ctypes.c_void_p(events.ctypes.data)
                one, depth = ctypes.c_long(1), ctypes.c_long(_DEPTH)
                came = self._call(self._getevents, self._context, one, depth, into, None)
                results[events["data"][:came].astype(np.int64)] = events["result"][:came]
                done += came
        _check(results, offsets, lengths)

    def _call(self, number: int, *arguments: object) -> int:
        """A system call, without Python's lock; repeated when a signal or a full queue stops it."""
        result = self._libc.syscall(ctypes.c_long(number), *arguments)
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code == errno.EINTR and number == self._getevents:
            return 0
        if code == errno.EAGAIN and number == self._submit:
            return 0
        raise OSError(code, os.strerror(code))


class ThreadedIO:
    """`PageIO` by threads that each read or write one piece at a time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiers-io")

    def read(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
        self._run(os.preadv, offsets, addresses, lengths)

    def write(self, offsets: np.ndarray, addresses: np.ndarray, lengths: np.ndarray) -> None:
        self._run(os.pwritev, offsets, addresses, lengths)

    def close(self) -> None:
        self._threads.shutdown()

    def _run(
        self,
        call: Callable[[int, Any, int], int],
        offsets: np.ndarray,
        addresses: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        results = np.zeros(len(offsets), np.int64)

        def move(first: int) -> None:
            for at in range(first, len(offsets), _THREADS):
                memory = (ctypes.c_char * int(lengths[at])).from_address(int(addresses[at]))
                results[at] = call(self._fd, [memory], int(offsets[at]))

        list(self._threads.map(move, range(_THREADS)))
        _check(results, offsets, lengths)


def _check(results: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
    wrong = np.flatnonzero(results != lengths)
    if len(wrong):
        result, offset = int(results[wrong[0]]), int(offsets[wrong[0]])
        code = -result if result < 0 else errno.EIO
        raise OSError(code, f"{os.strerror(code)} at byte {offset} of a row file")
