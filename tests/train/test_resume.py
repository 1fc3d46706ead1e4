"""A run that was killed and goes on equals the unbroken run bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ecorec_torchrec.train.checkpoint import Checkpoints, Progress, read_progress
from ecorec_torchrec.train.config import OptimizerConfig, OptimizerName, TrainConfig
from ecorec_torchrec.train.data import Dataset, RankBatch, load_dataset
from ecorec_torchrec.train.model import TT
from ecorec_torchrec.train.saved_state import open_state
from ecorec_torchrec.train.trainer import Trainer
from ecorec_torchrec.tt import TTSpec

OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw")
ROWS = 200
# Table-wise and data-parallel, TT and dense.
PLACEMENT = {
    "sparse_0": ("tt", "table_wise"),
    "sparse_1": ("tt", "data_parallel"),
    "sparse_2": ("fused", "table_wise"),
    "sparse_3": ("dense", "data_parallel"),
}


@dataclass(frozen=True)
class Schedule:
    """Killed a few steps behind a checkpoint, inside an epoch and a line of metrics.csv."""

    steps: int
    checkpoint_every: int
    killed_at: int
    batches_per_epoch: int


WHOLE, SHORT = Schedule(100, 20, 63, 32), Schedule(25, 10, 13, 8)
BATCH_SIZE = 16


class Killed(Exception):  # noqa: N818 - a word for what happens to it
    pass


class DatasetThatDies(Dataset):
    """Kills its reader when it asks for a training batch behind `last_step`."""

    def __init__(self, inner: Dataset, last_step: int) -> None:
        self._inner, self._left = inner, last_step
        self.schema, self.seed = inner.schema, inner.seed

    def describe(self) -> str:
        return self._inner.describe()

    def num_batches(self, split: Any, batch_size: int) -> int | None:
        return self._inner.num_batches(split, batch_size)

    def batches(self, split: Any, **options: Any) -> Iterator[RankBatch]:
        for batch in self._inner.batches(split, **options):
            if split == "train":
                if self._left == 0:
                    raise Killed
                self._left -= 1
            yield batch


def write_plan(path: Path, world_size: int, first_owner: int = 0) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for number, (name, (kernel, sharding)) in enumerate(PLACEMENT.items()):
        entry = {"num_embeddings": ROWS, "embedding_dim": 16, "kernel": kernel}
        owner = (first_owner + number) % world_size
        ranks = list(range(world_size)) if sharding == "data_parallel" else [owner]
        tables[name] = {**entry, "sharding": sharding, "ranks": ranks}
        if kernel == "tt":
            spec = TTSpec.suggest(ROWS, 16, rank=8)
            shape = {name: list(getattr(spec, name)) for name in ("row_factors", "col_factors")}
            tables[name]["tt"] = {**shape, "ranks": list(spec.ranks)}
    plan = {
        "schema_version": 1,
        "world_size": world_size,
        "device": "cpu",
        "modules": {"model.sparse_arch.embedding_bag_collection": tables},
    }
    path.write_text(yaml.safe_dump(plan, sort_keys=False))


def configure(
    config: TrainConfig, tmp_path: Path, optimizer: OptimizerName, schedule: Schedule
) -> TrainConfig:
    """Dropout, and one optimizer for TT tables, dense tables and MLPs, where FBGEMM has it."""
    config.data.synthetic.num_rows = schedule.batches_per_epoch * BATCH_SIZE * 10 // 8
    config.data.synthetic.num_sparse_features = 4
    config.model.dropout = 0.2
    config.plan.file = str(tmp_path / "plan.yaml")
    epochs = -(-schedule.steps // schedule.batches_per_epoch)
    config.train = replace(config.train, batch_size=BATCH_SIZE, epochs=epochs, log_every_steps=7)
    config.train.max_steps = schedule.steps
    config.checkpoint = replace(config.checkpoint, every_steps=schedule.checkpoint_every)
    config.optim.tt = OptimizerConfig(name=optimizer, learning_rate=4e-3)
    mlp: OptimizerName = "adagrad" if optimizer == "rowwise_adagrad" else optimizer
    config.optim.dense = OptimizerConfig(name=mlp, learning_rate=1e-3)
    dense_tables = "rowwise_adagrad" if optimizer.startswith("adam") else optimizer
    config.optim.embedding = OptimizerConfig(name=dense_tables, learning_rate=0.05)
    return config


def train(config: TrainConfig, folder: Path, killed_at: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    dataset = load_dataset(config.data, config.seed)
    if killed_at is not None:
        dataset = DatasetThatDies(dataset, killed_at)
    trainer = Trainer(config, dataset, TT, folder, torch.device("cpu"), quiet=True)
    if killed_at is None:
        trainer.fit()
        return
    with pytest.raises(Killed):
        trainer.fit()


def straight_and_resumed(rank: int, config: TrainConfig, folder: str, killed_at: int) -> None:
    straight_and_killed(rank, config, folder, killed_at)
    torch.manual_seed(99)
    train(replace(config, resume=True), Path(folder, "killed"))


def newest(folder: Path) -> Path:
    found = Checkpoints(folder / "checkpoints", keep=1).newest()
    assert found is not None
    return found


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Model, optimizer, position, metrics and random state; only the speeds differ."""
    assert one.name == other.name
    states = [open_state(path) for path in (one, other)]
    assert states[0].tensors == states[1].tensors
    names = list(states[0].tensors)
    for name, left, right in zip(names, *(s.read(names).values() for s in states), strict=True):
        assert torch.equal(left, right), name
    left_progress, right_progress = (comparable(read_progress(path)) for path in (one, other))
    assert left_progress == right_progress


