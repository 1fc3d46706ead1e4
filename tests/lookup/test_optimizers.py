"""Optimizers of TT cores: they are the library's, on a group's leaves at once."""

import copy
import warnings

import pytest
import torch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from ecorec_torchrec.lookup import FusedTTOptimizer, GroupKeyedOptimizer, OptimizerSpec
from ecorec_torchrec.testing.toy_cores import (
    BATCH,
    OPTIMIZERS,
    backward,
    make_group,
    spec_of,
    twins,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_step_equals_the_library_optimizer(name: str) -> None:
    """Adam too, which other systems were found to do otherwise; both kinds of weight decay."""
    fused_params, make_optimizer = OPTIMIZERS[name]
    group = make_group()
    truth = twins(group)
    FusedTTOptimizer(group, spec_of(fused_params))
    optimizer = make_optimizer(truth)
    for step in range(10):
        backward(group.flat, step)
        backward(truth, step)
        optimizer.step()
        optimizer.zero_grad()
    for flat, twin in zip(group.flat, truth, strict=True):
        torch.testing.assert_close(flat, twin, rtol=1e-6, atol=1e-7)
        assert flat.grad is None


def test_one_step_per_backward_pass_however_many_cores() -> None:
    group = make_group()
    fused = FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.ADAM}))
    steps = []
    fused._optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(3):
        backward(group.flat, step)
    assert len(steps) == 3


def test_two_backward_passes_are_two_updates() -> None:
    """Of two losses in one step: unlike gradients that are summed, see `step_in_backward`."""
    group = make_group()
    truth = twins(group)
    FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.EXACT_SGD}))
    optimizer = torch.optim.SGD(truth, lr=0.01)
    for step in range(2):
        backward(group.flat, step)
        backward(truth, step)
        optimizer.step()
        optimizer.zero_grad()
    summed = twins(make_group())
    for step in range(2):
        backward(summed, step)
    torch.optim.SGD(summed, lr=0.01).step()
    for flat, twin, other in zip(group.flat, truth, summed, strict=True):
        torch.testing.assert_close(flat, twin)
        assert not torch.allclose(flat, other)


def test_what_a_broken_backward_pass_left_is_dropped() -> None:
    group, clean = make_group(), make_group()
    fused = FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.EXACT_SGD}))
    FusedTTOptimizer(clean, spec_of({"optimizer": EmbOptimType.EXACT_SGD}))
    backward(group.flat[:2], 0)  # as if it had stopped before the last core
    fused.zero_grad()
    backward(group.flat, 1)
    backward(clean.flat, 1)
    assert all(torch.equal(a, b) for a, b in zip(group.flat, clean.flat, strict=True))


def test_learning_rate_of_param_groups_takes_effect() -> None:
    group = make_group()
    before = [flat.detach().clone() for flat in group.flat]
    fused = FusedTTOptimizer(
        group, spec_of({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
    )
    assert fused.param_groups[0]["lr"] == 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(fused, step_size=1, gamma=0.0)
    fused.step()
    scheduler.step()
    backward(group.flat, 0)
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))


