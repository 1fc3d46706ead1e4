"""Runs of the trainer with tiered tables."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecorec_torchrec.testing import RankPool
from ecorec_torchrec.train.config import TiersConfig, TrainConfig
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import run

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_config: TrainConfig) -> TrainConfig:
    """One tiered table of each kind of neighbour: a TT one and a dense one."""
    tiny_config.tt.tables = ("sparse_0",)
    tiny_config.tiers = TiersConfig(tables=("sparse_1",), cache_rows=170)
    tiny_config.train.epochs = 2
    tiny_config.checkpoint.every_steps = 3
    return tiny_config


def run_alone(config: TrainConfig) -> dict[str, Any]:
    with process_group("cpu") as device:
        return run(config, device)


def run_on_rank(rank: int, config: TrainConfig) -> dict[str, Any]:
    return run(config, CPU)


def metrics(config: TrainConfig) -> list[dict[str, str]]:
    folder = Path(config.output.folder) / config.name
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def losses(config: TrainConfig) -> list[str]:
    return [row["loss"] for row in metrics(config)]


def test_the_memories_of_a_table_change_no_loss(config: TrainConfig) -> None:
    config.train.batch_size = 16  # of far fewer rows than there are
    run_alone(config)
    few = replace(config, name="few", tiers=replace(config.tiers, cache_rows=70, memory_rows=10))
    none_ahead = replace(
        config, name="none-ahead", tiers=replace(config.tiers, cache_rows=200, prefetch_batches=0)
    )
    for other in (few, none_ahead):
        run_alone(other)
        assert losses(other) == losses(config)
    rows = [row for row in metrics(few) if row["split"] == "train"]
    assert all(0 <= float(row["tier_hit_rate"]) <= 1 for row in rows)
    assert any(0 < float(row["tier_hit_rate"]) < 1 for row in rows)
    assert all(float(row["tier_wait_ms"]) >= 0 for row in rows)
    assert sum(float(row["tier_memory_bytes"]) for row in rows) > 0
    assert sum(float(row["tier_file_read_bytes"]) for row in rows) > 0
    plan = (Path(few.output.folder) / "few" / "plan.yaml").read_text()
    assert "kernel: tiered" in plan and "cache_rows: 70" in plan


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_a_run_resumes_on_two_ranks(config: TrainConfig, ranks: RankPool, sharding: str) -> None:
    """Counters of uses start anew, which changes what is evicted and no loss."""
    config.tt.tables = ()
    config.tiers.sharding = sharding
    ranks.run(run_on_rank, config, world_size=2)
    straight = losses(config)
    name = "resumed"
    broken = replace(config, name=name, train=replace(config.train, max_steps=5))
    ranks.run(run_on_rank, broken, world_size=2)
    ranks.run(run_on_rank, replace(config, name=name, resume=True), world_size=2)
    whole = replace(config, name=name)
    # The broken run evaluated once more, and ended a line of metrics.csv earlier.
    assert losses(whole)[-3:] == straight[-3:]


def test_a_checkpoint_without_its_rows_is_refused(config: TrainConfig) -> None:
    config.train.max_steps = 3
    run_alone(config)
    folder = Path(config.output.folder) / config.name
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    tables = json.loads((checkpoint / "tiers" / "tiers.json").read_text())["tables"]
    assert [name.rpartition(".")[2] for name in tables] == ["sparse_1"]
    shutil.rmtree(checkpoint / "tiers")
    with pytest.raises(ValueError, match="holds no rows of tiered tables"):
        run_alone(replace(config, resume=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tiers": TiersConfig(tables=("sparse_9",))}, "tiers.tables: no table 'sparse_9'; there"),
        (
            {"tiers": TiersConfig(tables=("sparse_1",), memory_folder="/tmp/x")},
            "tiers: memory_folder='/tmp/x' without memory_rows",
        ),
    ],
)
def test_a_run_that_cannot_be(config: TrainConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_alone(replace(config, **changes))


def test_options_that_exclude_each_other(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"tiers.tables and tt.tables both name \['sparse_0'\]"):
        replace(config, tiers=TiersConfig(tables=("sparse_0",)))
    with pytest.raises(ValueError, match="tiers.cache_rows=0 must be >= 1"):
        TiersConfig(cache_rows=0)
    with pytest.raises(ValueError, match="init_from='runs/a' cannot fill"):
        replace(config, checkpoint=replace(config.checkpoint, init_from="runs/a"))
    with pytest.raises(ValueError, match="compare_dense=True would hold"):
        replace(config, compare_dense=True)
