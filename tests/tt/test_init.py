"""Initial cores: the spread of the entries is what is asserted, not that of the cores."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from ecorec_torchrec.tt import (
    TTSpec,
    default_entry_std,
    entry_moments,
    init_cores_,
    to_dense,
)


def _cores(spec: TTSpec, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full(shape, torch.nan, dtype=dtype) for shape in spec.core_shapes]


def _table(spec: TTSpec, seed: int = 0, **wishes: object) -> Tensor:
    cores = _cores(spec)
    init_cores_(cores, spec, generator=torch.Generator().manual_seed(seed), **wishes)  # type: ignore[arg-type]
    return to_dense(cores, spec)


@pytest.mark.parametrize("method", ["normal", "sampled_gaussian"])
@pytest.mark.parametrize("rank", [1, 8, 16, 64])
@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_entries_have_the_wanted_spread_whatever_the_rank(
    num_cores: int, rank: int, method: str
) -> None:
    """Initialisations that leave the rank out give entries hundreds of times too large or small."""
    spec = TTSpec.suggest(5000, 16, rank=rank, num_cores=num_cores)
    table = _table(spec, entry_std=0.05, method=method)
    assert table.std().item() == pytest.approx(0.05, rel=0.1)
    assert abs(table.mean().item()) < 0.01
    assert (table.abs().amax(dim=1) > 0).all()  # no zero row


def test_the_default_spread_is_torchrecs_but_never_below_a_hundredth() -> None:
    assert default_entry_std(10) == 1 / math.sqrt(30)
    assert default_entry_std(40_000_000) == 0.01
    assert _table(TTSpec.suggest(200, 8, rank=8)).std().item() == pytest.approx(0.0408, rel=0.05)
    assert _table(TTSpec.suggest(50_000, 8, rank=8)).std().item() == pytest.approx(0.01, rel=0.05)


def test_equal_seeds_give_equal_cores() -> None:
    spec = TTSpec.suggest(100, 8, rank=4)
    assert torch.equal(_table(spec, seed=1), _table(spec, seed=1))
    assert not torch.equal(_table(spec, seed=1), _table(spec, seed=2))


def test_a_generator_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    _table(TTSpec.suggest(100, 8, rank=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_sampled_gaussian_leaves_out_the_middle() -> None:
    spec = TTSpec.suggest(1000, 16, rank=8)
    cores = _cores(spec)
    init_cores_(cores, spec, method="sampled_gaussian", generator=torch.Generator().manual_seed(0))
    for core in cores:
        size = core.abs()
        # |x| >= 2 with E[x^2 given |x| >= 2] = 5.7457; the scale drops out of the ratio.
        assert (size.amin() / size.square().mean().sqrt()).item() == pytest.approx(
            2 / math.sqrt(5.7457), rel=0.06
        )
        assert 0.4 < (core > 0).float().mean() < 0.6


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.2), (-2.0, 0.1), (0.01, 0.05)])
def test_mean_and_spread_together(rank: int, mean: float, std: float) -> None:
    table = _table(TTSpec.suggest(20_000, 16, rank=rank), entry_mean=mean, entry_std=std)
    assert table.mean().item() == pytest.approx(mean, abs=0.15 * std)
    assert table.std().item() == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
@pytest.mark.parametrize("rank", [1, 4])
def test_a_constant_is_exact_and_still_trains(value: float, rank: int) -> None:
    """All-zero cores would have all-zero gradients for ever."""
    spec = TTSpec.suggest(30, 8, rank=rank)
    cores = _cores(spec)
    init_cores_(cores, spec, entry_mean=value, entry_std=0.0)
    assert (to_dense(cores, spec) == value).all()
    for core in cores:
        core.requires_grad_()
    first, second, third = cores
    row = first[0].reshape(-1, rank) @ second[0].reshape(rank, -1)
    row = row.reshape(-1, rank) @ third[0].reshape(rank, -1)
    row.sum().backward()
    assert third.grad is not None and third.grad.abs().sum() > 0
    for channel in range(rank):
        assert third.grad[0, channel].abs().sum() > 0


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 1), (1, 8), (2, 3), (7, 4), (13, 7)])
def test_tiny_and_degenerate_tables(num_rows: int, dim: int) -> None:
    spec = TTSpec.suggest(num_rows, dim, rank=8)
    assert _table(spec, entry_std=0.3).square().mean().sqrt() < 3
    assert (_table(spec, entry_mean=0.25, entry_std=0.0) == 0.25).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_storage_types(dtype: torch.dtype) -> None:
    spec = TTSpec.suggest(1000, 16, rank=8)
    cores = _cores(spec, dtype)
    init_cores_(cores, spec, entry_std=0.05, generator=torch.Generator().manual_seed(0))
    assert {core.dtype for core in cores} == {dtype}
    assert to_dense(cores, spec).double().std().item() == pytest.approx(0.05, rel=0.05)


def test_views_of_a_larger_tensor_are_filled_in_place() -> None:
    spec = TTSpec.suggest(100, 8, rank=4)
    flat = [torch.zeros(3 * shape[0], *shape[1:]) for shape in spec.core_shapes]
    views = [leaf[len(leaf) // 3 : 2 * len(leaf) // 3] for leaf in flat]
    init_cores_(views, spec)
    for leaf in flat:
        third = len(leaf) // 3
        assert leaf[third : 2 * third].abs().sum() > 0
        assert leaf[:third].abs().sum() == 0 == leaf[2 * third :].abs().sum()


def test_meta_cores_are_left_alone() -> None:
    spec = TTSpec.suggest(100, 8, rank=4)
    init_cores_([torch.empty(shape, device="meta") for shape in spec.core_shapes], spec)


def test_refuses_what_does_not_fit() -> None:
    spec = TTSpec(100, (10, 10), (2, 4), (3,))
    cores = _cores(spec)
    with pytest.raises(ValueError, match=r"entry_std=-1"):
        init_cores_(cores, spec, entry_std=-1.0)
    with pytest.raises(ValueError, match="entry_mean=nan"):
        init_cores_(cores, spec, entry_mean=math.nan)
    with pytest.raises(ValueError, match="'uniform' is neither"):
        init_cores_(cores, spec, method="uniform")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(10, 1, 2, 3\)\).*needs \(\(10, 1, 2, 3\), \(10, 3"):
        init_cores_([cores[0], cores[0]], spec)
    with pytest.raises(TypeError, match="int64"):
        init_cores_([core.nan_to_num(0).long() for core in cores], spec)
    assert all(core.isnan().all() for core in cores)


def test_moments_of_a_table_config() -> None:
    default = partial(torch.nn.init.uniform_, a=-0.1, b=0.1)  # what TorchRec fills in for N = 100
    assert entry_moments("t", 100, 8, init_fn=default) == (0.0, None)
    assert entry_moments("t", 100, 8) == (0.0, None)
    bounds = {"weight_init_min": 1.0, "weight_init_max": 4.0}
    assert entry_moments("t", 100, 8, **bounds) == (2.5, 3 / math.sqrt(12))
    filled = partial(torch.nn.init.uniform_, a=1.0, b=4.0)
    assert entry_moments("t", 100, 8, init_fn=filled, **bounds) == (2.5, 3 / math.sqrt(12))
    assert entry_moments("t", 100, 8, weight_init_min=0.0)[0] == pytest.approx(0.05)
    assert entry_moments("t", 100, 8, init_fn=torch.nn.init.ones_, **bounds) == (1.0, 0.0)


def test_moments_of_a_custom_function() -> None:
    state = torch.get_rng_state()
    mean, std = entry_moments(
        "t", 10**9, 64, init_fn=partial(torch.nn.init.normal_, mean=2.0, std=0.3)
    )
    assert (mean, std) == pytest.approx((2.0, 0.3), rel=0.01)
    xavier = entry_moments("t", 100, 20, init_fn=torch.nn.init.xavier_uniform_)
    assert xavier[1] == pytest.approx(math.sqrt(2 / 120), rel=0.05)
    assert torch.equal(torch.get_rng_state(), state)


def test_unusable_wishes_name_the_table() -> None:
    def pretrained(weight: Tensor) -> None:
        weight.copy_(torch.ones(10_000, 8))

    with pytest.raises(ValueError, match=r"table 'users'.*\(4096, 8\).*use from_dense"):
        entry_moments("users", 10_000, 8, init_fn=pretrained)
    with pytest.raises(ValueError, match=r"table 'users'.*not finite"):
        entry_moments("users", 10, 8, init_fn=lambda weight: weight.fill_(torch.inf))
    with pytest.raises(ValueError, match=r"table 'users'.*=2.0 and weight_init_max=1.0"):
        entry_moments("users", 10, 8, weight_init_min=2.0, weight_init_max=1.0)
