"""`EcoRecTrainPipeline`: every batch is used once, in its own mode, whatever is switched when."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.testing import RankPool, toy

NAMES = ("t_tw", "t_tw2", "t_q", "t_dp", "d_tw")


def build(model: nn.Module | None = None) -> tuple[DistributedModelParallel, EcoRecTrainPipeline]:
    torch.manual_seed(0)
    tables = toy.configs(NAMES)
    model = model or toy.ToyModel(toy.collection(tables, device="meta"), tables)
    sharded = toy.shard(model, toy.generators(NAMES, dist.get_world_size()), num_dist_groups=2)
    optimizer = toy.optimizer_of(sharded, lambda params: torch.optim.SGD(params, lr=0.05))
    return sharded, EcoRecTrainPipeline(sharded, optimizer, torch.device("cpu"))


def batches(rank: int, count: int, start: int = 0) -> list[toy.ToyBatch]:
    """Of 6 rows, the last one of 2."""
    sizes = [6] * (count - 1) + [2]
    steps = range(start, start + count)
    return [
        toy.make_batch(NAMES, step, rank, size) for step, size in zip(steps, sizes, strict=False)
    ]


def drain(pipeline: EcoRecTrainPipeline, batches: list[toy.ToyBatch]) -> list[torch.Tensor]:
    iterator, outputs = iter(batches), []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs


def epochs_of_few_batches(rank: int) -> tuple[list[int], int]:
    _, pipeline = build()
    return [len(drain(pipeline, batches(rank, count))) for count in (5, 1, 0, 2, 5)], len(
        pipeline.batches
    )


def test_every_batch_of_an_epoch_gives_an_output(ranks: RankPool) -> None:
    """Batches in flight when the iterator ends are not dropped; no batch ends at once."""
    assert ranks.run(epochs_of_few_batches) == [([5, 1, 0, 2, 5], 0)] * 2


def train_and_evaluate(rank: int) -> tuple[dict, dict, list[bool], list[bool]]:
    """3 training steps and 2 evaluations in turn, and the same one after the other unpipelined."""
    training, evaluation = batches(rank, 9), batches(rank, 6, start=20)
    rounds = [(training[3 * i : 3 * i + 3], evaluation[2 * i : 2 * i + 2]) for i in range(3)]

    model, pipeline = build()
    start = copy.deepcopy(toy.whole_state(model))
    train_iterator, eval_iterator = iter(training), iter(evaluation)
    found, unchanged = [], []
    for _ in rounds:
        found += [pipeline.progress(train_iterator) for _ in range(3)]
        model.eval()
        before = copy.deepcopy(toy.whole_state(model))
        with torch.no_grad():
            found += [pipeline.progress(eval_iterator) for _ in range(2)]
        after = toy.whole_state(model)
        unchanged += [torch.equal(before[name], after[name]) for name in before]
        model.train()
    with pytest.raises(StopIteration):
        pipeline.progress(train_iterator)
    pipelined = toy.whole_state(model)

    model, pipeline = build()
    optimizer = pipeline._optimizer
    expected = []
    for trained, evaluated in rounds:
        for batch in trained:
            optimizer.zero_grad()
            loss, logits = model(batch)
            loss.sum().backward()
            optimizer.step()
            expected.append(logits)
        with torch.no_grad():
            expected += [model(batch)[1] for batch in evaluated]
    plain = toy.whole_state(model)
    assert any(not torch.equal(start[name], plain[name]) for name in plain)
    return pipelined, plain, unchanged, list(map(torch.equal, found, expected))


def test_training_and_evaluation_take_turns_on_one_pipeline(ranks: RankPool) -> None:
    """Batches that are in flight when the mode changes wait until it changes back."""
    for pipelined, plain, unchanged, same_outputs in ranks.run(train_and_evaluate):
        assert all(torch.equal(pipelined[name], plain[name]) for name in plain)
        assert all(unchanged)
        assert same_outputs == [True] * 15


def two_iterators(rank: int, used_of_first: int) -> list[bool]:
    first, second = batches(rank, 3), batches(rank, 3, start=3)
    model, pipeline = build()
    model.eval()
    with torch.no_grad():
        iterator = iter(first)
        found = [pipeline.progress(iterator) for _ in range(used_of_first)]
        found += drain(pipeline, second)
        return list(map(torch.equal, found, [model_output(build()[0], b) for b in first + second]))


def model_output(model: nn.Module, batch: toy.ToyBatch) -> torch.Tensor:
    return model.eval()(batch)[1]


@pytest.mark.parametrize("used_of_first", [1, 2, 3])
def test_batches_in_flight_come_before_those_of_another_iterator(
    ranks: RankPool, used_of_first: int
) -> None:
    """Also where one single batch is left, for which TorchRec's pipeline starts no input dist."""
    assert ranks.run(two_iterators, used_of_first) == [[True] * 6] * 2


