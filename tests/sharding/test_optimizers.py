"""What optimizers do to TT tables on several ranks: when they step, on what, and by which rate."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from ecorec_torchrec.lookup import CoreSlice, GroupKeyedOptimizer
from ecorec_torchrec.testing import RankPool, toy

NAMES = ("t_tw", "t_tw2", "t_q", "t_dp", "t_dp2")
LR = 0.05
DEFERRED = toy.SGD | {"step_in_backward": False}


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def both_collections(device: str) -> toy.ToyModel:
    """The tables as bags and, equally named, as sequences."""
    tables, sequences = toy.configs(NAMES), toy.sequence_configs(NAMES)
    return toy.ToyModel(
        toy.collection(tables, device=device), tables, toy.sequence_collection(sequences, device)
    )


def start() -> tuple[toy.ToyModel, dict[str, Tensor]]:
    torch.manual_seed(4)
    model = both_collections("cpu")
    return model, copy.deepcopy(model.state_dict())


def sharded(
    init: dict[str, Tensor], fused_params: dict[str, Any]
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    plan = toy.generators(NAMES, dist.get_world_size())
    dmp = toy.shard(both_collections("meta"), plan, fused_params)
    dmp.load_state_dict(copy.copy(init))
    return dmp, toy.optimizer_of(dmp, sgd, GroupKeyedOptimizer)


def batch(step: int, rank: int) -> toy.ToyBatch:
    return toy.make_batch(NAMES, step, rank)


def mean_loss(model: toy.ToyModel, step: int) -> Tensor:
    return torch.stack([model(batch(step, rank))[0].sum() for rank in range(2)]).mean()


def assert_close(found: dict[str, Tensor], truth: nn.Module, init: dict[str, Tensor]) -> None:
    expected = truth.state_dict()
    assert max(float((found[k] - expected[k]).abs().max()) for k in expected) < 1e-5
    assert min(float((init[k] - expected[k]).abs().max()) for k in expected) > 1e-4


def accumulate(rank: int, init: dict[str, Tensor]) -> dict[str, Tensor]:
    model, optimizer = sharded(init, DEFERRED)
    for update in range(3):
        optimizer.zero_grad()
        for part in range(2):
            model(batch(2 * update + part, rank))[0].sum().backward()
        optimizer.step()
    return toy.whole_state(model)


def test_gradient_accumulation(ranks: RankPool) -> None:
    """Two backward passes, one update with the sum, for table-wise and data-parallel tables."""
    truth, init = start()
    optimizer = sgd(list(truth.parameters()))
    for update in range(3):
        optimizer.zero_grad()
        for part in range(2):
            mean_loss(truth, 2 * update + part).backward()
        optimizer.step()
    assert_close(ranks.run(accumulate, init)[0], truth, init)


def two_losses(rank: int, init: dict[str, Tensor]) -> dict[str, Tensor]:
    model, optimizer = sharded(init, toy.SGD)
    optimizer.zero_grad()
    for step in range(2):
        model(batch(step, rank))[0].sum().backward()
    return toy.whole_state(model)


def test_by_default_two_backward_passes_are_two_updates(ranks: RankPool) -> None:
    """Of table-wise tables; those of a `step()` that comes later have not moved."""
    truth, init = start()
    fused = [p for n, p in truth.named_parameters() if any(f".{t}." in n for t in NAMES[:3])]
    for step in range(2):
        truth.zero_grad()
        mean_loss(truth, step).backward()
        sgd(fused).step()
    found, expected = ranks.run(two_losses, init)[0], truth.state_dict()
    assert max(float((found[k] - expected[k]).abs().max()) for k in expected) < 1e-5
    assert not torch.equal(
        found["ebc.embedding_bags.t_q.tt_cores.0"], init["ebc.embedding_bags.t_q.tt_cores.0"]
    )


def two_forward_passes_first(rank: int, init: dict[str, Tensor]) -> list[str]:
    found = []
    for fused_params in (toy.SGD, DEFERRED):
        model, _ = sharded(init, fused_params)
        losses = [model(batch(step, rank))[0].sum() for step in range(2)]
        losses[0].backward()
        try:
            losses[1].backward()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_two_forward_passes_before_two_updates_are_refused_by_name(ranks: RankPool) -> None:
    """Gradients at cores that are no longer those of the forward pass would be wrong."""
    (message,) = ranks.run(two_forward_passes_first, start()[1], world_size=1)[0]
    assert re.search(r"the cores of TT tables \['t_.*\] have changed since the forward", message)
    assert "step_in_backward=False" in message


def pipelined(rank: int, init: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    found = []
    for fused_params in (toy.SGD, DEFERRED):
        model, optimizer = sharded(init, fused_params)
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        batches = iter([batch(step, rank) for step in range(5)])
        for _ in range(5):
            pipeline.progress(batches)
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
        found.append(toy.whole_state(model))
    return found


def test_in_a_train_pipeline_both_ways_of_stepping_are_the_same(ranks: RankPool) -> None:
    _, init = start()
    in_backward, at_step = ranks.run(pipelined, init)[0]
    assert all(torch.equal(in_backward[key], at_step[key]) for key in init)
    assert not torch.equal(at_step["linear.weight"], init["linear.weight"])


def clip(rank: int, init: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = sharded(init, DEFERRED)
    group = dist.group.WORLD
    on_one_rank = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    clipped = GradientClippingOptimizer(
        optimizer,
        GradientClipping.NORM,
        max_gradient=0.2,
        enable_global_grad_clip=True,
        param_to_pgs={core: [group] for core in on_one_rank.values()},
    )
    norms = []
    for step in range(4):
        clipped.zero_grad()
        model(batch(step, rank))[0].sum().backward()
        clipped.step()
        norms.append(float(clipped.last_total_grad_norm))
    assert all(isinstance(c, CoreSlice) or c.numel() == 0 for c in on_one_rank.values())
    return toy.whole_state(model), norms


def test_clipping_by_the_norm_over_all_ranks(ranks: RankPool) -> None:
    truth, init = start()
    optimizer = sgd(list(truth.parameters()))
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        mean_loss(truth, step).backward()
        expected.append(float(nn.utils.clip_grad_norm_(truth.parameters(), 0.2)))
        optimizer.step()
    (found, norms), (_, other_norms) = ranks.run(clip, init)
    assert norms == pytest.approx(expected, rel=1e-4) == other_norms
    assert min(expected) > 0.2
    assert_close(found, truth, init)


def warm_up(rank: int, init: dict[str, Tensor]) -> dict[str, Tensor]:
    model, optimizer = sharded(init, toy.SGD)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    toy.train_sharded(
        model, WarmupOptimizer(optimizer, stages, lr=LR), [batch(s, rank) for s in range(6)]
    )
    return toy.whole_state(model)


def test_warm_up_reaches_every_table(ranks: RankPool) -> None:
    truth, init = start()
    for step in range(6):
        rate = LR * min(1.0, 0.1 + 0.9 * step / 4)
        truth.zero_grad()
        mean_loss(truth, step).backward()
        torch.optim.SGD(truth.parameters(), lr=rate).step()
    assert_close(ranks.run(warm_up, init)[0], truth, init)


def clip_as_fbgemm(rank: int) -> list[tuple[Tensor, Tensor]]:
    """The same rows looked up in a dense table and in a TT table that stands for it."""
    names = ("t_tw", "d_tw")
    found = []
    for max_gradient in (0.01, 1e6):
        tables = toy.configs(names)
        torch.manual_seed(0)
        model = toy.shard(
            toy.ToyModel(toy.collection(tables, device="meta"), tables),
            toy.generators(names, 1),
            toy.SGD | {"gradient_clipping": True, "max_gradient": max_gradient},
        )
        pooled = model.module.ebc(toy.make_batch(names, 0, 0).features)
        before = toy.whole_state(model)
        gradient = torch.linspace(-0.03, 0.03, pooled.values().numel())
        pooled.values().backward(gradient.view_as(pooled.values()))
        after = toy.whole_state(model)
        found.append((before, after))
    return found


def test_clipping_by_value_means_what_it_means_in_fbgemm(ranks: RankPool) -> None:
    """Gradients of looked-up embeddings are clipped, before they reach cores or rows."""
    names = ("t_tw", "d_tw")
    tables = toy.configs(names)
    clipped, loose = ranks.run(clip_as_fbgemm, world_size=1)[0]
    for max_gradient, (before, after) in ((0.01, clipped), (1e6, loose)):
        truth = toy.ToyModel(toy.collection(tables), tables)
        truth.load_state_dict(before)
        pooled = truth.ebc(toy.make_batch(names, 0, 0).features).values()
        gradient = torch.linspace(-0.03, 0.03, pooled.numel()).view_as(pooled)
        pooled.backward(gradient.clamp(-max_gradient, max_gradient))
        sgd(list(truth.ebc.parameters())).step()
        for key, expected in truth.state_dict().items():
            torch.testing.assert_close(after[key], expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(
        clipped[1]["ebc.embedding_bags.d_tw.weight"], loose[1]["ebc.embedding_bags.d_tw.weight"]
    )


def broken_batch(rank: int, init: dict[str, Tensor], policy: str) -> tuple[dict, list[str]]:
    """Rank 1 has a NaN label in step 1; NaN reaches all tables that its batch looks up."""
    model, _ = sharded(init, toy.SGD | {"nonfinite_gradients": policy})
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, GroupKeyedOptimizer(rest, sgd, nonfinite_gradients=policy)]
    )
    messages = []
    for step in range(3):
        data = batch(step, rank)
        if (step, rank) == (1, 1):
            data.labels[:] = float("nan")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            toy.train_sharded(model, optimizer, [data])
        messages += [str(w.message) for w in caught if "not finite" in str(w.message)]
    return toy.whole_state(model), messages


def test_a_batch_with_nan_is_skipped(ranks: RankPool) -> None:
    """By every replica of a data-parallel table and by the owner of a table-wise one."""
    truth, init = start()
    optimizer = sgd(list(truth.parameters()))
    for step in (0, 2):
        optimizer.zero_grad()
        mean_loss(truth, step).backward()
        optimizer.step()
    (found, first), (_, second) = ranks.run(broken_batch, init, "skip")
    assert_close(found, truth, init)
    named = " ".join(first + second)
    assert all(f"{table} " in named.replace(",", " ") for table in (*NAMES, "linear.weight"))


def stop(rank: int, init: dict[str, Tensor]) -> tuple[str, bool]:
    model, optimizer = sharded(init, toy.SGD | {"nonfinite_gradients": "stop"})
    before = toy.whole_state(model)
    data = batch(0, rank)
    data.labels[:] = float("nan")
    with pytest.raises(FloatingPointError) as caught:
        toy.train_sharded(model, optimizer, [data])
    after = toy.whole_state(model)
    return str(caught.value), all(torch.equal(before[k], after[k]) for k in before)


def test_a_gradient_that_is_not_finite_stops_the_owner(ranks: RankPool) -> None:
    _, init = start()
    (first, same), (second, _) = ranks.run(stop, init)
    assert "gradient of t_q is" in first and "t_tw" in second and "t_tw2" in second
    assert same


def halve_the_rate(rank: int, init: dict[str, Tensor]) -> dict[str, Tensor]:
    model, optimizer = sharded(init, toy.SGD)
    toy.train_sharded(model, optimizer, [batch(0, rank)])
    for group in optimizer.param_groups:
        group["lr"] /= 2
    toy.train_sharded(model, optimizer, [batch(1, rank)])
    return toy.whole_state(model)


def test_a_learning_rate_changed_while_training(ranks: RankPool) -> None:
    truth, init = start()
    for step, rate in enumerate((LR, LR / 2)):
        truth.zero_grad()
        mean_loss(truth, step).backward()
        torch.optim.SGD(truth.parameters(), lr=rate).step()
    assert_close(ranks.run(halve_the_rate, init)[0], truth, init)


def scale(rank: int, init: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    model, optimizer = sharded(init, DEFERRED)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, rank))[0].sum()
        overflow = float("inf") if (step, rank) == (1, 1) else 1.0
        scaler.scale(loss * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
    return toy.whole_state(model), scaler.get_scale()


def test_ranks_agree_on_skipping_a_step_that_overflowed(ranks: RankPool) -> None:
    truth, init = start()
    optimizer = sgd(list(truth.parameters()))
    for step in (0, 2):
        optimizer.zero_grad()
        mean_loss(truth, step).backward()
        optimizer.step()
    (found, first), (_, second) = ranks.run(scale, init)
    assert first == second == 512.0
    assert_close(found, truth, init)
