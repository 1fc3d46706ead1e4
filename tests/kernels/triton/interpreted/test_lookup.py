"""Every Triton kernel against materialised tables in float64: outputs and all gradients.

Buffers start as NaN (`poisoned_memory`). The interpreter computes bf16 arithmetic wrongly and cuts
bf16 stores off instead of rounding; the kernels widen bf16 to fp32 before computing, so only the
stores of results show it. It does not emulate tf32, nor the minimum sizes of `tl.dot`: those are
the compile check's.
"""

from dataclasses import replace

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import triton_lookup
from ecorec_torchrec.kernels.tt_lookup.triton_parts import choose_cut

RELATIVE_ERROR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ODD_SIZES = [1, 3, 127, 129]


def make_case(lookup_case, num_lookups, col_factors, rank1, rank2, *, dtype=torch.float32):
    """Two tables whose row factors are no powers of two, three features, some bags empty."""
    batch = TableBatch(
        ("user", "item"),
        (100, 29),
        ((5, 7, 3), (2, 3, 5)),
        col_factors,
        (rank1, rank2),
        ("u", "i", "last_u"),
        (0, 1, 0),
    )
    ends = torch.randint(num_lookups + 1, (11,)).sort().values
    offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([num_lookups])])
    return lookup_case(
        batch,
        torch.randint(29, (num_lookups,)),
        offsets,
        [torch.randn(shape).mul(0.5).to(dtype) for shape in batch.core_shapes],
        None,
        "sum",
    )


def weighted(case):
    return replace(case, weights_L=torch.randn(len(case.indices_L)))


def assert_true(case, dtype=torch.float32, **options):
    output, core_grads, weights_grad = case.run(backend="triton", **options)
    true_output, true_core_grads, true_weights_grad = case.truth()
    actual, wanted = [output, *core_grads], [true_output, *true_core_grads]
    if true_weights_grad is not None:
        actual, wanted = [*actual, weights_grad], [*wanted, true_weights_grad]
    for position, (result, truth) in enumerate(zip(actual, wanted, strict=True)):
        error = (result.double() - truth).norm()
        assert error <= RELATIVE_ERROR[dtype] * truth.norm(), f"result {position}: {error}"


