"""Threads for the numba kernels of the CPU engine: PyTorch's own.

The kernels release the GIL; what runs them is a parallel region of the OpenMP runtime that PyTorch
has loaded. Its threads wait for the next region of PyTorch spinning, and any other threads would
share the cores with them: on 2 cores, a thread pool made the lookup slower than one thread. Where
PyTorch was built without GNU-compatible OpenMP a thread pool does the work.

numba's `parallel=True` does not fit a library: its `workqueue` layer aborts when two threads enter
it at once, its `omp` layer aborts in a child forked after its first use, `tbb` is one more
dependency, and compiling takes several times longer.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch  # noqa: F401  loads OpenMP

_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def parallel_for(run: Callable[[int, int], None], num_tasks: int, num_workers: int) -> None:
    """Calls `run(task, worker)` once for every task, on up to `num_workers` threads.

    The caller is one of the workers. Tasks are handed out in ascending order, each to the first
    free worker. Safe to call from several threads at once.

    Args:
        run: releases the GIL for its work; `worker` in 0..num_workers-1 is unique among the calls
            of `run` that run at the same time, so it can choose a scratch buffer.
        num_tasks: number of tasks.
        num_workers: limit for the threads; the number of tasks is another.

    Raises:
        BaseException: the first error of `run`; tasks not begun by then are dropped.
    """
    num_workers = min(num_workers, num_tasks)
    if num_workers <= 1:
        for task in range(num_tasks):
            run(task, 0)
        return
    # next() of a counter is atomic under the GIL.
    tasks, workers = itertools.count(), itertools.count()
    errors: list[BaseException] = []

    def work() -> None:
        worker = next(workers)
        try:
            while not errors and (task := next(tasks)) < num_tasks:
                run(task, worker)
        except BaseException as error:  # must not unwind through OpenMP
            errors.append(error)

    _on_threads(work, num_workers)
    if errors:
        raise errors[0]


def _on_threads(work: Callable[[], None], num_workers: int) -> None:
    """Calls `work()` at least once, on up to `num_workers` threads."""
    if _gomp_parallel is not None:
        region = _REGION(lambda _: work())
        _gomp_parallel(region, None, num_workers, 0)
        return
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ecorec-kernel")
    helpers = [_pool.submit(work) for _ in range(1, num_workers)]
    work()
    # A helper that has not begun by now has nothing left to do.
    for helper in helpers:
        if not helper.cancel():
            helper.result()


def _find_gomp_parallel() -> Any:
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (_REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


_gomp_parallel = _find_gomp_parallel()
_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    # A forked child has no threads but its own.
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