def test_dense_optimizers_leave_fused_cores_alone() -> None:
    group = make_group()
    FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.EXACT_SGD}))
    parameters = [*group.flat, *group.named_slices().values()]
    assert all(hasattr(p, "_in_backward_optimizers") for p in parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_per_table_and_round_trips(name: str) -> None:
    """Where the state of a fused optimizer is and how to move it: one entry per core, by name."""
    group, twin = make_group(), make_group()
    fused = FusedTTOptimizer(group, spec_of(OPTIMIZERS[name][0]))
    other = FusedTTOptimizer(twin, spec_of(OPTIMIZERS[name][0]))
    for step in range(3):
        backward(group.flat, step)
    state = copy.deepcopy(fused.state_dict())
    assert list(state) == ["state"]
    if name != "sgd":
        assert sorted(state["state"]) == sorted(
            f"{table}.tt_cores.{k}" for table in BATCH.table_names for k in range(3)
        )
        shape = (3, 1) if name == "rowwise_adagrad" else (3, 1, 2, 3)
        shapes = {tuple(v.shape) for v in state["state"]["item.tt_cores.0"].values()}
        assert shape in shapes and shapes <= {shape, ()}
    with torch.no_grad():
        for flat, source in zip(twin.flat, group.flat, strict=True):
            flat.copy_(source)
    other.load_state_dict(state)
    backward(group.flat, 7)
    backward(twin.flat, 7)
    assert all(torch.equal(a, b) for a, b in zip(group.flat, twin.flat, strict=True))


def test_missing_state_is_named() -> None:
    fused = FusedTTOptimizer(make_group(), spec_of({"optimizer": EmbOptimType.ADAM}))
    state = copy.deepcopy(fused.state_dict())
    state["state"]["other"] = state["state"].pop("item.tt_cores.1")
    with pytest.raises(ValueError, match=r"item\.tt_cores\.1 not found"):
        fused.load_state_dict(state)


def test_tables_stepped_together_must_have_equal_step_counts() -> None:
    fused = FusedTTOptimizer(make_group(), spec_of({"optimizer": EmbOptimType.ADAM}))
    state = copy.deepcopy(fused.state_dict())
    for k in range(3):
        state["state"][f"item.tt_cores.{k}"]["step"].fill_(4)
    with pytest.raises(ValueError, match=r"user\.tt_cores\.0.*item\.tt_cores\.0.*0 and 4 steps"):
        CombinedOptimizer([fused]).load_state_dict(state)
    for table in BATCH.table_names:
        for k in range(3):
            state["state"][f"{table}.tt_cores.{k}"]["step"].fill_(4)
    CombinedOptimizer([fused]).load_state_dict(state)
    assert {float(s["step"]) for s in fused.state_dict()["state"].values()} == {4.0}


def test_step_counter_can_be_reset() -> None:
    """After a reset to 0 the next Adam update is that of a fresh optimizer."""
    group, fresh = make_group(), make_group()
    spec = spec_of({"optimizer": EmbOptimType.ADAM})
    fused = FusedTTOptimizer(group, spec)
    fused.set_optimizer_step(100)
    fused.set_optimizer_step(0)
    FusedTTOptimizer(fresh, spec)
    backward(group.flat, 0)
    backward(fresh.flat, 0)
    assert all(torch.equal(a, b) for a, b in zip(group.flat, fresh.flat, strict=True))


def test_loading_a_fresh_state_starts_the_step_counter_anew() -> None:
    """Elsewhere the counter was kept, so that the first updates after a reset were too small."""
    group, fresh = make_group(), make_group()
    spec = spec_of({"optimizer": EmbOptimType.ADAM})
    fused, other = FusedTTOptimizer(group, spec), FusedTTOptimizer(fresh, spec)
    for step in range(3):
        backward(group.flat, step)
    fused.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        for flat, source in zip(group.flat, fresh.flat, strict=True):
            flat.copy_(source)
    backward(group.flat, 5)
    backward(fresh.flat, 5)
    assert all(torch.equal(a, b) for a, b in zip(group.flat, fresh.flat, strict=True))


def test_making_state_changes_no_weight_even_with_eps_zero() -> None:
    group = make_group()
    before = [flat.detach().clone() for flat in group.flat]
    FusedTTOptimizer(
        group, spec_of({"optimizer": EmbOptimType.ADAM, "eps": 0.0, "weight_decay": 0.5})
    )
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))


