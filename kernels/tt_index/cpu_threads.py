"""Threads for the numba kernels of the CPU engine.

The kernels release the GIL and run on ordinary Python threads. numba's own layers for
`parallel=True` do not fit a library: `workqueue` aborts when two threads enter it at once, `omp`
aborts in a child forked after its first use, and `tbb` is one more dependency. These threads do
neither, and compiling is several times cheaper without `parallel=True`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    # A forked child has no threads but its own.
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)


def parallel_for(run: Callable[[int, int], None], num_tasks: int, num_workers: int) -> None:
    """Calls `run(task, worker)` once for every task, on up to `num_workers` threads.

    The caller is worker 0 and takes tasks like the others; tasks are handed out in ascending order,
    each to the first free worker. Safe to call from several threads at once: a call waits only for
    tasks that already run.

    Args:
        run: releases the GIL for its work; `worker` in 0..num_workers-1 is unique among the calls
            of `run` that run at the same time, so it can choose a scratch buffer.
        num_tasks: number of tasks.
        num_workers: limit for the threads.

    Raises:
        Exception: the first error of `run`, after all workers have stopped.
    """
    num_workers = min(num_workers, num_tasks)
    if num_workers <= 1:
        for task in range(num_tasks):
            run(task, 0)
        return
    tasks = itertools.count()

    def work(worker: int) -> None:
        while (task := next(tasks)) < num_tasks:
            run(task, worker)

    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="ecorec-kernel")
    helpers = [_pool.submit(work, worker) for worker in range(1, num_workers)]
    try:
        work(0)
    finally:
        # A helper that has not started by now has nothing left to do.
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [error for helper in started if (error := helper.exception())]
    if errors:
        raise errors[0]
