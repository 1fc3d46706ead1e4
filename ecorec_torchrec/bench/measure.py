"""What the speed benchmarks share: ids, the machine's limits, memory in use, versions."""

from __future__ import annotations

import csv
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

ZIPF_EXPONENT = 1.05
# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def zipf_ids(
    num_lookups: int,
    num_embeddings: int,
    *,
    id_order: Literal["hashed", "frequency"],
    exponent: float = ZIPF_EXPONENT,
    seed: int = 0,
) -> Tensor:
    """`(num_lookups,)` int64 ids of a table, id of frequency rank k with weight k^-exponent.

    Args:
        id_order: "frequency": the ids are the ranks, most frequent first, so that hot rows are
            neighbours; "hashed": the ranks are scattered by a random permutation.

    Example::

        zipf_ids(65_536, 1_000_000, id_order="hashed").unique().numel()   # about 21,600
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, num_embeddings + 1, dtype=torch.float64)
    cumulative = ranks.pow_(-exponent).cumsum_(0)
    draws = torch.rand(num_lookups, generator=generator, dtype=torch.float64) * cumulative[-1]
    ids = torch.searchsorted(cumulative, draws).clamp_(max=num_embeddings - 1)
    if id_order == "hashed":
        return torch.randperm(num_embeddings, generator=generator)[ids]
    return ids


def sgemm_peak_gflops(device: torch.device, repeats: int = 7) -> float:
    """GFLOP/s of the best of some fp32 products of two square matrices, at the set threads and
    matmul precision."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
    out = torch.empty_like(a)
    seconds = []
    for _ in range(repeats):
        start = clock(device)
        torch.mm(a, b, out=out)
        seconds.append(clock(device) - start)
    return 2 * size**3 / min(seconds) / 1e9


def copy_gbytes_per_second(device: torch.device, repeats: int = 7) -> float:
    """The best of some copies of memory that no cache holds; bytes read and written."""
    source = torch.zeros(2**26 if device.type == "cpu" else 2**28, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(repeats):
        start = clock(device)
        target.copy_(source)
        seconds.append(clock(device) - start)
    return 2 * source.nbytes / min(seconds) / 1e9


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished what was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Sets the threads of torch and of our CPU engine, and sets them back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """From now on the C library keeps what is freed, for this process (glibc; else no effect).

    As allocators for training do (PyTorch's on GPUs, jemalloc or tcmalloc on CPU hosts). Without it
    every step of a pattern with large intermediates pays for fresh pages from the kernel.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


class PeakMemory:
    """Bytes by which memory in use grew at most within the block, in `peak_bytes`.

    On CUDA what the allocator handed out; on Linux the resident memory of the process, after
    memory that is free but kept was given back; None elsewhere.

    Example::

        with PeakMemory(torch.device("cpu")) as memory:
            torch.ones(2**20)
        memory.peak_bytes   # about 4 MiB
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
            self._start = _status_bytes("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._start
        elif sys.platform == "linux":
            self.peak_bytes = max(0, _status_bytes("VmHWM") - self._start)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@cache
def git_sha() -> str:
    """The commit of the checkout, with `-dirty` if tracked files differ; "" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(
            [*command, "--abbrev=12", "--exclude=*"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def append_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Appends to a CSV file; a new file gets the header.

    Raises:
        ValueError: the file has other columns.
    """
    check_columns(path, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raises ValueError if there is a CSV file with other columns than `columns`."""
    if path.exists() and path.stat().st_size:
        with open(path, encoding="utf-8", newline="") as file:
            if next(csv.reader(file)) != list(columns):
                raise ValueError(f"{path} has other columns than this benchmark writes")
