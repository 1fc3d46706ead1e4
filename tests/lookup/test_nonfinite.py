"""NaN and infinite gradients: the table is named, and skipped or refused, whatever its group."""

import warnings
from dataclasses import replace

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn

from ecorec_torchrec.lookup import FusedTTOptimizer, GroupCores, GroupKeyedOptimizer
from ecorec_torchrec.testing.toy_cores import BATCH, OPTIMIZERS, make_group, spec_of

USER, ITEM = (
    replace(
        BATCH,
        table_names=BATCH.table_names[i : i + 1],
        num_embeddings=BATCH.num_embeddings[i : i + 1],
        row_factors=BATCH.row_factors[i : i + 1],
        feature_names=BATCH.feature_names[i : i + 1],
        feature_tables=(0,),
    )
    for i in range(2)
)
BAD = {1: float("nan"), 3: float("inf")}


def backward(group: GroupCores, step: int, bad: dict[int, float]) -> None:
    """Gradients by table, step and core; those of "item" are broken in the steps of `bad`."""
    terms = []
    for name, cores in group.tables.items():
        for k, core in enumerate(cores):
            generator = torch.Generator().manual_seed(10 * step + k)
            noise = torch.randn(core.shape, generator=generator)
            if name == "item" and k == 1 and step in bad:
                noise.view(-1)[step] = bad[step]
            rows = core.flat[core._start : core._start + len(core)].view(core.shape)
            terms.append((rows.float() * noise).sum() + (rows.float() ** 2).sum() / 2)
    torch.stack(terms).sum().backward()


def filled(batch: TableBatch, dtype: torch.dtype) -> GroupCores:
    """Every table starts from the same numbers in any group."""
    group, source = make_group(dtype, batch), make_group(dtype)
    with torch.no_grad():
        for name, cores in group.tables.items():
            for core, other in zip(cores, source.tables[name], strict=True):
                core.copy_(other)
    return group


def train(
    batch: TableBatch,
    name: str,
    bad: dict[int, float],
    dtype: torch.dtype = torch.float32,
    step_in_backward: bool = True,
) -> tuple[GroupCores, dict]:
    group = filled(batch, dtype)
    fused = FusedTTOptimizer(
        group,
        spec_of(OPTIMIZERS[name][0]),
        step_in_backward=step_in_backward,
        nonfinite_gradients="skip",
    )
    for step in range(5):
        fused.zero_grad()
        backward(group, step, bad)
        fused.step()
    return group, fused.state_dict()["state"]


def assert_same(table: str, first: GroupCores, second: GroupCores) -> None:
    for a, b in zip(first.tables[table], second.tables[table], strict=True):
        assert torch.equal(a, b) and bool(a.isfinite().all())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step_in_backward", [True, False])
def test_a_skipped_table_does_not_touch_its_group(name: str, step_in_backward: bool) -> None:
    with pytest.warns(UserWarning, match="^the gradient of item is not finite") as caught:
        group, state = train(BATCH, name, BAD, step_in_backward=step_in_backward)
    assert len(caught) == 2
    # Its neighbour: as if nothing had happened. The table: as if it were alone.
    assert_same("user", group, train(BATCH, name, {})[0])
    with pytest.warns(UserWarning):
        alone, alone_state = train(ITEM, name, BAD)
    assert_same("item", group, alone)
    for key, values in alone_state.items():
        torch.testing.assert_close(state[key], values, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_skipping_with_16_bit_cores(dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match="item"):
        group, state = train(BATCH, "adam", BAD, dtype)
    assert_same("user", group, train(BATCH, "adam", {}, dtype)[0])
    for k, core in enumerate(group.tables["item"]):
        assert torch.equal(core, state[f"item.tt_cores.{k}"]["master"].to(dtype))


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "rowwise_adagrad"])
def test_a_skipped_update_leaves_cores_and_state_but_counts(name: str) -> None:
    group = make_group()
    fused = FusedTTOptimizer(group, spec_of(OPTIMIZERS[name][0]), nonfinite_gradients="skip")
    backward(group, 0, {})
    cores = [core.detach().clone() for core in group.tables["item"]]
    state = {
        k: {n: v.clone() for n, v in s.items()} for k, s in fused.state_dict()["state"].items()
    }
    with pytest.warns(UserWarning, match="item"):
        backward(group, 1, BAD)
    assert all(torch.equal(a, b) for a, b in zip(group.tables["item"], cores, strict=True))
    for key, values in fused.state_dict()["state"].items():
        for entry, value in values.items():
            if entry == "step":
                assert float(value) == float(state[key][entry]) + 1
            else:
                assert torch.equal(value, state[key][entry]) == key.startswith("item")


