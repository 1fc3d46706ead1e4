"""Every backend equals materialised tables and `embedding_bag` in float64: outputs, gradients."""

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch

NUM_RANDOM_CASES = 300

# The numba kernels compile once per (col_factors, ranks): random cases share these.
NUMBA_SHAPES = [
    ((4, 4, 4), (16, 16)),
    ((3, 5, 1), (7, 5)),
    ((2, 3), (9,)),
    ((2, 1, 3, 2), (3, 8, 4)),
]


def assert_close(name, actual, expected, relative_error):
    """Relative RMS error; refuses NaN."""
    if expected is None:
        assert actual is None, name
        return
    assert actual.shape == expected.shape, name
    error = (actual.double() - expected.double()).norm()
    assert error <= relative_error * expected.norm() + 1e-12, (
        f"{name}: {error} of {expected.norm()}"
    )


def assert_true_to(case, relative_error, **options):
    output, core_grads, weights_grad = case.run(**options)
    true_output, true_core_grads, true_weights_grad = case.truth()
    assert_close("output", output, true_output, relative_error)
    for k, (grad, true_grad) in enumerate(zip(core_grads, true_core_grads, strict=True)):
        assert_close(f"gradient of core {k}", grad, true_grad, relative_error)
    assert_close("weights gradient", weights_grad, true_weights_grad, relative_error)


@pytest.mark.parametrize("seed", range(NUM_RANDOM_CASES))
def test_random_cases_in_float64(random_case, seed):
    """2 to 4 cores, odd factors and ranks, shared tables, empty bags, both integer types."""
    case = random_case(seed)
    assert_true_to(case, 1e-12, backend="reference")
    assert_true_to(case, 1e-12, backend="cpu")  # numba has no float64: PyTorch, grouped


@pytest.mark.parametrize("seed", range(NUM_RANDOM_CASES))
def test_random_cases_in_float32(random_case, seed):
    case = random_case(seed, torch.float32, NUMBA_SHAPES)
    assert_true_to(case, 2e-5, backend="cpu")


@pytest.mark.parametrize("seed", range(0, NUM_RANDOM_CASES, 10))
def test_random_cases_without_numba(random_case, without_numba, seed):
    assert_true_to(random_case(seed, torch.float32), 2e-5, backend="cpu")


def one_table_case(lookup_case, ids, num_bags, shape, weights=None, mode="sum"):
    num_embeddings, row_factors, col_factors, ranks = shape
    batch = TableBatch(("t",), (num_embeddings,), (row_factors,), col_factors, ranks, ("f",), (0,))
    cores = [torch.randn(shape) for shape in batch.core_shapes]
    offsets = torch.linspace(0, len(ids), num_bags + 1).long() if num_bags else torch.tensor([0])
    return lookup_case(batch, torch.tensor(ids).long(), offsets, cores, weights, mode)


EDGE_SHAPES = {
    "one row": (1, (1, 1, 1), (2, 2, 2), (3, 3)),
    "one row, padded": (1, (2, 2, 2), (2, 2, 2), (3, 3)),
    "prime rows": (10_007, (21, 22, 22), (2, 3, 5), (4, 4)),
    "rank 1": (60, (3, 4, 5), (3, 1, 3), (1, 1)),
    "one column": (60, (3, 4, 5), (1, 1, 1), (4, 4)),
    "wide": (60, (3, 4, 5), (8, 16, 16), (4, 6)),
}


@pytest.mark.parametrize("name", EDGE_SHAPES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_edge_shapes(lookup_case, name, backend):
    """D = 2048 is the "wide" shape: no part of a long row may stay zero."""
    num_embeddings = EDGE_SHAPES[name][0]
    ids = torch.randint(num_embeddings, (40,)).tolist() + [num_embeddings - 1]
    case = one_table_case(lookup_case, ids, 9, EDGE_SHAPES[name], torch.randn(41))
    assert_true_to(case, 2e-5, backend=backend)
    output, _, _ = case.run(backend=backend)
    assert (output != 0).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_id_ten_thousand_times(lookup_case, backend):
    """Its gradient is the sum over all occurrences, as a dense table's.

    float32 adds 10,000 equal numbers one after the other, each sum rounded the same way.
    """
    for num_bags in (1, 100, 10_000):
        case = one_table_case(lookup_case, [17] * 10_000, num_bags, EDGE_SHAPES["prime rows"])
        assert_true_to(case, 10_000 * torch.finfo(torch.float32).eps, backend=backend)
        case.cores = [core.double() for core in case.cores]
        assert_true_to(case, 1e-12, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("num_bags", [0, 128])
def test_no_ids(lookup_case, backend, num_bags):
    """Only empty bags, or none at all: zeros out, zero gradients, no crash."""
    case = one_table_case(lookup_case, [], num_bags, EDGE_SHAPES["prime rows"], torch.empty(0))
    output, core_grads, weights_grad = case.run(backend=backend)
    assert output.shape == (num_bags, 30)
    assert not output.any()
    assert not any(grad.any() for grad in core_grads)
    assert weights_grad.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_half_precision_cores_are_summed_in_float32(lookup_case, dtype, backend):
    """1,000 rows in a bag: sums in half precision would be off by several per cent."""
    ids = torch.randint(10_007, (2000,)).tolist()
    case = one_table_case(lookup_case, ids, 2, EDGE_SHAPES["prime rows"], mode="mean")
    case.cores = [core.to(dtype) for core in case.cores]
    output, core_grads, _ = case.run(backend=backend, output_dtype=torch.float32)
    true_output, true_core_grads, _ = case.truth()
    assert output.dtype == torch.float32
    assert_close("output", output, true_output, 1e-5)
    for grad, true_grad in zip(core_grads, true_core_grads, strict=True):
        assert grad.dtype == dtype
        assert_close("gradient", grad, true_grad, torch.finfo(dtype).eps)
    assert case.run(backend=backend)[0].dtype == dtype
