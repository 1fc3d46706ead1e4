"""The optimizer options of a run."""

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecorec_torchrec.train.config import OptimConfig, OptimizerConfig, TrainConfig
from ecorec_torchrec.train.data import RankBatch
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.optimizers import warm_up
from ecorec_torchrec.train.run import run
from ecorec_torchrec.train.trainer import Trainer


def run_alone(config: TrainConfig) -> dict[str, Any]:
    with process_group("cpu") as device:
        return run(config, device)


def read_losses(config: TrainConfig) -> list[float]:
    path = Path(config.output.folder) / config.name / "metrics.csv"
    with open(path, newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["split"] == "train"]


def test_rates_rise_in_equal_parts_and_go_on_where_they_were() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)

    def rates(steps_done: int, steps: int) -> list[float]:
        groups = [{"params": [weight], "lr": 0.8}]
        optimizer = torch.optim.SGD(groups)
        schedule = warm_up(optimizer, 4, steps_done)
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    assert rates(0, 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates(0, 6)[3:] == rates(3, 3)


def test_warm_up_and_clipping_go_on_after_a_resume(tiny_config: TrainConfig) -> None:
    tiny_config.train = replace(tiny_config.train, log_every_steps=1)
    tiny_config.optim.dense = OptimizerConfig(name="sgd", learning_rate=0.1)
    losses = {}
    for name, options in (
        ("plain", {}),
        ("warm", {"warmup_steps": 12}),
        ("both", {"warmup_steps": 12, "max_gradient_norm": 0.1}),
    ):
        config = replace(tiny_config, name=name, optim=replace(tiny_config.optim, **options))
        run_alone(config)
        losses[name] = read_losses(config)
    assert len({tuple(found) for found in losses.values()}) == 3, "every option has an effect"
    short = replace(config, name="short", train=replace(config.train, max_steps=5))
    run_alone(short)
    run_alone(replace(config, name="short", resume=True))
    assert read_losses(short) == losses["both"]


@pytest.fixture
def nan_in_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    batches_of = Trainer._batches

    def poisoned(self: Trainer, split: str, *args: int) -> Iterator[RankBatch]:
        for index, batch in enumerate(batches_of(self, split, *args)):
            if split == "train" and index == 2:
                batch.labels[:] = math.nan
            yield batch

    monkeypatch.setattr(Trainer, "_batches", poisoned)


@pytest.mark.usefixtures("nan_in_step_3")
def test_a_batch_with_nan(tiny_config: TrainConfig) -> None:
    """It ends the run, before it changes anything if asked for."""
    tiny_config.train = replace(tiny_config.train, log_every_steps=1, epochs=1)

    def config(policy: str) -> TrainConfig:
        return replace(
            tiny_config, name=policy, optim=replace(tiny_config.optim, nonfinite_gradients=policy)
        )

    with pytest.raises(FloatingPointError, match="the training loss is nan at step 3"):
        run_alone(config("ignore"))
    with pytest.raises(FloatingPointError, match=r"the gradient of sparse_[01].* is not finite"):
        run_alone(config("stop"))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="optim.warmup_steps=-1 must be >= 0"):
        OptimConfig(warmup_steps=-1)
    with pytest.raises(ValueError, match="optim.max_gradient_norm=0 must be > 0"):
        OptimConfig(max_gradient_norm=0)
