"""Threads of the CPU engine: every task once, errors reach the caller, callers do not meet."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ecorec_torchrec.kernels.tt_index import cpu_threads
from ecorec_torchrec.kernels.tt_index.cpu_threads import parallel_for


@pytest.fixture(params=["openmp", "thread pool"], autouse=True)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's OpenMP threads, and what replaces them where there is no OpenMP."""
    if request.param == "thread pool":
        monkeypatch.setattr(cpu_threads, "_gomp_parallel", None)
    elif cpu_threads._gomp_parallel is None:
        pytest.skip("this PyTorch has no GNU-compatible OpenMP")


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_task_runs_once_and_workers_do_not_share_a_number(num_workers):
    tasks, busy, clashes = [], set(), []

    def run(task: int, worker: int) -> None:
        if worker in busy or not 0 <= worker < num_workers:
            clashes.append(worker)
        busy.add(worker)
        time.sleep(0.001)
        tasks.append(task)
        busy.discard(worker)

    parallel_for(run, 37, num_workers)
    assert sorted(tasks) == list(range(37))
    assert not clashes


def test_tasks_run_at_the_same_time():
    both = threading.Barrier(2, timeout=20)
    parallel_for(lambda task, worker: both.wait(), 2, 2)


def test_no_tasks():
    parallel_for(lambda task, worker: pytest.fail("called"), 0, 4)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_first_error_reaches_the_caller(num_workers):
    def run(task: int, worker: int) -> None:
        if task == 3:
            raise KeyError("task 3")

    with pytest.raises(KeyError, match="task 3"):
        parallel_for(run, 100, num_workers)
    parallel_for(lambda task, worker: None, 4, num_workers)  # and the threads live on


def test_two_callers_at_once():
    """numba's default threading layer aborts the process here."""

    def call(_: int) -> int:
        done = []
        parallel_for(lambda task, worker: done.append(task), 50, 2)
        return len(done)

    with ThreadPoolExecutor(4) as callers:
        assert set(callers.map(call, range(40))) == {50}


def test_a_forked_child_can_go_on_with_one_thread():
    """As a data loader's worker does, after its parent has used all threads."""
    parallel_for(lambda task, worker: None, 8, 2)
    child = os.fork()
    if child == 0:
        done = []
        parallel_for(lambda task, worker: done.append(task), 8, 1)
        os._exit(len(done))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 8