@pytest.mark.parametrize("num_lookups", ODD_SIZES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_poolings_and_odd_sizes(lookup_case, num_lookups, mode, with_weights):
    """Kernels were reported wrong for sizes that do not fill a block."""
    case = make_case(lookup_case, num_lookups, (2, 3, 2), 5, 3)
    assert_true(replace(weighted(case) if with_weights else case, mode=mode))


@pytest.mark.parametrize("rank", [1, 2, 8, 12, 14])
@pytest.mark.parametrize("col_factor", [1, 2, 4])
def test_small_ranks_and_column_factors(lookup_case, rank, col_factor):
    """Matrix units take no side below 16: users of small ranks met refused kernels."""
    case = make_case(lookup_case, 37, (col_factor,) * 3, rank, rank)
    assert_true(weighted(case))


@pytest.mark.parametrize(
    ("col_factors", "ranks"),
    [((1, 4, 2), (8, 12)), ((5, 3, 7), (14, 9)), ((4, 8, 8), (40, 72)), ((2, 2, 20), (33, 17))],
    ids=str,
)
def test_unequal_shapes(lookup_case, col_factors, ranks):
    """Blocks that do not divide, ranks above one block, q3 above the smallest block."""
    assert_true(weighted(make_case(lookup_case, 41, col_factors, *ranks)))


def test_wide_rows(lookup_case):
    """D = 2048: more columns than one program takes, more (q1, q2) lines than one block."""
    assert_true(weighted(make_case(lookup_case, 9, (8, 16, 16), 4, 6)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_half_precision_cores(lookup_case, dtype, mode):
    """Sums are fp32: only the rounding of the stored results may show."""
    case = make_case(lookup_case, 129, (2, 4, 2), 8, 8, dtype=dtype)
    assert_true(replace(weighted(case), mode=mode), dtype)
    assert_true(replace(case, mode=mode), dtype, output_dtype=torch.float32)


@pytest.mark.parametrize("num_lookups", [128, 129, 700])
@pytest.mark.parametrize("with_weights", [False, True])
def test_one_id_many_times(lookup_case, num_lookups, with_weights):
    """A row that occurs more often than one piece holds, alone and beside others."""
    case = make_case(lookup_case, num_lookups, (2, 2, 2), 3, 4)
    case.indices_L[7:] = 11
    assert_true(weighted(case) if with_weights else case)


def test_many_rows_of_one_core_row(lookup_case):
    """More prefixes and rows behind one row of core 0 and 2 than one piece holds."""
    batch = TableBatch(("t",), (280,), ((2, 70, 2),), (2, 1, 2), (2, 3), ("f",), (0,))
    cores = [torch.randn(shape) for shape in batch.core_shapes]
    ids, offsets = torch.randperm(280)[:150], torch.tensor([0, 100, 150])
    assert_true(lookup_case(batch, ids, offsets, cores, None, "sum"))


@pytest.mark.parametrize("num_bags", [0, 3])
def test_no_lookups(lookup_case, num_bags):
    case = make_case(lookup_case, 1, (2, 2, 2), 3, 4)
    empty = replace(
        case,
        indices_L=torch.empty(0, dtype=torch.int64),
        offsets=torch.zeros(3 * num_bags + 1, dtype=torch.int64),
        weights_L=torch.empty(0),
    )
    assert_true(empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_change_no_bit(lookup_case, dtype, monkeypatch):
    """Under a small workspace limit the batch is cut; a bag's sum and all gradients stay equal."""
    cuts = []
    monkeypatch.setattr(
        triton_lookup, "choose_cut", lambda *args: cuts.append(choose_cut(*args)) or cuts[-1]
    )
    case = weighted(make_case(lookup_case, 70, (32, 2, 2), 5, 6, dtype=dtype))
    whole = case.run(backend="triton")
    assert {cut.num_parts for cut in cuts} == {1}
    cut = case.run(backend="triton", workspace_bytes=smallest_workspace(case))
    assert all(cut.num_parts >= 3 for cut in cuts[-2:])
    assert torch.equal(whole[0], cut[0])
    assert all(map(torch.equal, whole[1], cut[1]))
    assert whole[2] is None or torch.equal(whole[2], cut[2])


def smallest_workspace(case):
    """Found as a user would: from the error that names the floor."""
    floor_bytes = 0
    while True:
        try:
            case.run(backend="triton", workspace_bytes=floor_bytes)
            return floor_bytes
        except ValueError as error:
            floor_bytes = int(str(error).split("floor of ")[1].split()[0])


def test_neighbours_change_no_bit(lookup_case):
    """A table's output and gradients are the same alone and beside another table."""
    both = make_case(lookup_case, 129, (2, 3, 2), 5, 6)
    batch, offsets = both.batch, both.offsets
    alone = replace(
        both,
        batch=TableBatch(("item",), (29,), (batch.row_factors[1],), batch.col_factors,
                         batch.ranks, ("i",), (0,)),
        indices_L=both.indices_L[offsets[4] : offsets[8]],
        offsets=offsets[4:9] - offsets[4],
        cores=[core[batch.row_factors[0][k] :] for k, core in enumerate(both.cores)],
    )  # fmt: skip
    grad_of_both = both.grad(torch.float32)
    dim = batch.embedding_dim
    own = slice(dim, 2 * dim)
    alone.grad = lambda dtype: grad_of_both[:, own].contiguous().to(dtype)
    output, core_grads, _ = both.run(backend="triton")
    own_output, own_core_grads, _ = alone.run(backend="triton")
    assert torch.equal(output[:, own], own_output)
    for k, (grad, own_grad) in enumerate(zip(core_grads, own_core_grads, strict=True)):
        assert torch.equal(grad[batch.row_factors[0][k] :], own_grad), k
