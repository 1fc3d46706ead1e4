"""Dist groups, and the pipeline, differ in what overlaps only: not in one bit of what is learnt."""

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.modules.embedding_configs import PoolingType

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.testing import RankPool, toy

STEPS = 2
# Row-wise dense tables need equal batches under gloo.
UNEVEN = tuple(name for name in toy.SEQUENCE_NAMES if name != "d_rw")
# Name of a case: sequence, tables, batch size of each rank, quantized communication.
CASES = {
    "pooled": (False, tuple(toy.ROWS), (6, 6), False),
    "pooled_uneven": (False, UNEVEN, (5, 0), False),
    "pooled_weighted": (False, tuple(toy.ROWS), (6, 6), False),
    "pooled_mean": (False, tuple(toy.ROWS), (6, 6), False),
    "pooled_quantized": (False, UNEVEN, (6, 6), True),
    "sequence": (True, toy.SEQUENCE_NAMES, (6, 6), False),
    "sequence_uneven": (True, UNEVEN, (2, 5), False),
    "sequence_without_examples": (True, UNEVEN, (0, 5), False),
}


def learnt(
    rank: int, case: str, num_dist_groups: int, pipelined: bool
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The state after a few steps, and the logits of each."""
    _, names, batch_sizes, quantized = CASES[case]
    codecs = None
    if quantized:
        comms = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.FP16)
        codecs = get_qcomm_codecs_registry(comms, device=torch.device("cpu"))
    model = toy.shard(
        unsharded(case, "meta"),
        toy.generators(names, 2),
        num_dist_groups=num_dist_groups,
        qcomm_codecs_registry=codecs,
    )
    model.load_state_dict(initial_state(case))
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    batches = [
        toy.make_batch(names, step, rank, batch_sizes[rank], is_weighted=case == "pooled_weighted")
        for step in range(STEPS)
    ]
    logits = []
    if pipelined:
        pipeline = EcoRecTrainPipeline(model, optimizer, torch.device("cpu"))
        iterator = iter(batches)
        logits = [pipeline.progress(iterator) for _ in batches]
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss, output = model(batch)
            loss.sum().backward()
            optimizer.step()
            logits.append(output)
    return toy.whole_state(model), logits


def unsharded(case: str, device: str) -> toy.ToyModel:
    sequence, names, *_ = CASES[case]
    if sequence:
        return toy.sequence_model(names, device)
    tables = toy.configs(names, PoolingType.MEAN if case == "pooled_mean" else PoolingType.SUM)
    ebc = toy.collection(tables, is_weighted=case == "pooled_weighted", device=device)
    return toy.ToyModel(ebc, tables)


def initial_state(case: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(unsharded(case, "cpu").state_dict())


def same_bits(rank: int, case: str, num_dist_groups: list[int]) -> list[str]:
    """What differs from one group without a pipeline: names of parameters, or "logits"."""
    state, logits = learnt(rank, case, 1, pipelined=False)
    found = []
    for groups, pipelined in [(g, True) for g in num_dist_groups] + [(num_dist_groups[-1], False)]:
        other_state, other_logits = learnt(rank, case, groups, pipelined)
        label = f"{groups} groups, {'pipelined' if pipelined else 'plain'}: "
        assert sorted(state) == sorted(other_state)
        found += [label + n for n in state if not torch.equal(state[n], other_state[n])]
        if not all(map(torch.equal, logits, other_logits)):
            found.append(label + "logits")
    assert not torch.equal(state["linear.weight"], initial_state(case)["linear.weight"])
    return found


@pytest.mark.parametrize("case", CASES)
def test_groups_and_pipeline_change_no_bit(ranks: RankPool, case: str) -> None:
    """8 groups are more than any rank has tables; groups beyond the last table stay away."""
    groups = [1, 2, 3, 5, 8] if case in ("pooled", "sequence") else [3]
    assert ranks.run(same_bits, case, groups) == [[], []]
