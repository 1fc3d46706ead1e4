"""TTSpec: validation with the numbers in the message, and suggested shapes."""

import math
import pickle
import random
import time

import numpy as np
import pytest
import torch

from ecorec_torchrec.tt import TTSpec


def test_shapes_and_sizes() -> None:
    spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (16, 16))
    assert spec.num_cores == 3
    assert spec.embedding_dim == 64
    assert spec.core_shapes == ((100, 1, 4, 16), (100, 16, 4, 16), (100, 16, 4, 1))
    assert spec.num_parameters == sum(math.prod(shape) for shape in spec.core_shapes)
    assert spec.nbytes() == 4 * spec.num_parameters
    assert spec.nbytes(torch.bfloat16) == 2 * spec.num_parameters


def test_is_a_value() -> None:
    spec = TTSpec(10, [2, 5], [2, 2], [3])  # type: ignore[arg-type]
    assert spec == TTSpec(np.int64(10), (2, 5), np.array([2, 2]), (np.int32(3),))  # type: ignore[arg-type]
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))
    assert spec.ranks == (3,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, (10,), (4,), ()), ValueError, r"at least 2 cores.*\(10,\)"),
        ((10, (2, 5), (4,), (3,)), ValueError, r"\(2, 5\) and col_factors=\(4,\).*2 and 1"),
        ((10, (2, 5), (2, 2), (3, 3)), ValueError, r"2 cores have 1 inner ranks.*\(3, 3\)"),
        ((10, (2, 5), (2, 0), (3,)), ValueError, r"col_factors must be positive.*\(2, 0\)"),
        ((10, (2, 5), (2, 2), (-1,)), ValueError, r"ranks must be positive.*\(-1,\)"),
        ((11, (2, 5), (2, 2), (3,)), ValueError, r"num_embeddings=11 must lie in 1..10"),
        ((0, (2, 5), (2, 2), (3,)), ValueError, r"num_embeddings=0 must lie in 1..10"),
        ((10, (2**32, 2**31), (2, 2), (3,)), ValueError, r"9223372036854775808 rows"),
        ((10, (2, 5.0), (2, 2), (3,)), TypeError, r"row_factors must be an integer, got 5.0"),
        ((10, (2, 5), (2, 2), (True,)), TypeError, r"ranks must be an integer, got True"),
        ((10, (2, 5), 4, (3,)), TypeError, r"col_factors must be a sequence.*4"),
    ],
)
def test_refuses_what_does_not_fit(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TTSpec(*arguments)


@pytest.mark.parametrize(
    ("dim", "factors"),
    [(64, (4, 4, 4)), (128, (4, 4, 8)), (32, (2, 4, 4)), (256, (4, 8, 8)), (96, (4, 4, 6))]
    + [(1, (1, 1, 1)), (7, (1, 1, 7)), (100, (4, 5, 5)), (2048, (8, 16, 16)), (127, (1, 1, 127))],
)
def test_suggested_column_factors(dim: int, factors: tuple[int, ...]) -> None:
    assert TTSpec.suggest(1000, dim, rank=4).col_factors == factors


@pytest.mark.parametrize("num_cores", [2, 3, 4, 5])
def test_the_dimension_is_never_rounded(num_cores: int) -> None:
    for dim in range(1, 300):
        spec = TTSpec.suggest(500, dim, rank=2, num_cores=num_cores)
        assert spec.embedding_dim == dim
        assert list(spec.col_factors) == sorted(spec.col_factors)


def test_suggested_row_factors() -> None:
    assert TTSpec.suggest(1_000_000, 64, rank=16).row_factors == (100, 100, 100)
    assert TTSpec.suggest(10**12, 64, rank=16).row_factors == (10_000,) * 3
    assert TTSpec.suggest(1, 64, rank=16).row_factors == (1, 1, 1)
    assert TTSpec.suggest(2, 64, rank=16).row_factors == (1, 1, 2)
    assert TTSpec.suggest(100, 64, rank=16, num_cores=2).row_factors == (10, 10)


@pytest.mark.parametrize(
    ("low", "most_padding", "most_stretch"),
    [(1, 0.2, 15), (1_000, 0.02, 3), (100_000, 0.005, 1.5), (10_000_000, 0.001, 1.2)],
)
def test_row_factors_cover_every_row_with_little_padding(
    low: int, most_padding: float, most_stretch: float
) -> None:
    draw = random.Random(low)
    for num_rows in (draw.randrange(low, 10 * low) for _ in range(50)):
        spec = TTSpec.suggest(num_rows, 8, rank=2)
        assert num_rows <= spec.num_padded_rows <= num_rows * (1 + most_padding)
        assert max(spec.row_factors) <= most_stretch * min(spec.row_factors)


@pytest.mark.parametrize("num_rows", [2**61 - 1, 963_761_198_400, 10**12 + 39, 2**40])
def test_suggest_is_fast_for_primes_and_very_composite_numbers(num_rows: int) -> None:
    """Choosers that list all factorisations take minutes for such row counts."""
    start_s = time.perf_counter()
    for num_cores in (2, 3, 4, 6, 12):
        spec = TTSpec.suggest(num_rows, 720_720, rank=8, num_cores=num_cores)
        assert spec.num_padded_rows < 1.001 * num_rows or num_cores > 6
    assert time.perf_counter() - start_s < 2


def test_ranks_are_cut_to_what_the_shape_can_use() -> None:
    spec = TTSpec.suggest(7, 4, rank=1000)
    assert (spec.row_factors, spec.col_factors) == ((1, 1, 7), (1, 2, 2))
    assert spec.ranks == (1, 2)  # min(1*1, 1*2*7*2), min(1*1*2, 7*2)


@pytest.mark.parametrize("max_bytes", [10_000, 100_000, 460_800, 1 << 20, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_bytes_gives_the_largest_rank_that_fits(max_bytes: int, dtype: torch.dtype) -> None:
    spec = TTSpec.suggest(1_000_000, 64, max_bytes=max_bytes, dtype=dtype)
    rank = spec.ranks[0]
    assert spec.nbytes(dtype) <= max_bytes
    assert rank < 8 or rank % 8 == 0
    more = TTSpec.suggest(1_000_000, 64, rank=rank + (1 if rank < 7 else 8))
    assert more.nbytes(dtype) > max_bytes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of rank and max_bytes"),
        ({"rank": 4, "max_bytes": 4}, ValueError, "rank=4, max_bytes=4"),
        ({"rank": 0}, ValueError, "rank=0 must be at least 1"),
        ({"rank": True}, TypeError, "rank must be an integer, got True"),
        ({"rank": 4, "num_cores": 1}, ValueError, "num_cores=1"),
        ({"max_bytes": 4799}, ValueError, "max_bytes=4799 is below the 4800 bytes"),
        ({"rank": 4, "num_embeddings": 0}, ValueError, "num_embeddings=0 must be at least 1"),
        ({"rank": 4, "embedding_dim": -8}, ValueError, "embedding_dim=-8 must be at least 1"),
        ({"rank": 4, "num_embeddings": 1e6}, TypeError, "num_embeddings must be an integer"),
    ],
)
def test_suggest_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TTSpec.suggest(**({"num_embeddings": 1_000_000, "embedding_dim": 64} | arguments))
