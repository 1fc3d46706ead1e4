"""Streams and events of the pipeline, on one GPU: a part of `make gpu-check`."""

import random
from collections.abc import Iterator

import pytest
import torch

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.testing import toy
from ecorec_torchrec.train.launch import process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and events need a GPU"),
]

NAMES = ("t_tw", "t_tw2", "t_q")
OWNERS = dict.fromkeys(NAMES, 0)
STEPS = 500


@pytest.fixture
def device() -> Iterator[torch.device]:
    with process_group("cuda") as device:
        yield device


def build(device: torch.device) -> EcoRecTrainPipeline:
    torch.manual_seed(0)
    tables = toy.configs(NAMES)
    model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
    sharded = toy.shard(
        model, toy.generators(NAMES, 1, OWNERS), num_dist_groups=3, device=str(device)
    )
    optimizer = toy.optimizer_of(sharded, lambda params: torch.optim.SGD(params, lr=1e-4))
    return EcoRecTrainPipeline(sharded, optimizer, device, times_steps=True)


def batches(steps: int) -> list[toy.ToyBatch]:
    sizes = random.Random(0)
    return [toy.make_batch(NAMES, step, 0, sizes.randint(1, 2000)) for step in range(steps)]


def overwrite_free_memory(device: torch.device, sizes: random.Random) -> None:
    """What has been freed too early, for another stream, is not a number from here on."""
    for _ in range(8):
        torch.full((sizes.randint(1, 1 << 18),), float("nan"), device=device)


def test_pipelined_steps_under_memory_pressure_equal_plain_ones(device: torch.device) -> None:
    """Memory that one stream still reads and another gets: NaN, or numbers that drift apart."""
    pipeline, plain = build(device), build(device)
    sizes, iterator = random.Random(1), iter(batches(STEPS))
    for batch in batches(STEPS):
        found = pipeline.progress(iterator)
        overwrite_free_memory(device, sizes)
        plain._optimizer.zero_grad()
        loss, expected = plain._model(batch.to(device))
        loss.sum().backward()
        plain._optimizer.step()
        assert torch.equal(found, expected)
        overwrite_free_memory(device, sizes)
    assert torch.isfinite(found).all()


def test_times_of_a_step_come_from_events(device: torch.device) -> None:
    """They add up, and say what the host's clock says of many steps."""
    pipeline, iterator = build(device), iter(batches(60))
    for _ in range(10):
        pipeline.progress(iterator)
    pipeline.step_times.take()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(40):
        pipeline.progress(iterator)
    end.record()
    end.synchronize()
    times = pipeline.step_times.take()
    parts = [times[f"{part}_ms"] for part in ("lookup", "exposed_comm", "wait", "dense")]
    assert all(part >= 0 for part in parts) and times["lookup_ms"] > 0
    assert sum(parts) == pytest.approx(times["step_ms"])
    assert 0.5 * start.elapsed_time(end) / 40 < times["step_ms"] <= start.elapsed_time(end) / 40
