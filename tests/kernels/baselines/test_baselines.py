"""The patterns of the papers compute what the reference computes: outputs and core gradients."""

import numpy as np
import pytest
import torch
from ecorec_torchrec.kernels.baselines import (
    EcoRec,
    ELRec,
    NumbaEcoRec,
    NumbaEcoRecTuned,
    NumbaGroupedPlain,
    Pattern,
    TTRec,
    baseline_embedding_bag,
)
from ecorec_torchrec.kernels.tt_lookup import tt_embedding_bag
from torch import Tensor

from ecorec_torchrec.tt import TTSpec

TORCH_PATTERNS = [TTRec(), TTRec(chunk_lookups=7), ELRec(), EcoRec(), EcoRec(3), EcoRec(None)]
NUMBA_PATTERNS = [NumbaEcoRec(), NumbaEcoRec(3), NumbaEcoRec(None), NumbaEcoRecTuned(),
                  NumbaGroupedPlain()]  # fmt: skip
SHAPES = [
    TTSpec(90, (4, 5, 5), (4, 4, 4), (16, 16)),
    TTSpec(90, (4, 5, 5), (4, 4, 8), (32, 64)),
    TTSpec(31, (2, 4, 4), (3, 2, 5), (7, 11)),  # odd factors and ranks, padding rows
    TTSpec(30, (2, 3, 5), (1, 3, 1), (1, 5)),
    TTSpec(1, (1, 1, 1), (2, 2, 2), (2, 2)),
    TTSpec(7, (1, 1, 7), (2, 1, 3), (3, 2)),
]


def batch_of(spec: TTSpec, num_bags: int, seed: int) -> tuple[Tensor, Tensor]:
    """Skewed ids in ragged bags, some of them empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, num_bags)
    ids = (rng.random(int(lengths.sum())) ** 3 * spec.num_embeddings).astype(np.int64)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype((np.int32, np.int64)[seed % 2])
    return torch.from_numpy(ids), torch.from_numpy(offsets)


def random_cores(spec: TTSpec, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in spec.core_shapes]


def gradients(output: Tensor, cores: list[Tensor]) -> list[Tensor]:
    weights = (torch.arange(output.numel()) * 0.7).sin().view(output.shape).to(output.dtype)
    return list(torch.autograd.grad((output * weights).sum(), cores))


def check_against_reference(
    spec: TTSpec, ids: Tensor, offsets: Tensor, pattern: Pattern, dtype: torch.dtype
) -> None:
    cores = random_cores(spec, dtype)
    doubles = [core.detach().double().requires_grad_() for core in cores]
    options = {"include_last_offset": True}
    output = baseline_embedding_bag(ids, offsets, cores, spec, pattern, **options)
    truth = tt_embedding_bag(ids, offsets, doubles, spec, backend="reference", **options)
    ours_and_truth = zip(
        [output.detach(), *gradients(output, cores)],
        [truth.detach(), *gradients(truth, doubles)],
        strict=True,
    )
    limit = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, expected in ours_and_truth:
        assert ours.shape == expected.shape and ours.dtype == dtype
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=limit * scale + 1e-30)


@pytest.mark.parametrize("spec", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", TORCH_PATTERNS, ids=repr)
def test_torch_patterns_equal_the_reference(spec: TTSpec, pattern: Pattern) -> None:
    for seed in range(2):
        check_against_reference(spec, *batch_of(spec, 12, seed), pattern, torch.float64)


@pytest.mark.parametrize("spec", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", NUMBA_PATTERNS, ids=repr)
def test_numba_patterns_equal_the_reference(spec: TTSpec, pattern: Pattern) -> None:
    for seed in range(2):
        check_against_reference(spec, *batch_of(spec, 12, seed), pattern, torch.float32)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "pattern",
    [EcoRec(100), NumbaEcoRec(), NumbaEcoRec(100), NumbaEcoRecTuned(), NumbaGroupedPlain()],
    ids=repr,
)
def test_large_batch_on_threads(pattern: Pattern, num_threads: int) -> None:
    """Large enough for several threads and micro-batches that cut prefixes."""
    spec = TTSpec(3000, (15, 10, 20), (2, 4, 4), (16, 8))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check_against_reference(spec, *batch_of(spec, 2000, 1), pattern, torch.float32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pattern", [*TORCH_PATTERNS, *NUMBA_PATTERNS], ids=repr)
@pytest.mark.parametrize("num_bags", [0, 3])
def test_no_ids(pattern: Pattern, num_bags: int) -> None:
    """The published micro-batching divides by zero when a batch has no ids."""
    spec = SHAPES[0]
    cores = random_cores(spec, torch.float32)
    offsets = torch.zeros(num_bags, dtype=torch.int64)
    output = baseline_embedding_bag(
        torch.empty(0, dtype=torch.int64), offsets, cores, spec, pattern
    )
    assert output.shape == (num_bags, spec.embedding_dim)
    assert all(not x.any() for x in [output, *gradients(output, cores)])


@pytest.mark.parametrize("pattern", [TTRec(), ELRec(), EcoRec()], ids=repr)
def test_one_id_many_times(pattern: Pattern) -> None:
    ids, offsets = torch.full((3000,), 17), torch.tensor([0, 1000, 1000, 3000])
    check_against_reference(SHAPES[0], ids, offsets, pattern, torch.float64)


@pytest.mark.parametrize(
    "pattern", [TTRec(), ELRec(), NumbaEcoRec(), NumbaGroupedPlain()], ids=repr
)
def test_an_id_out_of_range_is_refused(pattern: Pattern) -> None:
    spec = SHAPES[2]
    with pytest.raises(ValueError, match=r"31"):
        baseline_embedding_bag(
            torch.tensor([3, 31]), torch.tensor([0]), random_cores(spec, torch.float32), spec,
            pattern,
        )  # fmt: skip


def test_what_the_patterns_do_not_have_is_refused() -> None:
    spec, ids, offsets = SHAPES[0], torch.tensor([3]), torch.tensor([0])
    two_cores = TTSpec(20, (4, 5), (2, 2), (3,))
    with pytest.raises(ValueError, match="3 cores, the spec has 2"):
        cores = random_cores(two_cores, torch.float32)
        baseline_embedding_bag(ids, offsets, cores, two_cores, TTRec())
    with pytest.raises(TypeError, match="fp32 or all fp64"):
        baseline_embedding_bag(ids, offsets, random_cores(spec, torch.half), spec, TTRec())
    with pytest.raises(ValueError, match="fp32 CPU tensors"):
        baseline_embedding_bag(ids, offsets, random_cores(spec, torch.double), spec, NumbaEcoRec())
    with pytest.raises(ValueError, match="cores must have shapes"):
        baseline_embedding_bag(ids, offsets, random_cores(SHAPES[1], torch.float32), spec, EcoRec())
