"""What overlaps with what, shown by cause and effect rather than by the clock.

Rank 1 holds back a collective until something has begun on rank 0. If that something needed the
collective, both would wait for each other, and the hold would time out.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.testing import RankPool, toy

# One table of every group on each of two ranks.
OWNERS = {"t_tw": 1, "t_tw2": 1, "t_dp2": 1, "t_q": 0, "t_dp": 0, "d_tw": 0}
NUM_GROUPS = 3
CALLERS = {
    "KJTAllToAllTensorsAwaitable.__init__": "ids",
    "DefaultAll2AllSingle.__call__": "output",
    "All2All_Pooled_Wait.backward": "gradient",
    "All2All_Seq_Req.forward": "output",
    "All2All_Seq_Req_Wait.backward": "gradient",
}
CALLS_PER_GROUP = {"ids": 2, "output": 1, "gradient": 1}  # ids come with their lengths
HOLDS = {
    # Of every group, until the one before it is looked up.
    **{f"ids {g}": f"lookup {g - 1}" for g in range(1, NUM_GROUPS)},
    # Of every group, until the next one is looked up, or (backward) is about to be.
    **{f"output {g}": f"lookup {g + 1}" for g in range(NUM_GROUPS - 1)},
    **{f"gradient {g}": f"lookup backward {g + 1}" for g in range(NUM_GROUPS - 1)},
}


@contextmanager
def held_back(release: Callable[[str], bool]) -> Iterator[dict[str, bool]]:
    """Holds this rank's collectives of `HOLDS` back; tells of each whether it was let go in time.

    Gradients are sent in the reverse order of the groups.
    """
    original, counts, in_time = dist.all_to_all_single, Counter(), {}

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        kind = CALLERS.get(sys._getframe(1).f_code.co_qualname)
        if kind is not None:
            group, later_call = divmod(counts[kind], CALLS_PER_GROUP[kind])
            counts[kind] += 1
            name = f"{kind} {NUM_GROUPS - 1 - group if kind == 'gradient' else group}"
            if name in HOLDS and not later_call:
                in_time[name] = release(HOLDS[name])
        return original(*args, **kwargs)

    dist.all_to_all_single = all_to_all_single
    try:
        yield in_time
    finally:
        dist.all_to_all_single = original


def watch(model: torch.nn.Module, report: Callable[[str], None]) -> None:
    """Calls `report` when the lookup of a group begins, forward and backward."""

    def report_backward(group: int, embeddings: torch.Tensor) -> None:
        embeddings.register_hook(lambda _: report(f"lookup backward {group}"))

    for group, lookup in enumerate((model.ebc or model.ec)._lookups):
        lookup.register_forward_pre_hook(lambda *_, g=group: report(f"lookup {g}"))
        lookup.register_forward_hook(lambda _m, _i, out, g=group: report_backward(g, out))


def train(rank: int, sequence: bool, pipeline: type | None, patience_s: float) -> dict[str, bool]:
    """One step under watch, after a first one in which TorchRec sets up its dists."""
    names = tuple(OWNERS)
    if sequence:
        model = toy.sequence_model(names, "meta")
    else:
        tables = toy.configs(names)
        model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
    model = toy.shard(model, toy.generators(names, 2, OWNERS), num_dist_groups=NUM_GROUPS)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    pipe = pipeline and pipeline(model, optimizer, torch.device("cpu"))

    def step(number: int) -> None:
        batches = [toy.make_batch(names, number, rank)]
        if pipe is None:
            toy.train_sharded(model, optimizer, batches)
        else:
            pipe.progress(iter(batches))

    step(0)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        watch(model.module, lambda event: store.set(event, ""))
        step(1)
        return {}

    def release(event: str) -> bool:
        try:
            store.wait([event], timedelta(seconds=patience_s))
        except RuntimeError:  # timed out
            return False
        return True

    with held_back(release) as in_time:
        step(1)
    return in_time


@pytest.mark.parametrize("pipeline", [None, EcoRecTrainPipeline], ids=["plain", "pipeline"])
@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_communication_of_a_group_overlaps_the_lookup_of_another(
    ranks: RankPool, sequence: bool, pipeline: type | None
) -> None:
    """Ids: a group is looked up before the next one's came. Output and gradients: while they go."""
    in_time = ranks.run(train, sequence, pipeline, 40.0)[1]
    assert in_time == dict.fromkeys(HOLDS, True)


def test_the_trace_can_fail(ranks: RankPool) -> None:
    """TorchRec's own pipeline waits for the ids of all groups before the first lookup."""
    in_time = ranks.run(train, False, TrainPipelineSparseDist, 0.5)[1]
    assert not any(in_time[name] for name in HOLDS if name.startswith("ids"))