def test_optimizers_whose_state_does_not_start_at_zero_are_refused() -> None:
    """Their first updates would else be wrong; core by core they work."""
    group = make_group()
    truth, cores = twins(group), group.named_slices()
    before = [flat.detach().clone() for flat in group.flat]
    with pytest.raises(ValueError, match="^NAdam keeps 'mu_product', .* KeyedOptimizerWrapper"):
        GroupKeyedOptimizer(cores, lambda params: torch.optim.NAdam(params, weight_decay=0.1))
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))
    optimizers = [KeyedOptimizerWrapper(cores, torch.optim.NAdam), torch.optim.NAdam(truth)]
    for step in range(3):
        for tensors, optimizer in zip((group.flat, truth), optimizers, strict=True):
            optimizer.zero_grad()
            backward(tensors, step)
            optimizer.step()
    for flat, twin in zip(group.flat, truth, strict=True):
        torch.testing.assert_close(flat, twin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_16_bit_cores_add_up(dtype: torch.dtype) -> None:
    group = make_group(dtype)
    start = [flat.detach().float() for flat in group.flat]
    fused = FusedTTOptimizer(
        group, spec_of({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1e-5})
    )
    for _ in range(500):
        sum(flat.float().sum() for flat in group.flat).backward()
    for flat, old in zip(group.flat, start, strict=True):
        assert flat.dtype is dtype
        torch.testing.assert_close(flat.float(), old - 5e-3, rtol=8e-3, atol=1e-3)
    assert set(fused.state_dict()["state"]["user.tt_cores.0"]) == {"master"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_cores_are_a_float32_copy_rounded_to_nearest(name: str, dtype: torch.dtype) -> None:
    fused_params, make_optimizer = OPTIMIZERS[name]
    group = make_group(dtype)
    FusedTTOptimizer(group, spec_of(fused_params))
    masters = [nn.Parameter(flat.detach().float()) for flat in group.flat]
    optimizer = make_optimizer(masters)
    for step in range(10):
        backward(group.flat, step)
        rounded = [master.detach().to(dtype).requires_grad_() for master in masters]
        backward(rounded, step)
        for master, low in zip(masters, rounded, strict=True):
            assert low.grad is not None
            master.grad = low.grad.float()
        optimizer.step()
        for flat, master in zip(group.flat, masters, strict=True):
            # Adagrad in foreach form differs in the last bit of float32, at most one rounding.
            torch.testing.assert_close(flat, master.to(dtype), rtol=8e-3, atol=1e-6)
            assert (flat != master.to(dtype)).float().mean() < 0.01


def curve(dtype: torch.dtype, steps: int) -> torch.Tensor:
    """Losses of a regression on noisy targets, through the lookup kernel and its backward."""
    generator = torch.Generator().manual_seed(3)
    group = make_group(dtype)
    with torch.no_grad():
        for flat in group.flat:
            flat.mul_(0.3)
    target_TND = torch.randn(2, 40, 8, generator=generator)
    FusedTTOptimizer(
        group, spec_of({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05})
    )
    losses = []
    for _ in range(steps):
        ids_FB = torch.randint(0, 40, (2, 32), generator=generator)
        noise = torch.randn(2, 32, 8, generator=generator)
        labels = target_TND[torch.arange(2)[:, None], ids_FB] + noise
        found = batched_tt_embedding_bag(
            ids_FB.flatten(), torch.arange(65), group(), BATCH, output_dtype=torch.float32
        )
        loss = ((found.view(32, 2, 8) - labels.transpose(0, 1)) ** 2).mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_16_bit_cores_learn_as_float32_ones_do() -> None:
    """Over 500 steps: products accumulate in float32, and so do updates."""
    expected = curve(torch.float32, 500)
    assert expected[-50:].mean() < 0.8 * expected[:50].mean()
    smooth = expected.view(-1, 20).mean(1)
    for dtype in (torch.bfloat16, torch.float16):
        found = curve(dtype, 500).view(-1, 20).mean(1)
        assert float(((found - smooth) / smooth).abs().max()) < 0.01


def test_16_bit_cores_loaded_from_outside_count() -> None:
    group = make_group(torch.bfloat16)
    FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}))
    with torch.no_grad():
        for flat in group.flat:
            flat.fill_(2)
    sum(flat.float().sum() for flat in group.flat).backward()
    assert all((flat == 1.5).all() for flat in group.flat)


def test_no_optimizer_is_none_and_none_is_frozen() -> None:
    assert OptimizerSpec.from_fused_params("t", {"learning_rate": 0.1}) is None
    frozen = OptimizerSpec.from_fused_params("t", {"optimizer": EmbOptimType.NONE})
    assert frozen is not None and frozen.cls is None


@pytest.mark.parametrize("kind", [EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_ADAM])
def test_unsupported_optimizers_are_refused_by_name(kind: EmbOptimType) -> None:
    with pytest.raises(ValueError, match=rf"TT table 'users': optimizer {kind.value} is not"):
        OptimizerSpec.from_fused_params("users", {"optimizer": kind})


def test_settings_that_do_not_apply_are_named() -> None:
    with pytest.warns(UserWarning, match=r"\['beta1', 'max_norm'\] do not apply to SGD"):
        spec_of({"optimizer": EmbOptimType.SGD, "beta1": 0.5, "max_norm": 1.0, "momentum": 0.9})


