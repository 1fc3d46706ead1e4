"""What goes wrong in train pipelines: batches lost, left over, or used in another mode."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.data import load_dataset
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.model import TT
from ecorec_torchrec.train.run import run
from ecorec_torchrec.train.trainer import Trainer

NAMES = ("t_tw", "t_dp", "d_tw")
Pipeline = TrainPipelineSparseDist


def make_pipeline() -> tuple[Pipeline, DistributedModelParallel]:
    tables = toy.configs(NAMES)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables), toy.generators(NAMES, 1)
    )
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    return TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), model


@pytest.fixture
def pipeline() -> Iterator[tuple[Pipeline, DistributedModelParallel]]:
    with process_group("cpu"):
        yield make_pipeline()


def drain(pipeline: Pipeline, batches: Iterator[toy.ToyBatch]) -> int:
    outputs = 0
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            return outputs
        outputs += 1


class Batches(Dataset):
    """Batch number i, in whichever worker."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, step: int) -> toy.ToyBatch:
        return toy.make_batch(NAMES, step, 0)


def generate() -> Iterator[toy.ToyBatch]:
    for step in range(5):
        yield Batches()[step]


@pytest.mark.parametrize("source", ["persistent workers", "list", "generator"])
def test_every_batch_in_every_epoch(
    pipeline: tuple[Pipeline, DistributedModelParallel], source: str
) -> None:
    """A loader with persistent workers hands out one iterator in all epochs, which the pipeline
    takes for the exhausted one: it is to be wrapped in a generator."""
    loader = DataLoader(Batches(), batch_size=None, num_workers=2, persistent_workers=True)
    batches = [Batches()[step] for step in range(5)]
    sources: dict[str, Callable[[], Iterator[toy.ToyBatch]]] = {
        "persistent workers": lambda: (batch for batch in loader),
        "list": lambda: iter(batches),
        "generator": generate,
    }
    assert [drain(pipeline[0], sources[source]()) for _ in range(3)] == [5, 5, 5]


@pytest.mark.parametrize("num_batches", [5, 1, 0])
def test_nothing_is_left_in_the_pipeline(
    pipeline: tuple[Pipeline, DistributedModelParallel], num_batches: int
) -> None:
    """The batches in flight when the data end come out too."""
    batches = [Batches()[step] for step in range(num_batches)]
    assert drain(pipeline[0], iter(batches)) == num_batches
    assert drain(pipeline[0], iter([])) == 0
    assert drain(pipeline[0], iter(batches)) == num_batches


def cores_of(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {
        n: v.clone() for n, v in toy.whole_state(model).items() if "tt_cores" in n and n in state
    }


def test_training_and_evaluation_take_turns_on_one_pipeline(
    pipeline: tuple[Pipeline, DistributedModelParallel],
) -> None:
    """Each batch is used once and in its own mode, and evaluation changes nothing."""
    one, model = pipeline
    seen: list[tuple[bool, float]] = []
    model.module.linear.register_forward_hook(
        lambda module, inputs, output: seen.append((module.training, float(output.detach().sum())))
    )
    expected_modes: list[bool] = []
    for turn in range(3):
        model.train()
        batches = iter([Batches()[3 * turn + k] for k in range(3)])
        assert drain(one, batches) == 3
        before = cores_of(model)
        assert before
        model.eval()
        with torch.no_grad():
            assert drain(one, iter([Batches()[100 + 2 * turn + k] for k in range(2)])) == 2
        after = cores_of(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        expected_modes += [True] * 3 + [False] * 2
    assert [mode for mode, _ in seen] == expected_modes
    assert len({value for _, value in seen}) == 15, "every batch once"


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 4), (True, 3)])
def test_a_last_batch_that_is_smaller(
    pipeline: tuple[Pipeline, DistributedModelParallel], drop_last: bool, expected: int
) -> None:
    """10 examples in batches of 3: the last one of one example trains too, or is left out."""

    def collate(examples: list[int]) -> toy.ToyBatch:
        return toy.make_batch(NAMES, examples[0], 0, batch_size=len(examples))

    data: Any = list(range(10))
    loader = DataLoader(data, batch_size=3, drop_last=drop_last, collate_fn=collate)
    assert [drain(pipeline[0], iter(loader)) for _ in range(2)] == [expected] * 2


def evaluate_counts(rank: int, config: TrainConfig) -> tuple[int, int]:
    summary = run(config, torch.device("cpu"))
    return summary["num_test_rows"], load_dataset(config.data, config.seed).num_batches("train", 64)


def test_a_thousand_rows_in_batches_of_64_on_two_ranks(
    tiny_config: TrainConfig, ranks: RankPool
) -> None:
    """No row of the last batch is dropped or counted twice, on either rank."""
    tiny_config.data.synthetic.num_rows = 1000
    tiny_config.data = replace(tiny_config.data, val_fraction=0.33, test_fraction=0.333)
    tiny_config.train = replace(tiny_config.train, epochs=1)
    assert ranks.run(evaluate_counts, tiny_config, world_size=2) == [(333, 6)] * 2


def steps_and_infinities(rank: int, config: TrainConfig) -> tuple[object, list[object]]:
    folder = Path(config.output.folder) / config.name
    folder.mkdir(parents=True, exist_ok=True)
    dataset = load_dataset(config.data, config.seed)
    trainer = Trainer(config, dataset, TT, folder, torch.device("cpu"), quiet=True)
    history = trainer.fit().history
    bad: list[object] = [row for row in history if not math.isfinite(float(str(row["loss"])))]
    bad += [name for name, p in trainer.model.named_parameters() if not p.isfinite().all()]
    return history[-1]["step"], bad


@pytest.mark.parametrize("rank", [8, 32])
def test_two_hundred_steps_on_two_ranks_stay_finite(
    tiny_config: TrainConfig, ranks: RankPool, rank: int
) -> None:
    """With the learning rates that come by default."""
    tiny_config.data.synthetic.num_rows = 1000
    tiny_config.data.synthetic.num_embeddings = 2000
    tiny_config.tt = replace(tiny_config.tt, rank=rank)
    tiny_config.train = replace(
        tiny_config.train, epochs=4, batch_size=16, max_steps=200, log_every_steps=20
    )
    tiny_config.checkpoint = replace(tiny_config.checkpoint, keep=0)
    assert ranks.run(steps_and_infinities, tiny_config, world_size=2) == [(200, [])] * 2
