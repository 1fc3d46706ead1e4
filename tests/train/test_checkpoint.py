"""Checkpoints on disk: whole or not there, few, and refused with one clear error when damaged."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecorec_torchrec.train import checkpoint as checkpoint_module
from ecorec_torchrec.train.checkpoint import Checkpoints, read_progress
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import run


def run_alone(config: TrainConfig) -> dict[str, Any]:
    with process_group("cpu") as device:
        return run(config, device)


@pytest.fixture
def config(tiny_config: TrainConfig) -> TrainConfig:
    """Two epochs of 8 batches, a checkpoint every 3 steps."""
    tiny_config.checkpoint = replace(tiny_config.checkpoint, every_steps=3)
    return tiny_config


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.folder) / config.name / "checkpoints"


class Interrupted(Exception):  # noqa: N818 - a word for what happens to it
    pass


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Half of a checkpoint is never taken for a whole one, and goes with the next save."""
    save, saves = checkpoint_module.dcp.save, []

    def save_and_crash(state: Any, **options: Any) -> None:
        saves.append(options["checkpoint_id"].name)
        if len(saves) == 3 and moment == "before":
            raise Interrupted
        save(state, **options)
        if len(saves) == 3:
            raise Interrupted

    monkeypatch.setattr(checkpoint_module.dcp, "save", save_and_crash)
    with pytest.raises(Interrupted):
        run_alone(config)
    found = {path.name for path in folder_of(config).iterdir()}
    assert found == {"step-00000006", "step-00000008.partial"}
    newest = Checkpoints(folder_of(config), keep=1).newest()
    assert newest is not None and read_progress(newest).steps == 6
    run_alone(replace(config, resume=True))
    assert [path.name for path in folder_of(config).iterdir()] == ["step-00000016"]


def test_the_end_of_an_epoch_does_not_write_weights_twice(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing the only checkpoint by one of the same step would leave a moment without any."""
    config.checkpoint = replace(config.checkpoint, every_steps=4)
    save, names = checkpoint_module.dcp.save, []

    def save_and_note(state: Any, **options: Any) -> None:
        names.append(options["checkpoint_id"].name)
        save(state, **options)

    monkeypatch.setattr(checkpoint_module.dcp, "save", save_and_note)
    run_alone(config)
    assert names == [f"step-{step:08d}.partial" for step in (4, 8, 12, 16)]
    newest = Checkpoints(folder_of(config), keep=1).newest()
    assert newest is not None
    progress = read_progress(newest)
    assert (progress.epoch, progress.batches, progress.steps) == (2, 0, 16)


def truncate(folder: Path) -> None:
    [data] = folder.glob("*.distcp")
    os.truncate(data, data.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no data": lambda folder: next(folder.glob("*.distcp")).unlink(),
    "half of the data": truncate,
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "metadata of zeros": lambda folder: (folder / ".metadata").write_bytes(bytes(100)),
    "no progress": lambda folder: (folder / "progress.pt").unlink(),
    "progress of zeros": lambda folder: (folder / "progress.pt").write_bytes(bytes(100)),
}


def test_a_damaged_checkpoint_is_one_clear_error(config: TrainConfig) -> None:
    """Without it the run goes on from the one before."""
    config.checkpoint = replace(config.checkpoint, keep=2)
    config.train = replace(config.train, max_steps=6)
    run_alone(config)
    newest = Checkpoints(folder_of(config), keep=2).newest()
    assert newest is not None
    whole = newest.with_name("whole")
    newest.rename(whole)
    resumed = replace(config, resume=True, train=replace(config.train, max_steps=9))
    for kind, damage in DAMAGE.items():
        shutil.copytree(whole, newest)
        damage(newest)
        with pytest.raises(ValueError) as caught:
            run_alone(resumed)
        said = str(caught.value)
        assert said.startswith(f"the checkpoint {newest} cannot be read ("), kind
        assert said.endswith("; remove that folder to go on from the one before it"), kind
        shutil.rmtree(newest)
    run_alone(resumed)
    assert (folder_of(config) / "step-00000009").is_dir()


def test_the_batch_size_may_change_at_the_end_of_an_epoch(config: TrainConfig) -> None:
    """Inside one the place in the data, counted in batches, would be another."""
    config.train = replace(config.train, max_steps=6)
    run_alone(config)
    other = replace(config, resume=True, train=replace(config.train, max_steps=12, batch_size=128))
    with pytest.raises(ValueError, match="train.batch_size was 64, and is now 128"):
        run_alone(other)
    run_alone(replace(config, resume=True, train=replace(config.train, max_steps=8)))
    run_alone(other)
    newest = Checkpoints(folder_of(config), keep=1).newest()
    assert newest is not None
    progress = read_progress(newest)
    assert (progress.epoch, progress.batches, progress.steps) == (2, 0, 12), "4 batches of 128"


def test_another_optimizer_is_refused_by_name(config: TrainConfig) -> None:
    config.train = replace(config.train, max_steps=3)
    run_alone(config)
    tt = replace(config.optim.tt, name="sgd")
    with pytest.raises(ValueError, match=r"optim.tt.name was adam, and is now sgd"):
        run_alone(replace(config, resume=True, optim=replace(config.optim, tt=tt)))
