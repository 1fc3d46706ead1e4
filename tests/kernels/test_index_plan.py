"""The index plan against a plain Python one, and checks of ids and offsets."""

import warnings
from itertools import groupby

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_index.reference import build_plan

# Two tables of 3 cores side by side; "item" has the padding rows 50..59.
BATCH = TableBatch(
    ("user", "item"), (90, 50), ((4, 5, 5), (3, 4, 5)), (2, 2, 2), (3, 3),
    ("u", "i", "last_i"), (0, 1, 1),
)  # fmt: skip


@pytest.fixture(params=["numba", "pytorch"])
def builder(request):
    """The plan as the operator builds it with numba, and without."""
    if request.param == "pytorch":
        request.getfixturevalue("without_numba")


def expected_plan(ids, offsets, batch):
    """One lookup at a time."""
    num_bags = (len(offsets) - 1) // batch.num_features
    lookups = []
    for bag in range(len(offsets) - 1):
        table = batch.feature_tables[bag // num_bags]
        _, p2, p3 = batch.row_factors[table]
        bases = [core_offset[table] for core_offset in batch.core_offsets]
        for position in range(offsets[bag], offsets[bag + 1]):
            i1, i2, i3 = ids[position] // (p2 * p3), ids[position] // p3 % p2, ids[position] % p3
            row = (i2 + bases[1], i1 + bases[0], i3 + bases[2])
            lookups.append(((table, *row), position, bag))
    lookups.sort()
    rows = [key for key, _ in groupby(lookups, key=lambda x: x[0])]
    prefixes = [key for key, _ in groupby(rows, key=lambda x: x[:3])]
    pooled = sorted((bag, key, position) for key, position, bag in lookups)
    num_lookups = len(ids)

    def pad(values, length, fill):
        return values + [fill] * (length - len(values))

    keys = [key for key, _, _ in lookups]
    return {
        "order_L": [position for _, position, _ in lookups],
        "bag_L": [bag for _, _, bag in lookups],
        "row_starts": pad([keys.index(row) for row in rows], num_lookups + 1, num_lookups),
        "i3_U": pad([row[3] for row in rows], num_lookups, 0),
        "prefix_starts": pad(
            [next(u for u, row in enumerate(rows) if row[:3] == prefix) for prefix in prefixes],
            num_lookups + 1,
            len(rows),
        ),
        "i1_P": pad([prefix[2] for prefix in prefixes], num_lookups, 0),
        "i2_P": pad([prefix[1] for prefix in prefixes], num_lookups, 0),
        "group_starts": [
            sum(prefix[1] < i2 for prefix in prefixes) for i2 in range(batch.core_shapes[1][0] + 1)
        ],
        "pooled_row_L": [rows.index(key) for _, key, _ in pooled],
        "pooled_occurrence_L": [position for _, _, position in pooled],
        "offsets": list(offsets),
        "counts": [len(rows), len(prefixes)],
    }


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_bags", [1, 7])
def test_equals_a_plan_made_in_python(builder, index_dtype, offset_dtype, num_bags):
    lengths = torch.randint(0, 30 // num_bags + 2, (3 * num_bags,))
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    limits = torch.tensor([90, 50, 50]).repeat_interleave(num_bags).repeat_interleave(lengths)
    ids = (torch.rand(len(limits)) ** 2 * limits).long()
    plan = index_plan(ids.to(index_dtype), offsets.to(offset_dtype), BATCH)
    for name, expected in expected_plan(ids.tolist(), offsets.tolist(), BATCH).items():
        actual = getattr(plan, name)
        assert actual.dtype == torch.int32
        assert actual.tolist() == expected, name


def test_example_of_the_readme(builder):
    batch = TableBatch(("t",), (8,), ((2, 2, 2),), (1, 1, 1), (1, 1), ("f",), (0,))
    plan = index_plan(torch.tensor([5, 3, 5, 4, 1]), torch.tensor([0, 3, 5]), batch)
    assert plan.order_L.tolist() == [4, 3, 0, 2, 1]
    assert plan.bag_L.tolist() == [1, 1, 0, 0, 0]
    assert plan.row_starts.tolist() == [0, 1, 2, 4, 5, 5]
    assert plan.prefix_starts.tolist() == [0, 1, 3, 4, 4, 4]
    assert plan.group_starts.tolist() == [0, 2, 3]
    assert plan.pooled_row_L.tolist() == [2, 2, 3, 0, 1]
    assert plan.counts.tolist() == [4, 3]


def test_large_plan_equals_the_reference(builder):
    """Tables whose keys need more than 32 bits together."""
    batch = TableBatch(
        tuple("abc"), (4_000_000_000, 40_000_000, 17), ((1600, 1600, 1600), (350, 350, 350),
        (2, 3, 3)), (1, 1, 1), (1, 1), tuple("abc"), (0, 1, 2),
    )  # fmt: skip
    ids = torch.cat([(torch.rand(9000).double() ** 3 * n).long() for n in batch.num_embeddings])
    offsets = torch.linspace(0, len(ids), 3 * 50 + 1).long()
    expected, _ = build_plan(ids, offsets, batch)
    for name, actual in index_plan(ids, offsets, batch)._asdict().items():
        assert torch.equal(actual, getattr(expected, name)), name


@pytest.mark.parametrize("num_bags", [0, 5])
def test_no_ids(builder, num_bags):
    plan = index_plan(torch.empty(0).long(), torch.zeros(3 * num_bags + 1).long(), BATCH)
    assert plan.counts.tolist() == [0, 0]
    assert plan.row_starts.tolist() == plan.prefix_starts.tolist() == [0]
    assert plan.group_starts.tolist() == [0] * 10


def test_unpooled_keeps_the_callers_order(builder):
    """Features of 3, 0 and 2 ids, every lookup a bag of its own."""
    ids = torch.tensor([5, 3, 5, 9, 2])
    plan = index_plan(ids, torch.tensor([0, 3, 3, 5]), BATCH).unpooled()
    row_of_sorted = torch.repeat_interleave(plan.row_starts.diff())
    assert torch.equal(plan.pooled_row_L[plan.order_L].long(), row_of_sorted)
    assert plan.offsets.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.pooled_occurrence_L.tolist() == [0, 1, 2, 3, 4]


def test_shares_no_memory_with_the_input(builder):
    ids, offsets = torch.tensor([5, 3], dtype=torch.int32), torch.tensor([0, 1, 2, 2]).int()
    plan = index_plan(ids, offsets, BATCH)
    before = [x.clone() for x in plan]
    ids.fill_(7)
    offsets.fill_(9)
    assert all(torch.equal(a, b) for a, b in zip(plan, before, strict=True))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([90, 0, 0], "feature 'u': id 90 is out of range for table 'user' with num_embeddings=90"),
        ([0, 50, 0], "feature 'i': id 50 .* table 'item' with num_embeddings=50"),
        ([0, 0, 59], "feature 'last_i': id 59 .* table 'item'"),
        ([0, 0, -1], "feature 'last_i': id -1 .* table 'item'"),
        ([2**40, 0, 0], f"feature 'u': id {2**40} "),
    ],
)
def test_ids_out_of_range(builder, ids, message):
    """The first row after the end is out of range, as is a padding row (50..59 of "item")."""
    ids, offsets = torch.tensor(ids), torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match=message):
        index_plan(ids, offsets, BATCH)
    with pytest.warns(UserWarning, match=message) as caught:
        warned = index_plan(ids, offsets, BATCH, bounds_check="warning")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignored = index_plan(ids, offsets, BATCH, bounds_check="ignore")
    zeros = index_plan(torch.zeros(3).long(), offsets, BATCH)
    for plan in (warned, ignored):
        assert all(torch.equal(a, b) for a, b in zip(plan, zeros, strict=True))