@pytest.mark.parametrize(
    ("optimizer", "mode", "expected"),
    [
        (EmbOptimType.ADAM, WeightDecayMode.L2, torch.optim.Adam),
        (EmbOptimType.ADAM, WeightDecayMode.DECOUPLE, torch.optim.AdamW),
        (EmbOptimType.ADAM, None, torch.optim.AdamW),
        (torch.optim.Adam, None, torch.optim.Adam),
        (torch.optim.AdamW, None, torch.optim.AdamW),
        (EmbOptimType.EXACT_SGD, WeightDecayMode.L2, torch.optim.SGD),
    ],
)
def test_weight_decay_modes(optimizer, mode, expected) -> None:
    settings = {"optimizer": optimizer, "weight_decay": 0.1, "weight_decay_mode": mode}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec_of(settings).cls is expected


def test_weight_decay_mode_without_counterpart_is_refused() -> None:
    settings = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.COUNTER,
    }
    with pytest.raises(ValueError, match="'user': weight_decay_mode"):
        spec_of(settings)


def test_group_keyed_optimizer_equals_the_wrapper_over_slices() -> None:
    """Both show the same names and state; one steps 3 tensors, the other 6."""
    groups = make_group(), make_group()
    dense = [nn.Parameter(torch.ones(3, 2)) for _ in groups]

    def params(i: int) -> dict[str, torch.Tensor]:
        return {**groups[i].named_slices(), "linear": dense[i]}

    def adam(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(tensors, lr=0.02, foreach=True)

    grouped = GroupKeyedOptimizer(params(0), adam)
    wrapped = KeyedOptimizerWrapper(params(1), adam)
    assert len(grouped._optimizer.param_groups[0]["params"]) == 4
    for optimizer, group, matrix, step in (
        (optimizer, group, matrix, step)
        for step in range(4)
        for optimizer, group, matrix in zip((grouped, wrapped), groups, dense, strict=True)
    ):
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        optimizer.zero_grad()
        backward([*group.flat, matrix], step)
        optimizer.step()
    for ours, theirs in zip(groups[0].flat, groups[1].flat, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert torch.equal(dense[0], dense[1])
    torch.testing.assert_close(grouped.state_dict(), wrapped.state_dict(), rtol=0, atol=0)


def test_group_keyed_optimizer_has_its_state_before_the_first_step() -> None:
    group = make_group()
    state = GroupKeyedOptimizer(group.named_slices(), torch.optim.Adam).state_dict()["state"]
    assert {float(entry["step"]) for entry in state.values()} == {0.0}
    assert state["item.tt_cores.1"]["exp_avg"].shape == (4, 3, 2, 4)


def test_group_keyed_optimizer_refuses_part_of_a_group() -> None:
    params = {k: p for k, p in make_group().named_slices().items() if k.startswith("user")}
    with pytest.raises(ValueError, match=r"user\.tt_cores\.0 shares its storage"):
        GroupKeyedOptimizer(params, torch.optim.Adam)


@pytest.mark.parametrize("name", ["sgd_momentum", "rowwise_adagrad", "adam"])
def test_a_copy_trains_its_own_cores(name: str) -> None:
    group = make_group(torch.bfloat16)
    fused = FusedTTOptimizer(group, spec_of(OPTIMIZERS[name][0]))
    backward(group.flat, 0)
    other, other_fused = copy.deepcopy((group, fused))
    before = [flat.detach().clone() for flat in group.flat]
    backward(other.flat, 1)
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))
    backward(group.flat, 1)
    for flat, copied in zip(group.flat, other.flat, strict=True):
        assert torch.equal(flat, copied) and flat.data_ptr() != copied.data_ptr()
        assert copied.grad is None
    for core in other.named_slices().values():
        assert core._in_backward_optimizers == [other_fused]
    torch.testing.assert_close(other_fused.state_dict(), fused.state_dict(), rtol=0, atol=0)


def test_a_copy_of_a_keyed_optimizer_steps_the_copied_cores() -> None:
    group = make_group()
    grouped = GroupKeyedOptimizer(group.named_slices(), torch.optim.Adam)
    other, other_grouped = copy.deepcopy((group, grouped))
    before = [flat.detach().clone() for flat in group.flat]
    backward(other.flat, 0)
    other_grouped.step()
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))
    backward(group.flat, 0)
    grouped.step()
    assert all(torch.equal(a, b) for a, b in zip(group.flat, other.flat, strict=True))
    torch.testing.assert_close(other_grouped.state_dict(), grouped.state_dict(), rtol=0, atol=0)
