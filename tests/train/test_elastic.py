"""Restarts by torchrun: a killed rank costs no more than the steps since the last checkpoint."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecorec_torchrec.train import run as run_module
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import dump_config
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import run

from .test_resume import (
    SHORT,
    DatasetThatDies,
    Killed,
    assert_same_checkpoint,
    configure,
    newest,
    write_plan,
)

# `ecorec train`, of which one rank kills itself once, behind a given step.
DYING_TRAINER = """
import os, signal, sys
from pathlib import Path
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from ecorec_torchrec.cli import main

rank, step, marker = os.environ["DIE"].split(",")
progress, steps = TrainPipelineSparseDist.progress, 0

def progress_and_die(self, batches):
    global steps
    output = progress(self, batches)
    steps += self._model.training
    if steps == int(step) and os.environ.get("RANK", "0") == rank and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return output

TrainPipelineSparseDist.progress = progress_and_die
if __name__ == "__main__":  # not in the ranks that it spawns
    main(sys.argv[1:])
"""


def start(
    launcher: list[str], config: TrainConfig, tmp_path: Path, rank: int = 1, *flags: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "dying.py").write_text(DYING_TRAINER)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    command = [*launcher, "dying.py", "train", "--config", "config.yaml", *flags]
    die = f"{rank},{SHORT.killed_at},{tmp_path / 'has_died'}"
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DIE": die},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_on_rank(rank: int, config: TrainConfig, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        run(config, torch.device("cpu"))
    finally:
        for name in environment:
            del os.environ[name]


def run_straight(ranks: Any, config: TrainConfig, world_size: int) -> Path:
    straight = replace(config, name="straight")
    ranks.run(run_on_rank, straight, {}, world_size=world_size)
    return newest(Path(config.output.folder) / "straight")


def test_torchrun_restarts_a_killed_rank_and_nothing_is_lost(
    tiny_config: TrainConfig, tmp_path: Path, ranks: Any
) -> None:
    config = configure(tiny_config, tmp_path, "adagrad", SHORT)
    write_plan(tmp_path / "plan.yaml", world_size=2)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    done = start(torchrun, config, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "has_died").exists()
    assert "going on from " in done.stdout and "step-00000010" in done.stdout
    assert [path.name for path in Path(config.output.folder).iterdir()] == ["tiny"]
    found = newest(Path(config.output.folder) / "tiny")
    assert_same_checkpoint(found, run_straight(ranks, config, 2))


@pytest.mark.long
def test_a_process_that_was_killed_is_resumed_by_hand(
    tiny_config: TrainConfig, tmp_path: Path, ranks: Any
) -> None:
    config = configure(tiny_config, tmp_path, "adamw", SHORT)
    write_plan(tmp_path / "plan.yaml", world_size=1)
    assert start([], config, tmp_path, 0).returncode == -9
    done = start([], config, tmp_path, 0, "--resume")
    assert done.returncode == 0, done.stderr
    found = newest(Path(config.output.folder) / "tiny")
    assert_same_checkpoint(found, run_straight(ranks, config, 1))


@pytest.mark.long
def test_a_killed_rank_of_ours_is_the_error_that_is_shown(
    tiny_config: TrainConfig, tmp_path: Path
) -> None:
    """The other rank finds its connection closed, and might be quicker to say so."""
    config = configure(tiny_config, tmp_path, "adagrad", SHORT)
    write_plan(tmp_path / "plan.yaml", world_size=2)
    done = start([], config, tmp_path, 0, "--nproc", "2")
    assert done.returncode == 1
    assert "the run failed: rank 0: Signal 9 (SIGKILL)" in done.stderr
    assert "Connection closed" not in done.stderr


@pytest.fixture
def dies_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes runs of this process die behind a step, once."""

    def arm(step: int) -> None:
        load = run_module.load_dataset

        def load_dying(*arguments: Any) -> DatasetThatDies:
            monkeypatch.setattr(run_module, "load_dataset", load)
            return DatasetThatDies(load(*arguments), step)

        monkeypatch.setattr(run_module, "load_dataset", load_dying)

    return arm


def job(name: str, restarts: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(restarts)}


def run_as(environment: dict[str, str], config: TrainConfig) -> None:
    with process_group("cpu"):
        run_on_rank(0, config, environment)


def test_a_restart_before_the_first_checkpoint_starts_anew(
    tiny_config: TrainConfig, dies_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(tiny_config, train=replace(tiny_config.train, epochs=1))
    folder = Path(config.output.folder)
    dies_at(5)
    with pytest.raises(Killed):
        run_as(job("a"), config)
    run_as(job("a", restarts=1), config)
    assert "going on from" not in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["tiny"]
    assert (folder / "tiny" / "summary.json").is_file()


def test_a_job_of_another_name_is_a_run_of_its_own(tiny_config: TrainConfig) -> None:
    """Also when it is restarted before it could move the earlier run aside."""
    config = replace(tiny_config, train=replace(tiny_config.train, max_steps=2))
    folder = Path(config.output.folder)
    run_as(job("a"), config)
    run_as(job("b", restarts=1), config)
    assert sorted(path.name for path in folder.iterdir()) == ["tiny", "tiny.1"]
    run_as(job("b"), config)  # complete: started again by hand, under the same name
    assert sorted(path.name for path in folder.iterdir()) == ["tiny", "tiny.1", "tiny.2"]
    run_as({}, config)
    assert len(list(folder.iterdir())) == 4


def test_a_job_goes_on_with_the_hosts_that_are_left(
    tiny_config: TrainConfig, dies_at: Any, ranks: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun counts no restart when hosts come or go: its job is known by name."""
    config = replace(tiny_config, train=replace(tiny_config.train, epochs=1, log_every_steps=1))
    config.checkpoint = replace(config.checkpoint, every_steps=2)
    ranks.run(run_on_rank, replace(config, name="straight"), {}, world_size=2)
    dies_at(5)
    with pytest.raises(Killed):
        run_as(job("a"), config)
    ranks.run(run_on_rank, config, job("a"), world_size=2)
    folder = Path(config.output.folder)
    assert sorted(path.name for path in folder.iterdir()) == ["straight", "tiny"]
    losses = [
        [
            float(row.split(",")[3])
            for row in (folder / name / "metrics.csv").open()
            if ",train," in row
        ]
        for name in ("straight", "tiny")
    ]
    assert len(losses[0]) == 8
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
