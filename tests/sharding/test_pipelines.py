"""TorchRec's train pipelines, each over several epochs with one pipeline object.

The model has a pooled and a sequence collection, each with dense and TT tables.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.distributed.train_pipeline.experimental_pipelines import TrainPipelineSparseDistT

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.lookup import FusedTTKernel
from ecorec_torchrec.testing import RankPool, toy

PIPELINES = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "lite": train_pipelines.TrainPipelineSparseDistLite,
    "t": TrainPipelineSparseDistT,
    "ecorec": EcoRecTrainPipeline,
}
EPOCHS, BATCHES = 3, 4
NAMES = tuple(toy.ROWS)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def run(rank: int, name: str, num_dist_groups: int, init: dict) -> tuple[dict, list[int], int]:
    """Without the list form of all-to-all, which gloo has in newer torch only."""
    with mock.patch.object(dist, "all_to_all", side_effect=RuntimeError("gloo has no alltoall")):
        return train(rank, name, num_dist_groups, init)


def train(rank: int, name: str, num_dist_groups: int, init: dict) -> tuple[dict, list[int], int]:
    model = toy.shard(
        toy.model_of_both(NAMES, "meta"),
        toy.generators(NAMES, 2),
        num_dist_groups=num_dist_groups,
    )
    model.load_state_dict(copy.copy(init))
    optimizer = toy.optimizer_of(model, sgd)
    fused_steps: list[int] = []
    for collection in (model.module.ebc, model.module.ec):
        for kernel in collection._kernels(FusedTTKernel):
            kernel.fused_optimizer._optimizer.register_step_post_hook(
                lambda *_, group=kernel: fused_steps.append(id(group))
            )
    pipeline = PIPELINES[name](model, optimizer, torch.device("cpu"))
    outputs_per_epoch = []
    for _ in range(EPOCHS):
        batches = iter([toy.make_batch(NAMES, step, rank) for step in range(BATCHES)])
        outputs = 0
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
            outputs += 1
        outputs_per_epoch.append(outputs)
        if name == "base":  # the only one that must be told of a new epoch
            pipeline.reset()
    steps = {fused_steps.count(group) for group in fused_steps}
    assert len(steps) <= 1
    return toy.whole_state(model), outputs_per_epoch, steps.pop() if steps else 0


@pytest.mark.parametrize("num_dist_groups", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_equal_one_process(ranks: RankPool, name: str, num_dist_groups: int) -> None:
    """n batches per epoch give n outputs and n steps, in the first epoch and in later ones."""
    model = toy.model_of_both(NAMES)
    init = copy.deepcopy(model.state_dict())
    steps = [step for _ in range(EPOCHS) for step in range(BATCHES)]
    toy.train_unsharded(
        model, sgd, [[toy.make_batch(NAMES, step, r) for r in range(2)] for step in steps]
    )
    found = ranks.run(run, name, num_dist_groups, init)
    for _, outputs_per_epoch, fused_steps in found:
        assert outputs_per_epoch == [BATCHES] * EPOCHS
        assert fused_steps == EPOCHS * BATCHES
    truth = model.state_dict()
    state = found[0][0]
    assert max(float((state[key] - truth[key]).abs().max()) for key in truth) < 1e-5
