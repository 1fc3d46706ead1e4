"""Checkpoints of tiered tables, and what becomes of rows that are let go at odd moments."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from ecorec_torchrec import EcoRecTrainPipeline, load_tiers, save_tiers
from ecorec_torchrec.sharding import tier_statistics
from ecorec_torchrec.testing import RankPool, tiered, toy
from ecorec_torchrec.testing.tiered import Case

CPU = torch.device("cpu")
STEPS = 30


def batches(case: Case, first: int, last: int, rank: int, world_size: int) -> list[toy.ToyBatch]:
    """The same 12 examples per step on every number of ranks."""
    if world_size == 2:
        return [half(case.batch(step, 0), rank) for step in range(first, last)]
    return [case.batch(step, 0) for step in range(first, last)]


def half(batch: toy.ToyBatch, rank: int) -> toy.ToyBatch:
    """This rank's examples of a batch for both."""
    size = len(batch.labels) // 2
    mine = slice(rank * size, (rank + 1) * size)
    lengths = batch.features.lengths().view(-1, 2 * size)
    values = [
        feature.values()[feature.offsets()[mine.start] : feature.offsets()[mine.stop]]
        for feature in batch.features.to_dict().values()
    ]
    features = type(batch.features)(
        batch.features.keys(), torch.cat(values), lengths=lengths[:, mine].flatten()
    )
    return toy.ToyBatch(features, batch.labels[mine])


