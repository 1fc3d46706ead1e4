"""Every Triton kernel against materialised tables in float64: outputs and all gradients.

Buffers start as NaN (`poisoned_memory`). The interpreter computes bf16 arithmetic wrongly and cuts
bf16 stores off instead of rounding; the kernels widen bf16 to fp32 before computing, so only the
stores of results show it. It does not emulate tf32, nor the minimum sizes of `tl.dot`: those are
the compile check's.
"""

from dataclasses import replace

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_lookup import (
    batched_tt_embedding,
    batched_tt_embedding_bag,
    triton_engine,
    triton_lookup,
)
from ecorec_torchrec.kernels.tt_lookup.launch import LaunchConfig, dot_precision
from ecorec_torchrec.kernels.tt_lookup.triton_parts import choose_cut

RELATIVE_ERROR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# On a GPU half-precision cores meet operands that are cut to tf32, product after product.
GPU_RELATIVE_ERROR = RELATIVE_ERROR | {torch.float16: 4e-3, torch.bfloat16: 1e-2}
TF32_RELATIVE_ERROR = 5e-3
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


def relative_error(dtype, device):
    return (GPU_RELATIVE_ERROR if device == "cuda" else RELATIVE_ERROR)[dtype]


def assert_true(case, dtype=torch.float32, limit=None, **options):
    output, core_grads, weights_grad = case.run(backend="triton", **options)
    true_output, true_core_grads, true_weights_grad = case.truth()
    actual, wanted = [output, *core_grads], [true_output, *true_core_grads]
    if true_weights_grad is not None:
        actual, wanted = [*actual, weights_grad], [*wanted, true_weights_grad]
    for position, (result, truth) in enumerate(zip(actual, wanted, strict=True)):
        error = (result.double() - truth).norm()
        bound = (limit or relative_error(dtype, case.device)) * truth.norm()
        assert error <= bound, f"result {position}: {error}"


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


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_arithmetic(lookup_case, matmul_precision, precision):
    """IEEE products, and tf32 on GPUs that have it."""
    matmul_precision(precision)
    case = weighted(make_case(lookup_case, 129, (4, 4, 8), 16, 32))
    assert_true(case, limit=TF32_RELATIVE_ERROR if precision == "high" else None)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_sequences(lookup_case, device, ids_dtype, offsets_dtype):
    """Rows without pooling, features of unequal and of no length, ids and offsets of any width."""
    case = make_case(lookup_case, 90, (2, 3, 2), 5, 3)
    ids = case.indices_L.to(device, ids_dtype)
    starts = torch.tensor([0, 71, 71, 90], device=device, dtype=offsets_dtype)
    grad = torch.randn(90, case.batch.embedding_dim)
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        cores = [core.to(device, dtype, copy=True).requires_grad_() for core in case.cores]
        rows = batched_tt_embedding(ids, starts, cores, case.batch, backend=backend)
        results.append([rows, *torch.autograd.grad(rows, cores, grad.to(rows))])
    for result, truth in zip(*results, strict=True):
        assert (result.double() - truth).norm() <= 3e-6 * truth.norm()


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


def test_runs_change_no_bit(lookup_case):
    case = weighted(make_case(lookup_case, 300, (2, 3, 4), 5, 6))
    case.indices_L[20:180] = 11
    (output, core_grads, weights_grad), again = (case.run(backend="triton") for _ in range(2))
    assert torch.equal(output, again[0]) and torch.equal(weights_grad, again[2])
    assert all(map(torch.equal, core_grads, again[1]))


def test_every_candidate_of_a_search_computes_the_same(lookup_case, device):
    """Sides, warps and stages that `autotune.py` chooses from."""
    case = make_case(lookup_case, 12, (3, 4, 2), 33, 20)
    ids, offsets = case.indices_L.to(device), case.offsets.to(device)
    cores = [core.to(device) for core in case.cores]
    plan = index_plan(ids, offsets, case.batch)
    grad = case.grad(torch.float32).to(device)
    heuristic = LaunchConfig.choose(
        case.batch.col_factors, case.batch.ranks, dot_precision(torch.float32)
    )

    def run(config):
        arguments = (plan, cores, None, case.batch.num_features, False)
        output = triton_engine.forward(*arguments, torch.float32, None, config)
        core_grads, _ = triton_engine.backward(grad, *arguments, True, False, None, config)
        return [output, *core_grads]

    expected, candidates = run(heuristic), heuristic.candidates()
    assert candidates[0] == heuristic and len(candidates) == 8
    for config in candidates:
        results = run(config)
        if device == "cuda":
            assert all(map(torch.equal, results, run(config)))
        for result, wanted in zip(results, expected, strict=True):
            if device == "cpu":  # a GPU may add in another order within an instruction
                assert torch.equal(result, wanted), config
            assert (result - wanted).norm() <= 3e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_real_size(device, dtype):
    """Many tiles, pieces and bags: against the product chain of every lookup, in float64."""
    p, num_lookups, rank = (3, 50, 4), 200, 16
    if device == "cuda":
        p, num_lookups, rank = (100, 100, 100), 65_536, 32
    num_rows = p[0] * p[1] * p[2]
    batch = TableBatch(
        ("a", "b"), (num_rows,) * 2, (p, p), (4, 4, 4), (rank, rank), ("a", "b"), (0, 1)
    )
    ids = (torch.rand(num_lookups).pow(4) * num_rows).long().to(device)
    offsets = torch.linspace(0, num_lookups, 2 * (num_lookups // 20) + 1).long().to(device)
    values = [torch.randn(shape).mul(0.2).to(dtype) for shape in batch.core_shapes]
    results = []
    for backend, core_dtype in (("triton", dtype), ("reference", torch.float64)):
        cores = [core.to(device, core_dtype, copy=True).requires_grad_() for core in values]
        out = batched_tt_embedding_bag(ids, offsets, cores, batch, backend=backend)
        grad = torch.linspace(-1, 1, out.numel()).sin().view_as(out).to(out)
        results.append([out, *torch.autograd.grad(out, cores, grad)])
    limit = 4 * relative_error(dtype, device)  # sums of thousands of terms
    for result, truth in zip(*results, strict=True):
        assert (result.double() - truth).norm() <= limit * truth.norm()


@pytest.mark.gpu
def test_addresses_beyond_32_bits(device):
    """Row buffer and output of more than 2^31 elements."""
    dim, num_lookups = 256, 2**23 + 1_000
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of GPU memory, {free_bytes / 2**30:.0f} are free")
    p = (256, 256, 256)
    batch = TableBatch(("t",), (2**24,), (p,), (4, 8, 8), (2, 2), ("f",), (0,))
    cores = [torch.randn(s, device=device).requires_grad_() for s in batch.core_shapes]
    ids = torch.arange(num_lookups, device=device)
    starts = torch.tensor([0, num_lookups], device=device)
    rows = batched_tt_embedding(
        ids, starts, cores, batch, backend="triton", workspace_bytes=20 * 2**30
    )
    assert rows.numel() > 2**31 and rows.shape == (num_lookups, dim)
    last = ids[-500:]
    wanted = batched_tt_embedding(
        last, torch.tensor([0, 500], device=device), cores, batch, backend="reference"
    )
    torch.testing.assert_close(rows[-500:], wanted)
