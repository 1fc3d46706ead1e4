"""Restarts by torchrun: the processes that come after a failure belong to the same run.

torchrun counts restarts on each host, and not those after a host has come or gone. The run folder
therefore remembers the job as well.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ecorec_torchrec.train.run_folder import SUMMARY_FILE, write_text

_JOB_FILE = "job_id"
_NO_ID = "none"  # torchrun's own word for it
_PORT_KEY = "ecorec/store_port"
_STORE_TIMEOUT_S = 300
_STORE_POLL_S = 0.1


def is_restart(folder: Path) -> bool:
    """Whether torchrun has started these processes to go on with the run in `folder`.

    All ranks call it together. A run that is complete is not gone on with by another start under
    the same `--rdzv-id`, only by a restart.
    """
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    answer = [_has_recorded_this_job(folder)]
    if answer[0] and not any(counts):
        answer[0] = not (folder / SUMMARY_FILE).is_file()
    dist.broadcast_object_list(answer)  # rank 0 is the one that writes the folder
    return bool(answer[0])


def record_job(folder: Path) -> None:
    """Leaves the job's name in the run folder; nothing without torchrun."""
    if (job := _job_id()) is not None:
        write_text(folder / _JOB_FILE, job)


def _has_recorded_this_job(folder: Path) -> bool:
    file = folder / _JOB_FILE
    return file.is_file() and file.read_text(encoding="utf-8") == _job_id()


def _job_id() -> str | None:
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job == _NO_ID:  # a job of one host, or of several that come and go together
        return f"{socket.gethostname()}, torchrun with process id {os.getppid()}"
    return job


def uses_agent_store() -> bool:
    """Whether torchrun's own process keeps the store in which these ranks find each other."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def fresh_store() -> dist.Store:
    """A store that no earlier start of this job has written to, kept by rank 0.

    torchrun's store outlives restarts, and with it the addresses of the ranks that have died: who
    reads them before they are overwritten waits for dead peers, and the restart fails. Here only
    the port of a new store is looked up there, until there is something behind it.

    Raises:
        TimeoutError: rank 0 does not come up.
    """
    shared, rank, _ = next(dist.rendezvous("env://"))
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared.set(_PORT_KEY, str(store.port))
        return store
    host = os.environ["MASTER_ADDR"]  # by its definition, where rank 0 runs
    deadline = time.monotonic() + _STORE_TIMEOUT_S
    while time.monotonic() < deadline:
        port = int(shared.get(_PORT_KEY))
        if _is_listening(host, port):
            return dist.TCPStore(host, port, is_master=False)
        time.sleep(_STORE_POLL_S)
    raise TimeoutError(f"rank 0 cannot be reached on {host} after {_STORE_TIMEOUT_S} s")


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