def whole_rows(model: torch.nn.Module) -> dict[str, dict[str, Tensor]]:
    """The tables, put together on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    own = {
        (name, table.name): tiered.rows_of(table)
        for name, table in tiered.tiered_tables(model).items()
    }
    dist.all_gather_object(gathered, own)
    parts: dict[str, list[dict[str, Tensor]]] = {}
    for of_rank in gathered:
        for (name, _), rows in of_rank.items():
            parts.setdefault(name, []).append(rows)
    return {
        name: {column: torch.cat([rows[column] for rows in found]) for column in found[0]}
        for name, found in parts.items()
    }


def equal(first: dict[str, dict[str, Tensor]], second: dict[str, dict[str, Tensor]]) -> bool:
    assert first.keys() == second.keys()
    return all(
        torch.equal(first[name][column], second[name][column])
        for name in first
        for column in first[name]
    )


def save(rank: int, case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    """Trains, saves, trains on; the rows at the end of the straight run."""
    model, optimizer = case.shard(f"{folder}/straight")
    world_size = dist.get_world_size()
    pipeline = EcoRecTrainPipeline(model, optimizer, CPU)
    list(tiered.train_in_pipeline(pipeline, batches(case, 0, STEPS, rank, world_size)))
    save_tiers(model, f"{folder}/checkpoint/tiers")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    list(tiered.train_in_pipeline(pipeline, batches(case, STEPS, 2 * STEPS, rank, world_size)))
    return whole_rows(model)


def resume(rank: int, case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(99)  # rows that were never touched come from the seed of the checkpoint
    model, optimizer = case.shard(f"{folder}/resumed")
    # What was trained before a checkpoint is loaded leaves no trace.
    list(tiered.train(model, optimizer, [case.batch(70, rank), case.batch(71, rank)]))
    load_tiers(model, f"{folder}/checkpoint/tiers")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    world_size = dist.get_world_size()
    pipeline = EcoRecTrainPipeline(model, optimizer, CPU)
    list(tiered.train_in_pipeline(pipeline, batches(case, STEPS, 2 * STEPS, rank, world_size)))
    return whole_rows(model)


@pytest.mark.parametrize(
    ("case", "resumed"),
    [
        (Case(prefetch_batches=1), Case(prefetch_batches=2)),
        (Case(), Case(owners=(("users", 0), ("ads", 1)))),
        (Case(row_wise=True, memory_rows=50), Case(row_wise=True, cache_rows=300)),
        (Case(sequence=True), Case(sequence=True)),
    ],
)
def test_a_resumed_run_is_the_straight_one(
    ranks: RankPool, tmp_path: Path, case: Case, resumed: Case
) -> None:
    """Whatever was in the cache, and wherever the rows lie now: use counts start anew, which
    changes what is evicted and no number."""
    straight = ranks.run(save, case, str(tmp_path), world_size=2)
    again = ranks.run(resume, resumed, str(tmp_path), world_size=2)
    assert equal(straight[0], again[0])


@pytest.mark.parametrize("row_wise", [False, True])
def test_a_checkpoint_loads_however_its_tables_are_cut(
    ranks: RankPool, tmp_path: Path, row_wise: bool
) -> None:
    case = Case(row_wise=row_wise)
    ranks.run(save, case, str(tmp_path), world_size=2)
    expected = ranks.run(rows_of_checkpoint, case, str(tmp_path), world_size=2)
    for world_size, other in ((1, Case()), (2, Case(row_wise=not row_wise)), (3, Case())):
        found = ranks.run(rows_of_checkpoint, other, str(tmp_path), world_size=world_size)
        assert equal(expected[0], found[0])


def rows_of_checkpoint(rank: int, case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    model, _ = case.shard(f"{folder}/{dist.get_world_size()}-{case.row_wise}")
    load_tiers(model, f"{folder}/checkpoint/tiers")
    return whole_rows(model)


def start_values(rank: int, case: Case, folder: str) -> dict[str, dict[str, Tensor]]:
    return whole_rows(case.shard(folder)[0])


def test_start_values_do_not_depend_on_how_tables_are_cut(ranks: RankPool, tmp_path: Path) -> None:
    whole, cut = (
        ranks.run(start_values, case, str(tmp_path / name), world_size=2)[0]
        for name, case in (("whole", Case()), ("cut", Case(row_wise=True)))
    )
    alone = ranks.run(start_values, Case(), str(tmp_path / "alone"), world_size=1)[0]
    assert equal(whole, cut) and equal(whole, alone)
    bound = tiered.ROWS["users"] ** -0.5  # TorchRec's, where the config gives no bounds
    assert whole["users"]["weight"].abs().max() <= bound
    assert whole["users"]["weight"].std() == pytest.approx(bound / 3**0.5, rel=0.02)


def lone_state_dicts(rank: int, folder: str) -> None:
    case = Case()
    model, optimizer = case.shard(f"{folder}/a")
    list(tiered.train(model, optimizer, batches(case, 0, 3, rank, 1)))
    state = model.state_dict()  # without save_tiers
    other, _ = case.shard(f"{folder}/b")
    with pytest.raises(ValueError, match="'users'.*save_tiers.*load_tiers"):
        other.load_state_dict(state)
    save_tiers(model, f"{folder}/saved")
    with pytest.raises(ValueError, match="'users'.*load_tiers"):
        other.load_state_dict(model.state_dict())
    load_tiers(other, f"{folder}/saved")
    other.load_state_dict(model.state_dict())
    list(tiered.train(model, optimizer, batches(case, 3, 4, rank, 1)))
    with pytest.raises(ValueError, match="'users'"):
        other.load_state_dict(model.state_dict())


def test_a_state_dict_is_not_loaded_without_its_rows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(lone_state_dicts, str(tmp_path), world_size=1)


def damaged(rank: int, folder: str) -> None:
    case = Case()
    model, optimizer = case.shard(f"{folder}/a")
    list(tiered.train(model, optimizer, batches(case, 0, 3, rank, 1)))
    saved = Path(folder) / "saved"
    save_tiers(model, saved)
    before = whole_rows(model)
    with pytest.raises(ValueError, match="no rows of tiered tables.*tiers.json is missing"):
        load_tiers(model, f"{folder}/nowhere")
    (users,) = saved.glob("*users*.tier")
    users.rename(saved / "aside")
    with pytest.raises(ValueError, match="no checkpoint at .*users"):
        load_tiers(model, saved)
    content = bytearray((saved / "aside").read_bytes())
    content[-5] ^= 1
    users.write_bytes(content)
    with pytest.raises(ValueError, match="users.* is damaged: block"):
        load_tiers(model, saved)
    assert equal(before, whole_rows(model))


def test_missing_and_damaged_rows_are_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(damaged, str(tmp_path), world_size=1)


def in_flight(model: torch.nn.Module) -> int:
    gc.collect()
    return sum(len(table._in_flight) for table in tiered.tiered_tables(model).values())


def lookups_without_backward(rank: int, folder: str) -> None:
    case = Case(cache_rows=100)
    model, optimizer = case.shard(f"{folder}/a")
    for step in range(50):  # far more rows than slots
        loss, _ = model(case.batch(step, rank))
    with torch.no_grad():
        for step in range(50):
            model(case.batch(step, rank))
    assert in_flight(model) <= 4  # of two tables and the last two graphs
    del loss
    list(tiered.train(model, optimizer, batches(case, 0, 20, rank, 1)))
    assert in_flight(model) == 0


def test_lookups_without_a_backward_pass_keep_no_rows(ranks: RankPool, tmp_path: Path) -> None:
    """A prefetch whose backward pass never came leaked memory and locked cache lines for good."""
    ranks.run(lookups_without_backward, str(tmp_path), world_size=1)


def backward_twice(rank: int, folder: str) -> None:
    case = Case()
    model, _ = case.shard(f"{folder}/a")
    loss, _ = model(case.batch(0, rank))
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="let go.*go backward once"):
        loss.sum().backward()


def test_a_second_backward_pass_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(backward_twice, str(tmp_path), world_size=1)


def evaluations_between(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Trains both twins, with evaluations of both between any two steps."""
    model, optimizer = case.shard(folder)
    twin, twin_optimizer = case.shard()
    tiered.copy_start(model, twin)
    training = [case.batch(step, rank) for step in range(30)]
    pipeline = EcoRecTrainPipeline(model, optimizer, CPU)
    outputs = tiered.train_in_pipeline(pipeline, training)
    expected = tiered.train(twin, twin_optimizer, training)
    moved: set[tuple[int, ...]] = set()
    for step, (own, other) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(own, other)
        if step % 5:
            continue
        tier_statistics(model)
        model.eval(), twin.eval()
        with torch.no_grad():
            evaluation = [case.batch(1000 + step + i, rank) for i in range(3)]
            evaluated = list(tiered.train_in_pipeline(pipeline, evaluation))
            for own_logits, batch in zip(evaluated, evaluation, strict=True):
                assert torch.equal(own_logits, twin(batch)[1])
        model.train(), twin.train()
        counts = tier_statistics(model).values()
        moved.update((c["batches"], c["file_rows_written"]) for c in counts)
    return {"moved": moved, "differences": tiered.differences(model, twin)}


