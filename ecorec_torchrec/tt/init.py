"""Initial cores: what matters to training is the spread of the table's entries, not of the cores.

An entry is a sum over prod(r) rank paths of products of K core elements, so cores of standard
deviation s give entries of sqrt(prod(r)) * s^K: a fixed s makes tables of one rank explode and
those of another untrainable. Here the wish is stated for the entries, and s follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .spec import TTSpec

# Entries of 1 / sqrt(3N), the spread of TorchRec's uniform default, leave the gradient of a core
# (a product of the other cores) too small to train large tables with SGD or Adagrad.
MIN_DEFAULT_ENTRY_STD = 0.01

# Rows of the block that a custom init_fn is tried on.
_SAMPLE_ROWS = 4096

# TT-Rec draws core elements from N(0, 1) until they are at least this far from zero.
_SAMPLED_GAUSSIAN_CUT = 2.0

InitMethod = Literal["normal", "sampled_gaussian"]


def default_entry_std(num_embeddings: int) -> float:
    """max(1 / sqrt(3N), 0.01): TorchRec's default spread, but never too small to train."""
    return max(1 / math.sqrt(3 * num_embeddings), MIN_DEFAULT_ENTRY_STD)


@torch.no_grad()
def init_cores_(
    cores: Sequence[Tensor],
    spec: TTSpec,
    *,
    entry_std: float | None = None,
    entry_mean: float = 0.0,
    method: InitMethod = "normal",
    generator: torch.Generator | None = None,
) -> None:
    """Fills `cores` so that the entries of the table have the wanted mean and spread.

    Noise is drawn, its root mean square over the whole table is computed from the cores (exactly,
    through r x r Gram matrices), and the cores are scaled to meet `entry_std`; all cores get the
    same scale. A mean other than 0 takes one rank channel, since a constant table has rank 1; where
    a rank is 1 the parts on both sides of it are given independent relative noise instead. With
    `entry_std=0` the table is exactly constant and still trains: only the last core's noise is
    zero, as in a freshly added low-rank adapter.

    Args:
        cores: K tensors of `spec.core_shapes`, any floating dtype and device; filled in place.
        spec: the table's shape.
        entry_std: standard deviation of the entries; `default_entry_std(N)` when None.
        entry_mean: mean of the entries.
        method: "normal" draws core elements from a Gaussian. "sampled_gaussian" is TT-Rec's: a
            Gaussian without its middle, |x| >= 2, which makes entries, as sums of products of
            elements, less peaked at zero.
        generator: source of the noise; cores of one seed are equal on every device. The default
            generator of the cores' device when None.

    Raises:
        TypeError: the cores are not floating point.
        ValueError: shapes do not fit the spec, `entry_std` is negative, a number is not finite, or
            `method` is neither of the two.

    Source: rank-normalised form of the initialisations in "TT-Rec: Tensor Train Compression for
    Deep Learning Recommendation Models" (MLSys 2021), whose scale leaves the ranks out.

    Example::

        spec = TTSpec.suggest(1_000_000, 64, rank=16)
        cores = [torch.empty(shape) for shape in spec.core_shapes]
        init_cores_(cores, spec, entry_std=0.05, generator=torch.Generator().manual_seed(1))
        to_dense(cores, spec).std()   # 0.05
    """
    spec.check_cores(cores)
    if not cores[0].is_floating_point():
        raise TypeError(f"cores must be floating point, got {cores[0].dtype}")
    std = default_entry_std(spec.num_embeddings) if entry_std is None else entry_std
    if not (math.isfinite(std) and std >= 0 and math.isfinite(entry_mean)):
        raise ValueError(f"entry_std={std} must be finite and >= 0, entry_mean={entry_mean} finite")
    if method not in ("normal", "sampled_gaussian"):
        raise ValueError(f"method={method!r} is neither 'normal' nor 'sampled_gaussian'")
    if cores[0].is_meta:
        return
    segments = _split_at_rank_one(cores)
    constant = std == 0
    if constant:
        std = default_entry_std(spec.num_embeddings)
    for segment in segments:
        last = segment is segments[-1]
        if entry_mean == 0:
            mean, noise = 0.0, std ** (1 / len(segments))
            silent = constant and last
        else:
            mean = entry_mean if last else 1.0
            spread = (1 + (std / entry_mean) ** 2) ** (1 / len(segments))
            noise, silent = abs(mean) * math.sqrt(spread - 1), constant
        _init_segment_(segment, mean, noise, silent, method, generator)


def entry_moments(
    table_name: str,
    num_embeddings: int,
    embedding_dim: int,
    *,
    init_fn: Callable[[Tensor], Tensor | None] | None = None,
    weight_init_min: float | None = None,
    weight_init_max: float | None = None,
) -> tuple[float, float | None]:
    """Mean and standard deviation that a table's settings ask of its entries, for `init_cores_`.

    The arguments are those of a TorchRec table config. A custom `init_fn` wins, as in TorchRec:
    it is applied to a float32 block of min(N, 4096) rows of the table's own width, and the block's
    mean and spread are matched (a constant exactly), its other properties are not. Functions whose
    spread depends on the number of rows, such as Xavier's, see the block's. To start from
    pre-trained weights use `from_dense`. The global random state is left as it was.

    TorchRec fills `init_fn` in when the user gives none, with a `functools.partial` of
    `torch.nn.init.uniform_` between the config's bounds; such a partial counts as the bounds.

    Returns:
        (mean, std); std is None when nothing was asked for.

    Raises:
        ValueError: bounds in the wrong order, or an `init_fn` that fails on the block or leaves
            numbers in it that are not finite.

    Example::

        entry_moments("t", 1000, 64)                                            # (0.0, None)
        entry_moments("t", 1000, 64, weight_init_min=0.0, weight_init_max=1.0)  # (0.5, 0.2887)
        entry_moments("t", 1000, 64, init_fn=torch.nn.init.ones_)               # (1.0, 0.0)
    """
    bound = math.sqrt(1 / num_embeddings)
    low = -bound if weight_init_min is None else weight_init_min
    high = bound if weight_init_max is None else weight_init_max
    if init_fn is not None and not is_uniform_between(init_fn, low, high):
        return _sampled_moments(table_name, num_embeddings, embedding_dim, init_fn)
    if weight_init_min is None and weight_init_max is None:
        return 0.0, None
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(
            f"table {table_name!r}: weight_init_min={low} and weight_init_max={high} "
            "must be finite and in order"
        )
    return (low + high) / 2, (high - low) / math.sqrt(12)


