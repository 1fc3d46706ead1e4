"""to_dense and from_dense: exact row order, TT-SVD's error bound, pre-trained weights."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from ecorec_torchrec.tt import TTSpec, from_dense, init_cores_, to_dense

SPECS = [
    TTSpec(6, (2, 3), (2, 1), (2,)),
    TTSpec(1, (1, 1), (1, 1), (1,)),
    TTSpec(97, (4, 5, 5), (2, 3, 1), (3, 4)),
    TTSpec(50, (7, 3, 3), (1, 2, 5), (2, 5)),
    TTSpec(100, (2, 3, 4, 5), (2, 1, 3, 2), (2, 5, 3)),
]


def _cores(spec: TTSpec, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in spec.core_shapes]


def _row(cores: list[Tensor], spec: TTSpec, row_id: int) -> Tensor:
    """One row straight from the definition: digits, then a sum over all rank paths."""
    digits = []
    for p in reversed(spec.row_factors):
        row_id, digit = divmod(row_id, p)
        digits.insert(0, digit)
    row = torch.zeros(spec.col_factors, dtype=torch.float64)
    for columns in itertools.product(*map(range, spec.col_factors)):
        product = torch.ones(1, 1, dtype=torch.float64)
        for core, digit, column in zip(cores, digits, columns, strict=True):
            product = product @ core[digit, :, column, :]
        row[columns] = product[0, 0]
    return row.flatten()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_row_is_at_its_own_place(spec: TTSpec) -> None:
    """A merge that reshapes across the wrong axes gets some rows right and others not."""
    cores = _cores(spec)
    table = to_dense(cores, spec)
    assert table.shape == (spec.num_embeddings, spec.embedding_dim)
    expected = torch.stack([_row(cores, spec, i) for i in range(spec.num_embeddings)])
    torch.testing.assert_close(table, expected)


@pytest.mark.parametrize("chunk_bytes", [1, 2000])
def test_chunks_do_not_show(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[2]
    cores = _cores(spec)
    whole = to_dense(cores, spec)
    monkeypatch.setattr("ecorec_torchrec.tt.dense._CHUNK_BYTES", chunk_bytes)
    torch.testing.assert_close(to_dense(cores, spec), whole)


def test_out_may_have_another_type_and_strides() -> None:
    spec = SPECS[2]
    cores = _cores(spec, torch.bfloat16)
    out = torch.empty(spec.embedding_dim, spec.num_embeddings, dtype=torch.float32).T
    assert to_dense(cores, spec, out=out) is out
    torch.testing.assert_close(out, to_dense([core.float() for core in cores], spec))
    assert to_dense(cores, spec).dtype == torch.bfloat16


def test_to_dense_makes_only_the_rows_that_exist() -> None:
    """Cores that could address 10^12 rows, of a table of 50."""
    spec = TTSpec(50, (10**4, 10**4, 10**4), (1, 2, 1), (2, 2))
    assert to_dense(_cores(spec, torch.float32), spec).shape == (50, 2)


def test_to_dense_refuses() -> None:
    spec = SPECS[0]
    with pytest.raises(ValueError, match=r"\(\(2, 1, 2, 2\), \(3, 2, 1, 1\)\)"):
        to_dense(_cores(SPECS[3]), spec)
    with pytest.raises(ValueError, match=r"out has shape \(5, 2\), the table has \(6, 2\)"):
        to_dense(_cores(spec), spec, out=torch.empty(5, 2))
    with pytest.raises(TypeError, match="int64"):
        to_dense(_cores(spec), spec, out=torch.empty(6, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one dtype and device"):
        to_dense([_cores(spec)[0], _cores(spec, torch.float32)[1]], spec)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 7, 97, 1000])
def test_full_ranks_give_the_table_back(num_rows: int, num_cores: int) -> None:
    """Starting from a pre-trained table."""
    spec = TTSpec.suggest(num_rows, 16, rank=10**6, num_cores=num_cores)
    weight = torch.randn(num_rows, 16)
    cores, relative_error = from_dense(weight, spec)
    assert [tuple(core.shape) for core in cores] == list(spec.core_shapes)
    assert (to_dense(cores, spec) - weight).abs().max() < 1e-5
    assert relative_error < 1e-6


def _truncation_bound(weight: Tensor, spec: TTSpec) -> float:
    """Relative; from the singular values that each cut of textbook TT-SVD discards."""
    padded = torch.zeros(spec.num_padded_rows, spec.embedding_dim, dtype=torch.float64)
    padded[: len(weight)] = weight
    count = spec.num_cores
    axes = [axis for k in range(count) for axis in (k, count + k)]
    rest = padded.reshape(*spec.row_factors, *spec.col_factors).permute(axes)
    discarded = 0.0
    for p, left, q, right in spec.core_shapes[:-1]:
        _, values, rows = torch.linalg.svd(rest.reshape(left * p * q, -1), full_matrices=False)
        discarded += values[right:].square().sum().item()
        rest = values[:right, None] * rows[:right]
    return math.sqrt(discarded) / weight.norm().item()


@pytest.mark.parametrize(
    ("num_rows", "num_cores", "rank"),
    [(1000, 3, 8), (1000, 3, 32), (997, 3, 16), (960, 4, 12), (2000, 2, 20)],
)
def test_error_meets_the_truncation_bound(num_rows: int, num_cores: int, rank: int) -> None:
    spec = TTSpec.suggest(num_rows, 16, rank=rank, num_cores=num_cores)
    smooth = torch.sin(torch.linspace(0, 9, num_rows)[:, None] * torch.arange(1, 17))
    weight = smooth + 0.3 * torch.randn(num_rows, 16)
    cores, relative_error = from_dense(weight, spec)
    bound = _truncation_bound(weight.double(), spec)
    assert bound > 0.01
    assert 0.99 * bound <= relative_error <= 1.01 * bound
    measured = (to_dense(cores, spec) - weight).norm() / weight.norm()
    assert relative_error == pytest.approx(measured.item(), rel=1e-4)


def test_a_low_rank_table_is_found_again() -> None:
    spec = TTSpec.suggest(15**3, 32, rank=5)  # no padding: rows of zeros would add to the rank
    cores = [torch.empty(shape) for shape in spec.core_shapes]
    init_cores_(cores, spec, entry_std=1.0)
    weight = to_dense(cores, spec)
    again, relative_error = from_dense(weight, spec)
    assert relative_error < 1e-5
    torch.testing.assert_close(to_dense(again, spec), weight, rtol=0, atol=1e-4)
    sizes = [core.square().mean().sqrt().item() for core in again]
    assert max(sizes) < 1.001 * min(sizes)


def test_ranks_beyond_the_shape_are_filled_with_zeros() -> None:
    spec = TTSpec(10, (2, 5), (2, 1), (12,))  # a cut of 4 x 5 has at most rank 4
    weight = torch.randn(10, 2)
    cores, relative_error = from_dense(weight, spec)
    assert relative_error < 1e-6
    assert cores[0][..., 4:].abs().sum() == 0


def test_large_tables_take_the_float32_path(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TTSpec.suggest(1000, 16, rank=16)
    weight = torch.randn(1000, 16)
    _, in_float64 = from_dense(weight, spec)
    monkeypatch.setattr("ecorec_torchrec.tt.dense._FLOAT64_ENTRIES", 0)
    _, in_float32 = from_dense(weight, spec)
    assert in_float32 == pytest.approx(in_float64, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_cores_keep_the_type_of_the_table(dtype: torch.dtype) -> None:
    spec = TTSpec.suggest(100, 8, rank=100)
    weight = torch.randn(100, 8, dtype=torch.float64).to(dtype)
    cores, relative_error = from_dense(weight, spec)
    assert {core.dtype for core in cores} == {dtype}
    assert relative_error < 20 * torch.finfo(dtype).eps


def test_a_zero_table_has_no_error() -> None:
    cores, relative_error = from_dense(torch.zeros(10, 4), TTSpec.suggest(10, 4, rank=3))
    assert relative_error == 0.0
    assert all(core.isfinite().all() for core in cores)


def test_from_dense_refuses() -> None:
    spec = TTSpec.suggest(10, 4, rank=3)
    with pytest.raises(
        ValueError, match=r"weight has shape \(11, 4\), the spec describes \(10, 4\)"
    ):
        from_dense(torch.zeros(11, 4), spec)
    with pytest.raises(TypeError, match="int64"):
        from_dense(torch.zeros(10, 4, dtype=torch.int64), spec)
    weight = torch.zeros(10, 4)
    weight[9, 3] = torch.inf
    with pytest.raises(ValueError, match="1 entries that are not finite"):
        from_dense(weight, spec)