@pytest.mark.parametrize("case", [Case(prefetch_batches=2), Case(row_wise=True, sequence=True)])
def test_evaluation_leaves_the_slots_as_they_are(
    ranks: RankPool, tmp_path: Path, case: Case
) -> None:
    for result in ranks.run(evaluations_between, case, str(tmp_path), world_size=2):
        assert result == {"moved": {(0, 0)}, "differences": []}


def too_few_slots(rank: int, folder: str) -> None:
    case = Case(cache_rows=8)
    model, _ = case.shard(folder)
    with pytest.raises(ValueError, match=r"users.*unique rows does not fit into cache_rows=8"):
        model(case.batch(0, rank))


def test_a_batch_that_needs_more_slots_is_refused_with_the_numbers(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(too_few_slots, str(tmp_path), world_size=1)


def reset_with_rows_on_their_way(rank: int, folder: str) -> None:
    case = Case(prefetch_batches=3)
    model, optimizer = case.shard(folder)
    pipeline = EcoRecTrainPipeline(model, optimizer, CPU)
    steps: Iterator[toy.ToyBatch] = (case.batch(step, rank) for step in range(100))
    for _ in range(5):
        pipeline.progress(steps)
    assert in_flight(model) > 0
    pipeline.reset()
    assert in_flight(model) == 0
    list(tiered.train(model, optimizer, [case.batch(200, rank)]))


def test_a_pipeline_that_is_reset_lets_its_rows_go(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(reset_with_rows_on_their_way, str(tmp_path), world_size=2)


def learning_rate_follows(rank: int, folder: str) -> None:
    case = Case(optimizer=EmbOptimType.EXACT_SGD)
    model, optimizer = case.shard(folder)
    before = whole_rows(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    list(tiered.train(model, optimizer, [case.batch(0, rank)]))
    assert equal(before, whole_rows(model))


def test_a_schedule_reaches_the_slots(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(learning_rate_follows, str(tmp_path), world_size=1)
