"""Processes of a run: one, several on this machine, or those that torchrun has started.

Light to import: the ranks must set their thread counts before the heavy libraries are loaded.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ecorec_torchrec.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

_SHUTDOWN_TIMEOUT_S = 5
# How gloo and NCCL say that another rank has gone, and how long this one then waits to be ended.
_LOST_RANK = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")
_LOST_RANK_GRACE_S = 10
# Errors that a user can mend: their message says it all, and no traceback is shown.
_PLAIN_ERRORS = ("ValueError", "FloatingPointError", "FileNotFoundError")


class RunFailedError(Exception):
    """A rank failed; the message is what it said first."""


def launch(config: TrainConfig) -> None:
    """Runs the training that `config` asks for, and returns when all ranks are done.

    Raises:
        RunFailedError: a rank failed (where this call started several); the others have been ended.
        ValueError, FloatingPointError: (with one process, or under torchrun) as of `run`.
        KeyboardInterrupt: SIGINT or SIGTERM ended the run; the ranks have been ended.
    """
    is_under_torchrun = "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ
    if is_under_torchrun and config.nproc not in (1, int(os.environ["LOCAL_WORLD_SIZE"])):
        warnings.warn(f"nproc={config.nproc} is ignored under torchrun", stacklevel=2)
    if is_under_torchrun:
        _recorded(run_rank, config)
    elif config.nproc == 1:
        run_rank(config)
    else:
        launch_ranks(run_rank, config, nproc=config.nproc)


def run_rank(config: TrainConfig) -> dict[str, Any]:
    """The run on this rank, whose place in the world is in torchrun's environment variables."""
    _limit_threads(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    from ecorec_torchrec.train.run import run

    with process_group(config.train.device) as device:
        try:
            return run(config, device)
        except RuntimeError as error:
            if _LOST_RANK.search(str(error)):
                # The launcher ends this rank as soon as it sees the one that failed first. Were
                # this one quicker to go, its error would be taken for the cause.
                time.sleep(_LOST_RANK_GRACE_S)
            raise


def _recorded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function whose error torchrun and `launch_ranks` find and show."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)(*arguments)


@contextmanager
def process_group(device_option: str) -> Iterator[torch.device]:
    """A process group (gloo on CPU, nccl on CUDA) and this rank's device.

    The world is that of torchrun's environment variables; without them it is this process.

    Raises:
        ValueError: CUDA is asked for and not there, or there are more ranks than GPUs.
    """
    import torch.distributed as dist

    from ecorec_torchrec.train.elastic import fresh_store, uses_agent_store

    _quiet_libraries()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(device_option, local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if uses_agent_store():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=fresh_store(), rank=rank, world_size=world_size)
    elif "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _device(option: str, local_rank: int) -> torch.device:
    import torch

    if option == "cpu" or (option == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("train.device='cuda': torch finds no GPU")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: there are "
            f"{torch.cuda.device_count()}; lower nproc, or set train.device to cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _limit_threads(local_world_size: int) -> None:
    """Shares the cores out over the ranks of this host, unless the user has said otherwise."""
    threads = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    for variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))


def _quiet_libraries() -> None:
    """Hides messages that speak of the insides of torch and TorchRec, on every rank, every run."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    warnings.filterwarnings("ignore", message="Using a non-tuple sequence", module="torchmetrics")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def launch_ranks(function: Callable[..., Any], *arguments: Any, nproc: int) -> list[Any]:
    """Calls `function(*arguments)` in processes with torchrun's environment variables.

    Args:
        function: of a module; it makes the `process_group` itself.
        nproc: processes, which share the cores of this machine.

    Returns:
        What the calls returned, by rank.

    Raises:
        RunFailedError: a rank failed; the others have been ended.
        KeyboardInterrupt: SIGINT or SIGTERM ended the run; the ranks have been ended.
    """
    _limit_threads(nproc)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"ecorec-{uuid.uuid4()}",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
    )
    try:
        results = elastic_launch(launch_config, _worker)(function, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunFailedError(_describe(rank, failure)) from None
    except SignalException:
        raise KeyboardInterrupt from None
    return [results[rank] for rank in range(nproc)]


def _worker(function: Callable[..., Any], *arguments: Any) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once: the first process tells the user
    return _recorded(function, *arguments)


def _describe(rank: int, failure: Any) -> str:
    if not isinstance(failure.message, dict):
        return f"rank {rank}: {failure.message} (exit code {failure.exitcode})"
    message = failure.message["message"]
    if message.startswith(_PLAIN_ERRORS):
        return f"rank {rank}: {message.partition(': ')[2]}"
    return f"rank {rank}:\n{failure.message['extraInfo']['py_callstack']}"