def profiled_ranges(rank: int) -> set[str]:
    _, pipeline = build()
    iterator = iter(batches(rank, 2))
    pipeline.progress(iterator)
    with torch.profiler.profile() as profile:
        pipeline.progress(iterator)
    return {event.key for event in profile.key_averages() if "ecorec_torchrec" in event.key}


def test_ranges_of_a_profile_are_named_after_the_packages(ranks: RankPool) -> None:
    for found in ranks.run(profiled_ranges):
        assert "## ecorec_torchrec.lookup ##" in found
        assert {f"## ecorec_torchrec.dist: wait for ids {group} ##" for group in (0, 1)} <= found


class VariadicDensePart(toy.ToyModel):
    def forward(self, batch: toy.ToyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.ebc(batch.features), labels=batch.labels)

    def loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(torch.cat([args[0][name] for name in self.pooled_names], 1)).squeeze(1)
        return ((logits - kwargs["labels"]) ** 2).sum().view(1), logits.detach()


class ChangesItsInput(VariadicDensePart):
    def forward(self, batch: toy.ToyBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss(self.ebc(changed(batch.features)), labels=batch.labels)


@torch.fx.wrap
def changed(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values() // 2, lengths=features.lengths())


def pipelined_and_plain(rank: int, make: type[nn.Module]) -> tuple[list[str], list[bool]]:
    """What the pipeline warned of, and of every batch whether its outputs are the same."""

    def unsharded() -> nn.Module:
        torch.manual_seed(0)
        tables = toy.configs(NAMES)
        return make(toy.collection(tables, device="meta"), tables)

    _, pipeline = build(unsharded())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = drain(pipeline, batches(rank, 3))
    model, unused = build(unsharded())
    expected = []
    for batch in batches(rank, 3):
        unused._optimizer.zero_grad()
        loss, logits = model(batch)
        loss.sum().backward()
        unused._optimizer.step()
        expected.append(logits)
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return said, list(map(torch.equal, found, expected))


def test_the_dense_part_may_be_variadic(ranks: RankPool) -> None:
    for said, same in ranks.run(pipelined_and_plain, VariadicDensePart):
        assert same == [True] * 3
        assert not any("does not overlap" in text for text in said)


def test_a_collection_whose_input_is_no_part_of_the_batch_is_named(ranks: RankPool) -> None:
    """Its input dist cannot start a batch early. The numbers are right nevertheless."""
    for said, same in ranks.run(pipelined_and_plain, ChangesItsInput):
        assert same == [True] * 3
        assert [text for text in said if "does not overlap" in text and "ebc" in text]


class Variadic(toy.ToyModel):
    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(args[0])


def refusal(rank: int) -> str:
    tables = toy.configs(NAMES)
    _, pipeline = build(Variadic(toy.collection(tables, device="meta"), tables))
    with pytest.raises(ValueError) as error:
        drain(pipeline, batches(rank, 1))
    return str(error.value)


def test_a_variadic_model_is_refused(ranks: RankPool) -> None:
    """TorchRec's tracing would look for the argument inside the batch."""
    assert "Variadic.forward takes *args: name its argument" in ranks.run(refusal)[0]