def is_uniform_between(init_fn: Callable[[Tensor], Tensor | None], low: float, high: float) -> bool:
    """Whether an `init_fn` is the one that TorchRec fills in for bounds and no function."""
    keywords = getattr(init_fn, "keywords", None)
    function = getattr(init_fn, "func", None)
    return function is torch.nn.init.uniform_ and keywords == {"a": low, "b": high}


def _sampled_moments(
    table_name: str,
    num_embeddings: int,
    embedding_dim: int,
    init_fn: Callable[[Tensor], Tensor | None],
) -> tuple[float, float]:
    shape = (min(num_embeddings, _SAMPLE_ROWS), embedding_dim)
    block = torch.zeros(shape, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            init_fn(block)
        except Exception as error:
            raise ValueError(
                f"table {table_name!r}: init_fn failed on a sample block of {shape} "
                f"({error}). A TT table takes mean and spread from init_fn; for pre-trained "
                "weights use from_dense"
            ) from error
    if not block.isfinite().all():
        raise ValueError(f"table {table_name!r}: init_fn gave entries that are not finite")
    if block.min() == block.max():
        return float(block[0, 0]), 0.0
    block = block.double()
    return float(block.mean()), float(block.std(correction=0))


def _split_at_rank_one(cores: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of cores between ranks of 1: the table is the outer product of their tables.

    Runs that stand for one number only are joined to a neighbour's scale by setting them to 1.
    """
    runs: list[list[Tensor]] = [[]]
    for core in cores:
        runs[-1].append(core)
        if core.shape[3] == 1:
            runs.append([])
    runs.pop()
    wide = [run for run in runs if any(core.numel() > 1 for core in run)]
    if not wide:
        wide = runs[-1:]
    for run in runs:
        if not any(run is kept for kept in wide):
            for core in run:
                core.fill_(1)
    return wide


def _init_segment_(
    segment: Sequence[Tensor],
    mean: float,
    std: float,
    silent: bool,
    method: InitMethod,
    generator: torch.Generator | None,
) -> None:
    """Fills cores whose inner ranks are at least 2 (or a single core) with mean + noise.

    The mean runs through channel 0 of every rank, the noise through the others, so that they add
    without mixed terms. `silent` zeroes the noise of the last core.
    """
    noise = [_draw(core, mean != 0, method, generator) for core in segment]
    rms = _root_mean_square(noise)
    scale = (std / rms) ** (1 / len(segment)) if rms > 0 else 0.0
    noise = [core.mul_(scale) for core in noise]
    if silent:
        noise[-1].zero_()
    if mean == 0:
        for core, values in zip(segment, noise, strict=True):
            core.copy_(values)
    elif len(segment) == 1:
        segment[0].copy_(noise[0].add_(mean))
    else:
        for k, (core, values) in enumerate(zip(segment, noise, strict=True)):
            left, right = int(k > 0), int(k < len(segment) - 1)
            core.zero_()
            core[:, left:, :, right:] = values.to(core)
            core[:, 0, :, 0] = mean if right == 0 else 1.0


def _draw(
    core: Tensor, spare_channel: bool, method: InitMethod, generator: torch.Generator | None
) -> Tensor:
    """Noise for one core; without channel 0 of its inner ranks when that one is for the mean."""
    p, left, q, right = core.shape
    if spare_channel:
        left, right = max(1, left - 1), max(1, right - 1)
    device = core.device if generator is None else generator.device
    dtype = torch.promote_types(core.dtype, torch.float32)
    shape = (p, left, q, right)
    if method == "normal":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    # Equal in distribution to drawing until |x| >= cut: the inverse of the lower tail's
    # distribution, with a random sign.
    uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    sign = torch.rand(shape, generator=generator, device=device) < 0.5
    tail = math.erfc(_SAMPLED_GAUSSIAN_CUT / math.sqrt(2)) / 2
    values = torch.special.ndtri(uniform.neg_().add_(1).mul_(tail))  # (0, tail] -> (-inf, -cut]
    return torch.where(sign, -values, values).to(dtype)


def _root_mean_square(cores: Sequence[Tensor]) -> float:
    """Of all entries of the cores' table, padding rows included, without building it."""
    gram = torch.ones(1, 1, dtype=cores[0].dtype, device=cores[0].device)
    for core in cores:
        p, left, q, right = core.shape
        weighted = torch.einsum("ac,pcqd->paqd", gram, core)
        gram = core.reshape(-1, right).T @ weighted.reshape(-1, right)
        gram /= p * q  # a mean at every step keeps the numbers in range
    return math.sqrt(max(0.0, float(gram)))
