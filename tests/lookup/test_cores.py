"""Group storage: tables are views of flat leaves that modules and optimizers take for leaves."""

import copy
import io

import pytest
import torch
from torch import nn

from ecorec_torchrec.lookup import (
    CoreSlice,
    FusedTTOptimizer,
    GroupableSpec,
    GroupCores,
    OptimizerSpec,
    TableCores,
)
from ecorec_torchrec.testing.toy_cores import BATCH
from ecorec_torchrec.tt import TTSpec


@pytest.fixture
def group() -> GroupCores:
    cores = GroupCores(BATCH, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for flat in cores.flat:
            flat.copy_(torch.randn(flat.shape))
    return cores


def loss(group: GroupCores) -> torch.Tensor:
    return sum((core**2).sum() * (k + 1) for k, core in enumerate(group()))


def test_slices_tile_the_flat_leaves(group: GroupCores) -> None:
    for k, core in enumerate(group()):
        parts = [group.tables[name][k] for name in BATCH.table_names]
        assert core.shape == BATCH.core_shapes[k]
        torch.testing.assert_close(
            torch.cat([part.detach() for part in parts]), core, rtol=0, atol=0
        )
    assert group.tables["item"][1].shape == (4, 3, 2, 4)


def test_writing_to_a_slice_writes_to_its_table_only(group: GroupCores) -> None:
    before = [core.detach().clone() for core in group()]
    with torch.no_grad():
        group.tables["item"][1].fill_(7)
    after = group()[1]
    assert (after[5:] == 7).all()
    assert torch.equal(after[:5], before[1][:5])


def test_a_slice_passes_for_a_parameter(group: GroupCores) -> None:
    core = group.tables["user"][0]
    assert isinstance(core, nn.Parameter) and core.requires_grad and core.grad_fn is None
    module = nn.Module()
    module.tt_cores = TableCores(group.tables["user"])
    assert [name for name, _ in module.named_parameters()] == [f"tt_cores.{k}" for k in range(3)]
    torch.optim.Adam(module.parameters())  # refuses what it takes for a non-leaf


def test_made_under_inference_mode_it_serves_evaluation() -> None:
    """A serving program may make its model there, with the optimizer of training in the config."""
    with torch.inference_mode():
        group = GroupCores(BATCH, torch.float32, torch.device("cpu"))
        FusedTTOptimizer(group, OptimizerSpec(torch.optim.SGD, (("lr", 0.1),)))
        assert loss(group) == 0
    assert not group.tables["user"][0].requires_grad


def test_grad_of_a_slice_is_the_slice_of_the_grad(group: GroupCores) -> None:
    assert group.tables["item"][2].grad is None
    loss(group).backward()
    for k in range(3):
        expected = 2 * (k + 1) * group.tables["item"][k].detach()
        torch.testing.assert_close(group.tables["item"][k].grad, expected)
    group.tables["item"][2].grad = torch.ones(5, 4, 2, 1)
    assert (group.flat[2].grad[5:] == 1).all()
    group.tables["item"][2].grad = None
    assert group.flat[2].grad is None and group.tables["user"][2].grad is None


def test_an_optimizer_over_slices_steps_the_leaves(group: GroupCores) -> None:
    before = [core.detach().clone() for core in group()]
    optimizer = torch.optim.SGD(group.named_slices().values(), lr=0.1)
    loss(group).backward()
    optimizer.step()
    for k, (old, new) in enumerate(zip(before, group(), strict=True)):
        torch.testing.assert_close(new.detach(), old * (1 - 0.2 * (k + 1)))


def test_deepcopy_keeps_tables_and_leaves_together(group: GroupCores) -> None:
    twin = copy.deepcopy(group)
    with torch.no_grad():
        twin.tables["user"][0].fill_(3)
    assert (twin.flat[0][:4] == 3).all() and not (group.flat[0] == 3).any()
    leaves = {id(core.flat) for cores in twin.tables.values() for core in cores}
    assert leaves == {id(flat) for flat in twin.flat}


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
def test_converting_sharded_cores_is_refused(group: GroupCores, convert) -> None:
    """Casting a model whose table is a view of a batch of tables must not part the two silently."""
    module = TableCores(group.tables["user"])
    with pytest.raises(TypeError, match=r"cannot be converted from torch\.float32.*data_type"):
        convert(module)
    with pytest.raises(TypeError, match="cannot be converted"):
        convert(group)


def test_moving_to_where_the_cores_are_changes_nothing(group: GroupCores) -> None:
    pointers = [core.data_ptr() for core in group.tables["user"]]
    module = TableCores(group.tables["user"]).to("cpu").float()
    assert [core.data_ptr() for core in module] == pointers


def test_loading_with_assign_copies_and_says_so(group: GroupCores) -> None:
    module = nn.Module()
    module.tt_cores = TableCores(group.tables["user"])
    state = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match="assign=True"):
        module.load_state_dict(state, assign=True)
    assert (group.flat[1][:5] == 1).all() and not (group.flat[1][5:] == 1).any()


def test_frozen_group_takes_no_gradient() -> None:
    cores = GroupCores(BATCH, torch.float32, None, requires_grad=False)
    assert not any(core.requires_grad for core in cores.named_slices().values())


def test_slices_built_without_grad_mode_still_require_grad() -> None:
    with torch.no_grad():
        cores = GroupCores(BATCH, torch.float32, None)
    assert all(core.requires_grad for core in cores.named_slices().values())


def test_state_of_a_group_saves_its_bytes_once(group: GroupCores) -> None:
    buffer = io.BytesIO()
    torch.save({name: core.detach() for name, core in group.named_slices().items()}, buffer)
    needed = sum(flat.nbytes for flat in group.flat)
    assert buffer.tell() < needed + 10_000


def test_specs_group_by_column_factors_and_ranks() -> None:
    spec = GroupableSpec(TTSpec(90, (4, 5, 5), (2, 2, 2), (3, 4)))
    assert spec == GroupableSpec(TTSpec(50, (3, 4, 5), (2, 2, 2), (3, 4)))
    assert hash(spec) == hash(GroupableSpec(TTSpec(50, (3, 4, 5), (2, 2, 2), (3, 4))))
    assert spec != GroupableSpec(TTSpec(90, (4, 5, 5), (2, 2, 2), (3, 3)))
    assert spec != GroupableSpec(TTSpec(90, (4, 5, 5), (1, 4, 2), (3, 4)))
    assert spec.spec.row_factors == (4, 5, 5)


def test_slice_rows_of_row_wise_state(group: GroupCores) -> None:
    core = group.tables["item"][0]
    assert isinstance(core, CoreSlice)
    assert core.rows_of(torch.arange(7.0).view(7, 1)).flatten().tolist() == [4, 5, 6]