def test_by_default_nothing_is_looked_for() -> None:
    """NaN then reaches the table's own cores, and no others."""
    group, clean = make_group(), make_group()
    for each in (group, clean):
        FusedTTOptimizer(each, spec_of({"optimizer": EmbOptimType.EXACT_SGD}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(group, 1, BAD)
        backward(clean, 1, {})
    assert_same("user", group, clean)
    assert bool(group.tables["item"][1].isnan().any())


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_stopping_names_the_table_before_anything_changes(step_in_backward: bool) -> None:
    group, clean = make_group(), make_group()
    spec = spec_of(OPTIMIZERS["adam"][0])
    fused = FusedTTOptimizer(
        group, spec, step_in_backward=step_in_backward, nonfinite_gradients="stop"
    )
    FusedTTOptimizer(clean, spec)
    with pytest.raises(FloatingPointError, match="gradient of item is not finite"):
        backward(group, 3, BAD)
        fused.step()
    assert_same("item", group, clean)
    assert_same("user", group, clean)
    # Who catches it can go on.
    fused.zero_grad()
    backward(group, 4, BAD)
    fused.step()
    backward(clean, 4, BAD)
    assert_same("item", group, clean)


def test_data_parallel_tables_and_other_parameters() -> None:
    group, clean = make_group(), make_group()
    weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizers = [
        GroupKeyedOptimizer(
            {**{f"ebc.{n}": core for n, core in each.named_slices().items()}, "linear": weight},
            lambda params: torch.optim.Adam(params, lr=0.1),
            nonfinite_gradients=policy,
        )
        for each, weight, policy in zip((group, clean), weights, ("skip", "ignore"), strict=True)
    ]
    for step, bad_weight in enumerate((1.0, 1.0, float("inf"))):
        for each, weight, optimizer in zip((group, clean), weights, optimizers, strict=True):
            if each is clean and step:
                continue
            optimizer.zero_grad()
            backward(each, step, BAD)
            (weight.sum() * bad_weight).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            names = {1: ["ebc.item"], 2: ["linear"]}.get(step, [])
            assert [str(w.message).split()[3] for w in caught] == names
    assert_same("item", group, group)
    assert not torch.equal(weights[0], weights[1])  # stepped twice, not a third time
    assert bool(weights[0].isfinite().all())
    stop = GroupKeyedOptimizer(group.named_slices(), torch.optim.Adam, nonfinite_gradients="stop")
    stop.zero_grad()
    with pytest.raises(FloatingPointError, match="gradient of item is"):
        backward(group, 1, BAD)
        stop.step()


def test_a_closure_is_evaluated_before_the_gradients_are_looked_at() -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer = GroupKeyedOptimizer(
        {"weight": weight}, lambda p: torch.optim.SGD(p, lr=0.5), nonfinite_gradients="stop"
    )
    optimizer.step(lambda: (weight * 2).backward())
    assert float(weight.detach()) == 0.0


def test_other_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite_gradients='raise' is not one of"):
        GroupKeyedOptimizer({}, torch.optim.Adam, nonfinite_gradients="raise")
