"""Optimizers of TT cores: they are the library's, on a group's leaves at once."""

import copy
import warnings

import pytest
import torch
import torchrec.optim as torchrec_optim
from ecorec_torchrec.kernels.tt_index import TableBatch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from ecorec_torchrec.lookup import (
    FusedTTOptimizer,
    GroupCores,
    GroupKeyedOptimizer,
    OptimizerSpec,
)

BATCH = TableBatch(
    table_names=("user", "item"),
    num_embeddings=(90, 50),
    row_factors=((4, 5, 5), (3, 4, 5)),
    col_factors=(2, 2, 2),
    ranks=(3, 4),
    feature_names=("u", "i"),
    feature_tables=(0, 1),
)
# The optimizer by TorchRec's name, and the same in torch, both from FBGEMM's defaults.
OPTIMIZERS = {
    "sgd": (
        {"optimizer": EmbOptimType.EXACT_SGD},
        lambda params: torch.optim.SGD(params, lr=0.01),
    ),
    "sgd_momentum": (
        {"optimizer": EmbOptimType.SGD, "momentum": 0.8, "weight_decay": 0.1},
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.8, weight_decay=0.1),
    ),
    "adagrad": (
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 1e-4},
        lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-4),
    ),
    "rowwise_adagrad": (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-5},
        lambda params: torchrec_optim.RowWiseAdagrad(params, lr=0.01, eps=1e-5),
    ),
    "adam": (
        {"optimizer": EmbOptimType.ADAM, "beta1": 0.8, "eps": 1e-6},
        lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.999), eps=1e-6),
    ),
    "adamw": (
        {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.2},
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.2),
    ),
}


def make_group(dtype: torch.dtype = torch.float32) -> GroupCores:
    cores = GroupCores(BATCH, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for flat in cores.flat:
            flat.copy_(torch.randn(flat.shape, generator=generator))
    return cores


def spec_of(fused_params: dict) -> OptimizerSpec:
    spec = OptimizerSpec.from_fused_params("user", fused_params)
    assert spec is not None
    return spec


def backward(tensors: list[torch.Tensor], step: int) -> None:
    """A loss whose gradients depend on the values and on the step."""
    generator = torch.Generator().manual_seed(100 + step)
    loss = sum(
        (t.float() * torch.randn(t.shape, generator=generator)).sum() + (t.float() ** 2).sum() / 2
        for t in tensors
    )
    loss.backward()


def rows(group: GroupCores) -> list[nn.Parameter]:
    """Copies of the leaves as ordinary parameters: one row of a core is one row of the matrix."""
    return [nn.Parameter(flat.detach().clone()) for flat in group.flat]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_step_equals_the_library_optimizer(name: str) -> None:
    fused_params, make_optimizer = OPTIMIZERS[name]
    group = make_group()
    twins = rows(group)
    FusedTTOptimizer(group, spec_of(fused_params))
    optimizer = make_optimizer(twins)
    for step in range(5):
        backward(list(group.flat), step)
        backward(twins, step)
        optimizer.step()
        optimizer.zero_grad()
    for flat, twin in zip(group.flat, twins, strict=True):
        torch.testing.assert_close(flat, twin, rtol=1e-6, atol=1e-7)
        assert flat.grad is None


def test_one_step_per_backward_pass_however_many_cores() -> None:
    group = make_group()
    fused = FusedTTOptimizer(group, spec_of({"optimizer": EmbOptimType.ADAM}))
    steps = []
    fused._optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(3):
        backward(list(group.flat), step)
    assert len(steps) == 3


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
    backward(list(group.flat), 0)
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
        backward(list(group.flat), step)
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
    backward(list(group.flat), 7)
    backward(list(twin.flat), 7)
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
    backward(list(group.flat), 0)
    backward(list(fresh.flat), 0)
    assert all(torch.equal(a, b) for a, b in zip(group.flat, fresh.flat, strict=True))


def test_making_state_changes_no_weight_even_with_eps_zero() -> None:
    group = make_group()
    before = [flat.detach().clone() for flat in group.flat]
    FusedTTOptimizer(
        group, spec_of({"optimizer": EmbOptimType.ADAM, "eps": 0.0, "weight_decay": 0.5})
    )
    assert all(torch.equal(flat, old) for flat, old in zip(group.flat, before, strict=True))


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
    with pytest.warns(UserWarning, match=r"\['beta1', 'max_gradient'\] do not apply to SGD"):
        spec_of({"optimizer": EmbOptimType.SGD, "beta1": 0.5, "max_gradient": 1.0, "momentum": 0.9})


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
