"""The numba plan is the plain PyTorch plan, bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, cpu_plan, reference

SHAPE = {"col_factors": (2, 2, 2), "ranks": (1, 1)}


@pytest.fixture(autouse=True, params=[1, 3])
def num_threads(request: pytest.FixtureRequest, monkeypatch) -> Iterator[int]:
    """With several threads every pass is cut, however few lookups there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu_plan, "_MIN_LOOKUPS_PER_WORKER", 4)
    monkeypatch.setattr(cpu_plan, "_MIN_LOOKUPS_OF_LAST_PASS", 1)
    yield request.param
    torch.set_num_threads(before)


def assert_same_plan(indices_L, offsets, batch):
    plan, first_bad = cpu_plan.build_plan(indices_L, offsets, batch)
    wanted, wanted_first_bad = reference.build_plan(indices_L, offsets, batch)
    for name, tensor, truth in zip(plan._fields, plan, wanted, strict=True):
        assert tensor.dtype == truth.dtype, name
        assert torch.equal(tensor, truth), name
    assert first_bad == wanted_first_bad
    return plan, first_bad


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(random_case, seed):
    """Several tables and features, empty bags and batches, both integer types."""
    case = random_case(seed, shapes=[((2, 2, 2), (1, 1))])
    assert_same_plan(case.indices_L, case.offsets, case.batch)


def test_many_lookups_of_few_rows():
    batch = TableBatch(("t", "u"), (60, 8), ((4, 4, 4), (2, 2, 2)), **SHAPE,
                       feature_names=("a", "b"), feature_tables=(1, 0))  # fmt: skip
    indices_L = torch.cat([torch.randint(8, (3000,)), torch.randint(60, (2000,)) ** 2 % 60])
    offsets = torch.cat([torch.arange(0, 3001, 100), torch.linspace(3000, 5000, 31).long()[1:]])
    assert_same_plan(indices_L, offsets, batch)


def test_keys_beyond_32_bits():
    """Many tables of 40 million rows: row numbers of the group pass 2^31."""
    num_tables = 120
    batch = TableBatch(
        tuple(f"t{t}" for t in range(num_tables)), (40_000_000,) * num_tables,
        ((250, 400, 400),) * num_tables, **SHAPE,
        feature_names=tuple(f"f{t}" for t in range(num_tables)),
        feature_tables=tuple(range(num_tables)),
    )  # fmt: skip
    assert batch.row_offsets[-1] > 2**32
    indices_L = torch.randint(40_000_000, (num_tables * 20,))
    plan, _ = assert_same_plan(indices_L, torch.arange(0, num_tables * 20 + 1, 10), batch)
    assert int(plan.counts[0]) > 2000


def test_digits_of_huge_ids_are_exact():
    """A quotient computed in float32 is wrong from 2^24 on, in float64 off by one near 2^51."""
    side = 2**17
    batch = TableBatch(("t",), (side**3,), ((side,) * 3,), **SHAPE,
                       feature_names=("f",), feature_tables=(0,))  # fmt: skip
    near = torch.tensor([0, 1, side - 1, side, side**2 - 1, side**2, side**3 - 1, side**3 - side])
    indices_L = torch.cat([near, torch.randint(side**3, (500,))])
    assert_same_plan(indices_L, torch.tensor([0, 8, 508]), batch)


def test_more_rows_than_a_key_holds():
    side = 2**18
    batch = TableBatch(("t",), (5,), ((side,) * 3,), **SHAPE,
                       feature_names=("f",), feature_tables=(0,))  # fmt: skip
    with pytest.raises(ValueError, match=r"18014398509481984 rows .* limit is 2\^52"):
        cpu_plan.build_plan(torch.tensor([1]), torch.tensor([0, 1]), batch)


@pytest.mark.parametrize("bad", [-1, 60, 2**40])
def test_first_id_out_of_range(bad):
    batch = TableBatch(("t",), (60,), ((4, 4, 4),), **SHAPE,
                       feature_names=("f",), feature_tables=(0,))  # fmt: skip
    indices_L = torch.arange(50)
    indices_L[[20, 33, 49]] = bad
    _, first_bad = assert_same_plan(indices_L, torch.arange(0, 51, 5), batch)
    assert first_bad == 20
