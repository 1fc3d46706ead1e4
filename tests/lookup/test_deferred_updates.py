"""`step_in_backward=False`: gradients stay on the cores until the optimizer steps."""

from collections.abc import Callable

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from ecorec_torchrec.lookup import FusedTTOptimizer, GroupCores
from ecorec_torchrec.testing.toy_cores import (
    OPTIMIZERS,
    backward,
    loss,
    make_group,
    spec_of,
    twins,
)

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


def deferred(group: GroupCores, fused_params: dict) -> FusedTTOptimizer:
    return FusedTTOptimizer(group, spec_of(fused_params), step_in_backward=False)


def assert_equal(group: GroupCores, truth: list[nn.Parameter]) -> None:
    for flat, twin in zip(group.flat, truth, strict=True):
        torch.testing.assert_close(flat, twin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_update_with_the_gradient_of_several_backward_passes(name: str) -> None:
    fused_params, make_optimizer = OPTIMIZERS[name]
    group = make_group()
    truth = twins(group)
    fused, optimizer = deferred(group, fused_params), make_optimizer(truth)
    for update in range(4):
        before = [flat.detach().clone() for flat in group.flat]
        fused.zero_grad()
        optimizer.zero_grad()
        for part in range(3):
            backward(group.flat, 10 * update + part)
            backward(truth, 10 * update + part)
        assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))
        fused.step()
        optimizer.step()
    assert_equal(group, truth)


def test_dropped_gradients_are_not_used() -> None:
    group = make_group()
    truth = twins(group)
    fused, optimizer = deferred(group, SGD), torch.optim.SGD(truth, lr=0.1)
    backward(group.flat, 0)
    fused.zero_grad(set_to_none=False)
    assert all(core.grad is None for core in group.named_slices().values())
    backward(group.flat, 1)
    backward(truth, 1)
    fused.step()
    optimizer.step()
    assert_equal(group, truth)


def test_without_gradients_a_step_changes_nothing() -> None:
    group = make_group()
    truth = twins(group)
    fused = deferred(group, OPTIMIZERS["adamw"][0])
    fused.step()
    assert_equal(group, truth)
    assert {float(state["step"]) for state in fused.state_dict()["state"].values()} == {0.0}


def test_both_ways_of_stepping_give_the_same_bits_with_16_bit_cores() -> None:
    groups = make_group(torch.bfloat16), make_group(torch.bfloat16)
    FusedTTOptimizer(groups[0], spec_of(OPTIMIZERS["adam"][0]))
    fused = deferred(groups[1], OPTIMIZERS["adam"][0])
    for step in range(5):
        backward(groups[0].flat, step)
        fused.zero_grad()
        backward(groups[1].flat, step)
        fused.step()
    assert all(torch.equal(a, b) for a, b in zip(groups[0].flat, groups[1].flat, strict=True))


CLIPPINGS: dict[GradientClipping, Callable] = {
    GradientClipping.NORM: torch.nn.utils.clip_grad_norm_,
    GradientClipping.VALUE: torch.nn.utils.clip_grad_value_,
}


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.value)
def test_clipping_by_torchrec_equals_torch(clipping: GradientClipping) -> None:
    group = make_group()
    truth = twins(group)
    fused = GradientClippingOptimizer(
        CombinedOptimizer([deferred(group, SGD)]), clipping, max_gradient=0.5
    )
    optimizer = torch.optim.SGD(truth, lr=0.1)
    for step in range(3):
        fused.zero_grad()
        optimizer.zero_grad()
        backward(group.flat, step)
        backward(truth, step)
        fused.step()
        CLIPPINGS[clipping](truth, 0.5)
        optimizer.step()
    assert_equal(group, truth)
    moved = max(
        float((a - b).detach().abs().max()) for a, b in zip(truth, make_group().flat, strict=True)
    )
    assert moved < 3 * 0.1 * 0.5 + 1e-5  # without clipping they move by more than that


def test_clipping_has_no_effect_on_what_is_stepped_in_backward() -> None:
    group, plain = make_group(), make_group()
    clipped = GradientClippingOptimizer(
        FusedTTOptimizer(group, spec_of(SGD)), GradientClipping.NORM, max_gradient=1e-3
    )
    FusedTTOptimizer(plain, spec_of(SGD))
    backward(group.flat, 0)
    backward(plain.flat, 0)
    clipped.step()
    assert all(torch.equal(a, b) for a, b in zip(group.flat, plain.flat, strict=True))


def test_loss_scaling() -> None:
    """Scaled up before backward, down before the step; an overflow skips the step."""
    group = make_group()
    truth = twins(group)
    fused = CombinedOptimizer([deferred(group, SGD)])
    optimizer = torch.optim.SGD(truth, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        fused.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale(loss(group.flat, step) * factor).backward()
        scaler.step(fused)
        scaler.update()
        if step != 1:
            optimizer.zero_grad()
            backward(truth, step)
            optimizer.step()
    assert scaler.get_scale() == 512.0
    assert_equal(group, truth)


def warm(optimizer: KeyedOptimizer) -> WarmupOptimizer:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.25)]
    return WarmupOptimizer(optimizer, stages, lr=0.1)


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_warm_up(step_in_backward: bool) -> None:
    """The rate of update i is lr * (1/4 + 3/4 * i / 4), in backward as at `step()`."""
    group = make_group()
    truth = twins(group)
    fused = warm(FusedTTOptimizer(group, spec_of(SGD), step_in_backward=step_in_backward))
    for step in range(6):
        fused.zero_grad()
        backward(group.flat, step)
        fused.step()
        optimizer = torch.optim.SGD(truth, lr=0.1 * min(1.0, 0.25 + 0.75 * step / 4))
        optimizer.zero_grad()
        backward(truth, step)
        optimizer.step()
    assert_equal(group, truth)


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_schedulers_of_torch(step_in_backward: bool) -> None:
    group = make_group()
    truth = twins(group)
    fused = CombinedOptimizer(
        [FusedTTOptimizer(group, spec_of(SGD), step_in_backward=step_in_backward)]
    )
    optimizer = torch.optim.SGD(truth, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (fused, optimizer)]
    for step in range(4):
        fused.zero_grad()
        backward(group.flat, step)
        fused.step()
        optimizer.zero_grad()
        backward(truth, step)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(group, truth)
    assert fused.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
