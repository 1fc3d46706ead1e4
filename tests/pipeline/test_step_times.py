"""Where the time of a step goes: the parts are there, and slow parts show in their own column."""

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.testing import RankPool, toy

NAMES = ("t_tw", "t_tw2", "t_q", "t_dp", "d_tw")
PARTS = ("lookup_ms", "exposed_comm_ms", "wait_ms", "dense_ms")
STEPS = 4
SLOW_MS = 100.0


def build(sequence: bool, times_steps: bool = True) -> EcoRecTrainPipeline:
    torch.manual_seed(0)
    tables = toy.configs(NAMES)
    model = (
        toy.sequence_model(NAMES, "meta")
        if sequence
        else toy.ToyModel(toy.collection(tables, device="meta"), tables)
    )
    sharded = toy.shard(model, toy.generators(NAMES, dist.get_world_size()), num_dist_groups=2)
    optimizer = toy.optimizer_of(sharded, lambda params: torch.optim.SGD(params, lr=0.05))
    return EcoRecTrainPipeline(sharded, optimizer, torch.device("cpu"), times_steps=times_steps)


class Slowed:
    """A pipeline and its batches, one part of whose steps takes `SLOW_MS` longer, twice."""

    def __init__(self, rank: int, sequence: bool) -> None:
        self.part = ""
        self.pipeline = build(sequence)
        model = self.pipeline._model.module
        collection = model.ec if sequence else model.ebc
        kernel = next(iter(collection._lookups[0].children()))[0]
        in_lookup, in_dense = self.pause("lookup_ms"), self.pause("dense_ms")
        kernel.register_forward_pre_hook(in_lookup)
        kernel.emb_module.flat[0].register_post_accumulate_grad_hook(in_lookup)
        model.linear.register_forward_pre_hook(in_dense)
        model.linear.register_full_backward_hook(in_dense)
        if rank == 1:  # the other rank waits for this one's outputs, and for its gradients
            at_other = self.pause("exposed_comm_ms")
            collection._lookups[0].register_forward_pre_hook(at_other)
            model.linear.register_full_backward_hook(at_other)
        self.batches = self.make_batches(rank)

    def pause(self, part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if part == self.part:
                time.sleep(SLOW_MS / 1e3)

        return hook

    def make_batches(self, rank: int) -> Iterator[toy.ToyBatch]:
        wait = self.pause("wait_ms")
        for step in range(1000):
            wait()
            wait()
            yield toy.make_batch(NAMES, step, rank)


def times_by_slow_part(rank: int, sequence: bool) -> dict[str, list[dict[str, float]]]:
    slowed = Slowed(rank, sequence)
    pipeline, found = slowed.pipeline, {}
    for part in ("", *PARTS):
        slowed.part = part
        pipeline.progress(slowed.batches)  # sets up, or has waited for its batch already
        pipeline.step_times.take()
        found[part] = []
        for _ in range(STEPS):
            start = time.perf_counter()
            pipeline.progress(slowed.batches)
            elapsed_ms = (time.perf_counter() - start) * 1e3
            found[part].append(times := pipeline.step_times.take())
            assert set(times) == {*PARTS, "step_ms"}
            assert all(times[name] > 0 for name in PARTS)
            assert sum(times[name] for name in PARTS) == pytest.approx(times["step_ms"])
            assert 0.5 * elapsed_ms < times["step_ms"] <= elapsed_ms
    assert pipeline.step_times.take() == {}
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_a_slow_part_shows_in_its_own_column(ranks: RankPool, sequence: bool) -> None:
    """The parts of every step add up to it, and the clock around it says the same."""
    found = ranks.run(times_by_slow_part, sequence)[0]
    for part in PARTS:
        assert statistics.median(times[part] for times in found[part]) > 1.5 * SLOW_MS
        for other in set(PARTS) - {part}:  # a busy machine slows any of them now and then
            assert min(times[other] for times in found[part]) < SLOW_MS, (part, other)


def evaluated(rank: int) -> tuple[dict[str, float], int]:
    pipeline = build(sequence=False)
    iterator = iter([toy.make_batch(NAMES, step, rank) for step in range(4)])
    pipeline.progress(iterator)
    pipeline.step_times.take()
    pipeline._model.eval()
    with torch.no_grad():
        pipeline.progress(iterator)
    return pipeline.step_times.take(), len(pipeline.step_times._handles)


def test_evaluation_is_not_timed(ranks: RankPool) -> None:
    assert ranks.run(evaluated) == [({}, 0)] * 2


def untimed(rank: int) -> bool:
    pipeline = build(sequence=False, times_steps=False)
    pipeline.progress(iter([toy.make_batch(NAMES, 0, rank)]))
    hooks = [len(lookup._forward_hooks) for lookup in pipeline._model.module.ebc._lookups]
    return pipeline.step_times is None and not any(hooks)


def test_without_the_option_nothing_is_hooked(ranks: RankPool) -> None:
    assert all(ranks.run(untimed))