def comparable(progress: Progress) -> dict[str, Any]:
    history = [
        {k: v for k, v in row.items() if k != "samples_per_second" and not k.endswith("_ms")}
        for row in progress.history
    ]
    rng_states = [state["cpu"].tolist() for state in progress.rank_states]
    return {**vars(progress), "history": history, "rank_states": rng_states}


CELLS = [
    pytest.param(optimizer, world_size, WHOLE, marks=pytest.mark.long)
    for optimizer in OPTIMIZERS
    for world_size in (1, 2)
]


@pytest.mark.parametrize(
    ("optimizer", "world_size", "schedule"),
    [("adam", 1, SHORT), ("adagrad", 2, SHORT), ("sgd", 2, SHORT), *CELLS],
)
def test_a_killed_run_that_goes_on_equals_the_straight_one(
    tiny_config: TrainConfig,
    tmp_path: Path,
    ranks: Any,
    optimizer: OptimizerName,
    world_size: int,
    schedule: Schedule,
) -> None:
    config = configure(tiny_config, tmp_path, optimizer, schedule)
    write_plan(tmp_path / "plan.yaml", world_size)
    ranks.run(
        straight_and_resumed, config, str(tmp_path), schedule.killed_at, world_size=world_size
    )
    assert_same_checkpoint(newest(tmp_path / "straight"), newest(tmp_path / "killed"))


def straight_and_killed(rank: int, config: TrainConfig, folder: str, killed_at: int) -> None:
    train(config, Path(folder, "straight"))
    train(config, Path(folder, "killed"), killed_at)


def test_a_run_goes_on_under_another_plan(
    tiny_config: TrainConfig, tmp_path: Path, ranks: Any
) -> None:
    """Every table-wise table has another owner; where a table lies changes no number of it."""
    config = configure(tiny_config, tmp_path, "adam", SHORT)
    write_plan(tmp_path / "plan.yaml", 2)
    ranks.run(straight_and_killed, config, str(tmp_path), SHORT.killed_at)
    write_plan(tmp_path / "plan.yaml", 2, first_owner=1)
    ranks.run(train_on_rank, replace(config, resume=True), str(tmp_path / "killed"))
    assert_same_checkpoint(newest(tmp_path / "straight"), newest(tmp_path / "killed"))


def train_on_rank(rank: int, config: TrainConfig, folder: str) -> None:
    train(config, Path(folder))


def killed_and_resumed(rank: int, config: TrainConfig, folder: str, resumed: TrainConfig) -> None:
    train(config, Path(folder), SHORT.killed_at)
    train(resumed, Path(folder))


def test_lines_of_metrics_may_come_more_often_after_a_resume(
    tiny_config: TrainConfig, tmp_path: Path, ranks: Any
) -> None:
    """The line that was begun before the checkpoint is longer already than the new ones."""
    config = configure(tiny_config, tmp_path, "sgd", SHORT)
    write_plan(tmp_path / "plan.yaml", 1)
    resumed = replace(config, resume=True)
    resumed.train = replace(config.train, log_every_steps=1, max_steps=16)
    ranks.run(killed_and_resumed, config, str(tmp_path / "run"), resumed, world_size=1)
    history = read_progress(newest(tmp_path / "run")).history
    lines = [row["step"] for row in history if row["split"] == "train"]
    assert lines == [7, 8, 11, 12, 13, 14, 15, 16]