def test_one_warning_for_many_ids(builder):
    ids = torch.tensor([3, 95, 70, 50, 60])
    with pytest.warns(UserWarning, match=r"feature 'u': id 95 .*position 1") as caught:
        index_plan(ids, torch.tensor([0, 2, 4, 5]), BATCH, bounds_check="warning")
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("num_ids", "offsets", "message"),
    [
        (0, [0, 2, 0, 0], "feature 'i': offsets decrease from 2 to 0"),
        (4, [0, 3, 1, 4], "feature 'i': offsets decrease from 3 to 1"),
        (4, [1, 2, 3, 4], "offsets must start at 0, got 1"),
        (4, [0, 1, 5, 5], "feature 'i': the lengths of all bags sum to 5, but there are 4 indices"),
        (4, [0, 1, 2, 3], "feature 'last_i': the lengths of all bags sum to 3, .* 4 indices"),
        (4, [0, 1, 4], r"F\*B \+ 1 entries for the F=3 features \['u', 'i', 'last_i'\], got 3"),
        (4, [], "entries .* got 0"),
        (4, [0], "sum to 0, but there are 4 indices"),
    ],
)
def test_offsets_that_do_not_fit(builder, num_ids, offsets, message):
    """All offsets are looked at, not only the last one: an inner one past the end is no crash."""
    ids, offsets = torch.zeros(num_ids).long(), torch.tensor(offsets, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        index_plan(ids, offsets, BATCH)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_dtypes(dtype):
    good, bad = torch.zeros(4).long(), torch.zeros(4).to(dtype)
    with pytest.raises(TypeError, match=f"indices must be int32 or int64, got {dtype}"):
        index_plan(bad, good, BATCH)
    with pytest.raises(TypeError, match=f"offsets must be int32 or int64, got {dtype}"):
        index_plan(good, bad, BATCH)


def test_devices_shapes_and_mode():
    good = torch.zeros(4).long()
    with pytest.raises(ValueError, match="indices are on cpu, offsets on meta"):
        index_plan(good, good.to("meta"), BATCH)
    with pytest.raises(ValueError, match=r"indices must have one dimension, got shape \(2, 2\)"):
        index_plan(good.view(2, 2), good, BATCH)
    with pytest.raises(ValueError, match="bounds_check must be one of .* got 'strict'"):
        index_plan(good, good, BATCH, bounds_check="strict")


def test_operator():
    ids, offsets = torch.tensor([5, 3, 5]), torch.tensor([0, 1, 2, 3])
    torch.library.opcheck(torch.ops.ecorec.tt_index, (ids, offsets, BATCH.key, "fatal"))
