"""The index plan of the Triton builder is the reference's, bit for bit."""

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, reference, triton_plan

BATCH = TableBatch(
    ("user", "item"),
    (100, 29),
    ((5, 7, 3), (2, 3, 5)),
    (2, 2, 2),
    (4, 4),
    ("u", "i", "last_u"),
    (0, 1, 0),
)


def make_input(num_lookups, bags_per_feature, highest=29):
    num_bags = BATCH.num_features * bags_per_feature
    ends = torch.randint(num_lookups + 1, (num_bags - 1,)).sort().values
    offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([num_lookups])])
    return torch.randint(highest, (num_lookups,)), offsets


@pytest.fixture
def assert_same_plan(device):
    def check(indices, offsets, batch=BATCH):
        expected, first_out_of_range = reference.build_plan(indices, offsets, batch)
        plan, first_on_device = triton_plan.build_plan(
            indices.to(device), offsets.to(device), batch
        )
        for name, actual, wanted in zip(plan._fields, plan, expected, strict=True):
            assert actual.dtype == wanted.dtype == torch.int32, name
            assert torch.equal(actual.cpu(), wanted), name
        assert int(first_on_device) == first_out_of_range

    return check


@pytest.mark.parametrize("num_lookups", [0, 1, 3, 127, 129, 700])
@pytest.mark.parametrize("bags_per_feature", [1, 4])
@pytest.mark.parametrize("indices_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_same_as_reference(
    assert_same_plan, num_lookups, bags_per_feature, indices_dtype, offsets_dtype
):
    """Empty bags, shared tables, repeated ids, blocks that are not full."""
    indices, offsets = make_input(num_lookups, bags_per_feature)
    assert_same_plan(indices.to(indices_dtype), offsets.to(offsets_dtype))


def test_no_bags(assert_same_plan):
    assert_same_plan(torch.empty(0, dtype=torch.int64), torch.tensor([0]))


def test_one_id_everywhere(assert_same_plan):
    indices, offsets = make_input(700, 2)
    assert_same_plan(torch.full_like(indices, 28), offsets)


def test_keys_beyond_32_bits(assert_same_plan):
    """Two tables of 2^31 rows: keys and digits need 64 bits, core rows do not."""
    num_rows, factors = 2**31 - 1, (1_024, 2_048, 1_024)
    batch = TableBatch(
        ("a", "b"), (num_rows, num_rows), (factors, factors), (1, 1, 1), (1, 1), ("a", "b"), (0, 1)
    )
    indices = torch.tensor([num_rows - 1, 0, num_rows - 2, num_rows - 1, 1_024, 7])
    assert_same_plan(indices, torch.tensor([0, 3, 6]), batch)


@pytest.mark.parametrize("wrong", [-1, 29, 2**40])
def test_ids_out_of_range_are_found_and_count_as_zero(assert_same_plan, wrong):
    """29 is a padding row of the table (it has 30): not a row either."""
    indices, offsets = torch.tensor([5, 28, wrong, 3, wrong]), torch.tensor([0, 0, 5, 5])
    assert_same_plan(indices, offsets)


def test_the_input_is_not_shared(device):
    indices, offsets = (x.int().to(device) for x in make_input(9, 1))
    plan, _ = triton_plan.build_plan(indices, offsets, BATCH)
    offsets.fill_(0)
    assert int(plan.offsets[-1]) == 9
