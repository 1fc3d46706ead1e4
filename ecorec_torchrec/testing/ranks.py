"""A pool of gloo ranks that outlives the tests: importing TorchRec in every spawn is what costs."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

COLLECTIVE_TIMEOUT_S = 180


class RankPool:
    """Runs functions on 1 to `max_world_size` gloo processes that are started once and kept.

    Each `run` makes its own default process group, so tests cannot disturb each other. A rank
    that raises fails the run with its traceback; after a failure the processes are replaced.

    Args:
        max_world_size: the most ranks a `run` may ask for.

    Example::

        def double(rank: int, x: int) -> int:
            total = torch.tensor([x])
            torch.distributed.all_reduce(total)
            return int(total)

        with RankPool(2) as pool:
            pool.run(double, 3, world_size=2)  # [6, 6]
    """

    def __init__(self, max_world_size: int = 4) -> None:
        self._max_world_size = max_world_size
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
        """Calls `fn(rank, *args)` on every rank and returns the results in rank order.

        Raises:
            ValueError: `world_size` is over the pool's size.
            RuntimeError: a rank raised or died; the message holds its traceback.
        """
        if not 1 <= world_size <= self._max_world_size:
            raise ValueError(f"world_size={world_size} is not within 1..{self._max_world_size}")
        module = sys.modules.get(fn.__module__)
        if module is not None and not fn.__module__.startswith("ecorec_torchrec"):
            cloudpickle.register_pickle_by_value(module)  # test modules are not importable there
        while len(self._workers) < world_size:
            self._workers.append(_start_worker())
        with tempfile.TemporaryDirectory() as folder:
            task = cloudpickle.dumps((fn, args))
            for rank in range(world_size):
                self._workers[rank][1].send((rank, world_size, os.path.join(folder, "store"), task))
            return self._collect(world_size)

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        while pending and not failures:
            ready = multiprocessing.connection.wait(list(pending))
            for connection in [connection for connection in pending if connection in ready]:
                rank = pending.pop(connection)
                try:
                    ok, payload = connection.recv()
                except EOFError:
                    failures[rank] = f"the process died, exit code {self._exit_code(rank)}"
                    continue
                if ok:
                    results[rank] = cloudpickle.loads(payload)
                else:
                    failures[rank] = payload
        if failures:
            self.close()
            report = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise RuntimeError(report)
        return [results[rank] for rank in range(world_size)]

    def _exit_code(self, rank: int) -> int | None:
        process = self._workers[rank][0]
        process.join(timeout=5)
        return process.exitcode

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _start_worker() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _worker(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store_path, task = connection.recv()
        except EOFError:
            return
        try:
            _join(rank, world_size, store_path)
            fn, args = cloudpickle.loads(task)
            result = cloudpickle.dumps(fn(rank, *args))
            _leave()
        except BaseException:
            # Told before the group is left, which makes the other ranks fail for want of this one.
            connection.send((False, traceback.format_exc()))
            return  # the pool replaces its processes after a failure
        connection.send((True, result))


def _join(rank: int, world_size: int, store_path: str) -> None:
    import torch.distributed as dist

    environment = {"RANK": rank, "WORLD_SIZE": world_size}
    environment |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in environment.items()})
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    # A rank that left at once would close its sockets under the others that still connect.
    dist.barrier()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # the function may have left it, to run a program that makes its own
        dist.destroy_process_group()
    # TorchRec broadcasts a flag once per process: beside a kept rank, a new one waits for ever.
    collective_utils = sys.modules.get("torchrec.distributed.collective_utils")
    if collective_utils is not None:
        collective_utils._INITIALIZED = False  # type: ignore[attr-defined]
