"""Tiered tables are, bit for bit, the tables that they would be if they fitted into memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.lookup import Lease, TieredKernel
from ecorec_torchrec.sharding import tier_statistics
from ecorec_torchrec.testing import RankPool, tiered
from ecorec_torchrec.testing.tiered import Case

CPU = torch.device("cpu")
SGD = EmbOptimType.EXACT_SGD
ADAGRAD = EmbOptimType.EXACT_ADAGRAD
ROWWISE_ADAGRAD = EmbOptimType.EXACT_ROWWISE_ADAGRAD


def compare(
    rank: int, case: Case, folder: str, num_steps: int, pipeline: type | None = None
) -> dict[str, Any]:
    """Trains both twins on the same batches."""
    model, optimizer = case.shard(folder)
    twin, twin_optimizer = case.shard()
    tiered.copy_start(model, twin)
    batches = [case.batch(step, rank) for step in range(num_steps)]
    if pipeline is None:
        outputs = tiered.train(model, optimizer, batches)
    else:
        outputs = tiered.train_in_pipeline(pipeline(model, optimizer, CPU), batches)
    expected = tiered.train(twin, twin_optimizer, batches)
    wrong_steps = [
        step
        for step, (own, other) in enumerate(zip(outputs, expected, strict=True))
        if not torch.equal(own, other)
    ]
    counts = tier_statistics(model).values()
    return {
        "wrong steps": wrong_steps,
        "differences": tiered.differences(model, twin),
        "file_rows": sum(count["file_rows"] for count in counts),
        "pins": pins(model),
        "kept": {n: t._cache.num_pinned for n, t in tiered.tiered_tables(model).items()},
    }


def pins(model: torch.nn.Module) -> int:
    """Batches in flight."""
    return sum(len(table._in_flight) for table in tiered.tiered_tables(model).values())


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["wrong steps"] == []
        assert result["differences"] == []
        assert result["pins"] == 0
    assert sum(result["file_rows"] for result in results) > 100, "too few rows were evicted"


@pytest.mark.parametrize(
    ("world_size", "case", "pipeline"),
    [
        (1, Case(optimizer=SGD), None),
        (1, Case(row_wise=True, optimizer=ADAGRAD, memory_rows=100), None),
        (2, Case(pooling=PoolingType.MEAN), None),
        (2, Case(row_wise=True, pooling=PoolingType.MEAN), None),
        (2, Case(row_wise=True, optimizer=ADAGRAD, cache_rows=80), TrainPipelineSparseDist),
        (1, Case(is_weighted=True, prefetch_batches=1), EcoRecTrainPipeline),
        (2, Case(prefetch_batches=2, optimizer=ADAGRAD), EcoRecTrainPipeline),
        (2, Case(row_wise=True, prefetch_batches=4), EcoRecTrainPipeline),
        (1, Case(sequence=True, optimizer=ADAGRAD), None),
        (2, Case(sequence=True, row_wise=True, prefetch_batches=1), EcoRecTrainPipeline),
    ],
)
def test_training_is_that_of_the_whole_table(
    ranks: RankPool, tmp_path: Any, world_size: int, case: Case, pipeline: type | None
) -> None:
    check(ranks.run(compare, case, str(tmp_path), 100, pipeline, world_size=world_size))


@pytest.mark.parametrize("row_wise", [False, True])
def test_the_hottest_rows_of_a_profile_stay_in_their_slots(
    ranks: RankPool, tmp_path: Path, row_wise: bool
) -> None:
    tiered.write_hot_ids(str(tmp_path / "profile.npz"))
    case = Case(row_wise=row_wise, hot_ids_file=str(tmp_path / "profile.npz"), pinned_rows=20)
    results = ranks.run(compare, case, str(tmp_path), 100)
    check(results)
    # All of them are in the first half of each table, and so on the first rank if it is cut.
    expected = [{"users": 20, "ads": 20}, {"users": 0, "ads": 0}]
    if not row_wise:
        expected = [{"ads": 20}, {"users": 20}]
    assert [result["kept"] for result in results] == expected


def look_up_after_a_dropped_graph(rank: int, case: Case, folder: str) -> tuple[int, ...]:
    model, _ = case.shard(folder)
    kernel = next(iter(tiered._collection(model)._kernels(TieredKernel)))
    names = [name for table in kernel._config.embedding_tables for name in table.feature_names]

    def features(first: int) -> KeyedJaggedTensor:
        """8 ids of each feature, all distinct."""
        ids = torch.arange(first, first + 8 * len(names))
        return KeyedJaggedTensor(names, ids, lengths=torch.full((4 * len(names),), 2))

    output = kernel(features(0))
    coming = features(200)
    kernel.prefetch(coming)  # has to wait: the slots are those of the first batch
    del output
    return tuple(kernel(coming).shape)


def test_a_dropped_graph_makes_room_for_the_batch_that_waits(
    ranks: RankPool, tmp_path: Path
) -> None:
    case = Case(cache_rows=20, prefetch_batches=1)
    arguments = (case, str(tmp_path))
    (shape,) = ranks.run(look_up_after_a_dropped_graph, *arguments, world_size=1)
    assert shape[0] == 4


def test_hot_rows_that_are_not_known_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.npz")
    tiered.write_hot_ids(path)
    for count, file, message in (
        (101, path, "table ads: pinned_rows=101, but hot_ids_file=.* knows 100 hot rows of it"),
        (1, None, "table users: pinned_rows=1, but hot_ids_file=None knows 0 hot rows of it"),
    ):
        case = Case(hot_ids_file=file, pinned_rows=count)
        with pytest.raises(RuntimeError, match=message):
            ranks.run(compare, case, str(tmp_path), 1, world_size=1)


@pytest.mark.long
@pytest.mark.parametrize("prefetch_batches", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROWWISE_ADAGRAD])
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_thousand_steps_are_those_of_the_whole_table(
    ranks: RankPool,
    tmp_path: Any,
    world_size: int,
    row_wise: bool,
    optimizer: EmbOptimType,
    prefetch_batches: int,
) -> None:
    case = Case(row_wise=row_wise, optimizer=optimizer, prefetch_batches=prefetch_batches)
    results = ranks.run(
        compare, case, str(tmp_path), 2000, EcoRecTrainPipeline, world_size=world_size
    )
    check(results)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def without_pins(rank: int, *arguments: Any) -> dict[str, Any]:
    slots = Lease.slots

    def slots_of_rows_that_may_leave(lease: Lease) -> Tensor:
        found = slots(lease)
        tables = [table for table, _ in lease._tickets]
        lease.release(dirty=True)
        while any(table._queue for table in tables):  # the next batch takes their slots
            time.sleep(0.001)
        return found

    with (
        replaced(Lease, "slots", slots_of_rows_that_may_leave),
        replaced(Lease, "check", lambda lease: None),
    ):
        return compare(rank, *arguments)


def without_state(rank: int, *arguments: Any) -> dict[str, Any]:
    slots = TieredKernel._slots.func

    def weights_only(kernel: TieredKernel) -> list[dict[str, Tensor]]:
        return [
            {name: tensor if name == "weight" else tensor.clone() for name, tensor in table.items()}
            for table in slots(kernel)
        ]

    with replaced(TieredKernel, "_slots", property(weights_only)):
        return compare(rank, *arguments)


@pytest.mark.parametrize("fault", [without_pins, without_state])
def test_comparison_sees_rows_that_leave_early_or_without_their_state(
    ranks: RankPool, tmp_path: Any, fault: Callable[..., dict[str, Any]]
) -> None:
    case = Case(prefetch_batches=1, cache_rows=64)  # little more than one batch
    (result,) = ranks.run(fault, case, str(tmp_path), 60, EcoRecTrainPipeline, world_size=1)
    assert result["wrong steps"] and result["differences"]
