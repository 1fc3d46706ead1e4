"""The SIMD tiles against numpy: every height, width and tail, and not one element further."""

import numpy as np
import pytest
from ecorec_torchrec.kernels.tt_lookup import cpu_simd

LANES = cpu_simd.LANES
GUARD = np.float32(-7.25)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("columns", [1, 5, LANES, LANES + 3, 2 * LANES, 7 * LANES - 1, 9 * LANES])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 15, 16, 29])
@pytest.mark.parametrize("k", [0, 1, 13])
def test_matmul(rows, columns, k):
    rng = np.random.default_rng(rows * columns + k)
    a = rng.normal(size=(rows, k)).astype(np.float32)
    b = rng.normal(size=(k, columns)).astype(np.float32)
    c = np.full((rows, columns + 4), GUARD)
    start = rng.normal(size=(rows, columns)).astype(np.float32)
    c[:, :columns] = start
    sizes = (rows, columns, k)
    arguments = (address(c), columns + 4, address(a), k, 1, address(b), columns, *sizes)
    cpu_simd.matmul(*arguments, 1)
    np.testing.assert_allclose(c[:, :columns], start + a @ b, rtol=1e-5, atol=1e-5)
    cpu_simd.matmul(*arguments, 0)
    np.testing.assert_allclose(c[:, :columns], a @ b, rtol=1e-5, atol=1e-5)
    a_T = np.ascontiguousarray(a.T)
    by_columns = np.full_like(c, GUARD)
    cpu_simd.matmul(
        address(by_columns), columns + 4, address(a_T), 1, rows, address(b), columns, *sizes, 0
    )
    np.testing.assert_array_equal(by_columns, c)  # the layout of A changes no bit
    np.testing.assert_array_equal(c[:, columns:], GUARD)


def test_an_element_of_a_product_does_not_depend_on_the_tile_that_computes_it():
    """So that cutting a product in pieces changes no bit."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((31, 19), (19, 9 * LANES + 5)))
    whole, single = (np.full((31, b.shape[1]), GUARD) for _ in range(2))
    width = b.shape[1]
    cpu_simd.matmul(address(whole), width, address(a), 19, 1, address(b), width, 31, width, 19, 0)
    for i in range(31):
        for j in range(0, width, 3):
            cpu_simd.matmul(
                address(single[i, j:]), width, address(a[i:]), 19, 1, address(b[:, j:]), width,
                1, min(3, width - j), 19, 0,
            )  # fmt: skip
    np.testing.assert_array_equal(whole, single)


@pytest.mark.parametrize("columns", [1, LANES, 4 * LANES, 5 * LANES + 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_gather_sum(columns, weighted, count):
    rng = np.random.default_rng(columns + count)
    table = rng.normal(size=(9, columns + 1)).astype(np.float32)
    index = rng.integers(0, 9, max(count, 1)).astype(np.int32)
    weights = rng.normal(size=count).astype(np.float32)
    out = np.full(columns + 4, GUARD)
    arguments = (
        address(out), address(table), columns + 1, columns, address(index),
        address(weights) if weighted else 0, count, count,
    )  # fmt: skip
    factors = weights if weighted else np.ones(count, np.float32)
    wanted = (factors[:, None] * table[index[:count], :columns]).sum(0)
    cpu_simd.gather_sum(*arguments, 0)
    np.testing.assert_allclose(out[:columns], wanted, rtol=1e-5, atol=1e-5)
    cpu_simd.gather_sum(*arguments, 1)
    np.testing.assert_allclose(out[:columns], 2 * wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[columns:], GUARD)


@pytest.mark.parametrize("rows", [1, 4, 7, 16, 37])
@pytest.mark.parametrize("columns", [1, 4, 6, 16, 53])
def test_transpose(rows, columns):
    source = np.arange(rows * (columns + 2), dtype=np.float32).reshape(rows, -1)
    target = np.full((columns, rows + 3), GUARD)
    cpu_simd.transpose(address(target), rows + 3, address(source), columns + 2, rows, columns)
    np.testing.assert_array_equal(target[:, :rows], source[:, :columns].T)
    np.testing.assert_array_equal(target[:, rows:], GUARD)
