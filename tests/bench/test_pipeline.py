"""The pipeline benchmark: a small one over loopback, and links that cannot be made."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ecorec_torchrec.bench.links import Place, first_failure, link, start, stop
from ecorec_torchrec.bench.pipeline import COLUMNS, VARIANTS, PipelineBenchOptions, run_pipeline


def options(tmp_path: Path, **changes: object) -> PipelineBenchOptions:
    small = {"batch_size": 8, "num_tables": 4, "num_embeddings": 50, "embedding_dim": 8}
    small |= {"rank": 2, "steps": 2, "warmup_steps": 1, "dist_groups": 2, "links": ("loopback",)}
    return PipelineBenchOptions(csv=str(tmp_path / "pipeline.csv"), **{**small, **changes})


def test_three_variants_over_loopback(tmp_path: Path) -> None:
    """The ranks compare the results themselves: without equality there is no figure."""
    (rows,) = run_pipeline(options(tmp_path))
    with open(tmp_path / "pipeline.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == list(COLUMNS)
    assert [row["variant"] for row in written] == list(VARIANTS)
    assert [row["dist_groups"] for row in written] == ["1", "1", "2"]
    for row, shown in zip(written, rows, strict=True):
        assert row == {name: str(value) for name, value in shown.items()}
        assert 0 <= float(row["exposed_comm_ms"]) < float(row["step_ms"])
    assert float(written[1]["ideal_step_ms"]) < float(written[1]["step_ms"])


@pytest.mark.long
def test_a_rank_that_fails_is_shown(tmp_path: Path) -> None:
    broken = options(tmp_path, variants=("ecorec",))
    broken.embedding_dim = -1  # past the checks of the options
    with pytest.raises(RuntimeError, match="link loopback, rank 0: (.|\n)*ValueError"):
        next(run_pipeline(broken))


def test_links_of_limited_rate_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="link 1gbit: .* need root; use --links loopback"):
        link("1gbit", 2).__enter__()


def test_links_of_limited_rate_need_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="`ip` is missing"):
        link("1gbit", 2).__enter__()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("fast",)}, r"variants: \['fast'\]"),
        ({"variants": ()}, r"variants: \(\)"),
        ({"dist_groups": 0}, "dist_groups must be at least 1, got 0"),
        ({"batch_size": 1}, "batch_size=1 leaves ranks without examples"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(tmp_path, **changes)


HERE = Place((), "lo")


def test_the_rank_that_fails_first_is_told_though_others_wait_for_it(tmp_path: Path) -> None:
    program = "import sys, time; sys.exit(3) if sys.argv[1] == '1' else time.sleep(60)"
    processes = start([HERE, HERE], [sys.executable, "-c", program], tmp_path)
    assert first_failure(processes) == 1
    stop(processes)
    assert [process.returncode for process in processes] == [-9, 3]


def test_ranks_do_not_outlive_one_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def start_one(command: list[str], **files: Any) -> Any:
        if started:
            raise FileNotFoundError("ip")
        started.append(popen(command, **files))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(FileNotFoundError, match="ip"):
        start([HERE, HERE], [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    assert started[0].poll() == -9
