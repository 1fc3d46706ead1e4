"""The grouped lookup in Triton: forward and backward of all tables of a group in one launch set.

The host launches the same kernels whatever U and P are: it never waits for the device. The maths
is in this folder's README, the kernels in `triton_forward.py` and `triton_backward.py`. Not
measured on a GPU: tested by Triton's interpreter, and compiled for NVIDIA and AMD targets.
"""

from __future__ import annotations

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor

from .autotune import launch_config
from .launch import LaunchConfig
from .triton_core_grads import CoreGrads
from .triton_lookup import Lookup
from .triton_parts import Cut


def forward(
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Pooled rows `(B, F*D)`; arguments as in this folder's README.

    `config`: how to launch; None: `autotune.launch_config`.

    Raises:
        ValueError: `workspace_bytes` is below the floor that the message names.
    """
    config = config or launch_config(cores)
    lookup = Lookup(plan, cores, weights_L, num_features, mean, config)
    out = cores[0].new_empty(
        plan.num_bags // num_features, num_features * lookup.dim, dtype=output_dtype
    )
    if not plan.num_lookups:
        return out.zero_()

    def sums_bytes(cut: Cut) -> int:
        """What pooling keeps between parts."""
        sums = out.numel() if output_dtype != torch.float32 else 0
        return 4 * (2 * plan.num_bags + sums) if cut.num_parts > 1 else 0

    with torch.cuda.device_of(out):
        parts = lookup.cut(workspace_bytes, sums_bytes)
        prefixes, rows = lookup.new_prefixes(parts), lookup.new_rows(parts)
        sums, taken = out, [plan.counts, plan.counts]  # not used by a single part
        if parts.cut.num_parts > 1:
            taken = [torch.empty_like(plan.offsets) for _ in range(2)]
            if output_dtype != torch.float32:
                sums = torch.empty_like(out, dtype=torch.float32)
        for part in range(parts.cut.num_parts):
            lookup.multiply_prefixes(parts, part, prefixes)
            lookup.multiply_rows(parts, part, prefixes, rows)
            lookup.pool(parts, part, rows, sums, taken, out)
    return out


def backward(
    grad: Tensor,
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    needs_cores: bool,
    needs_weights: bool,
    workspace_bytes: int | None,
    config: LaunchConfig | None = None,
) -> tuple[list[Tensor] | None, Tensor | None]:
    """Gradients of the cores and of the weights; arguments as in this folder's README.

    `config`: how to launch; None: `autotune.launch_config`.

    Raises:
        ValueError: `workspace_bytes` is below the floor that the message names.
    """
    config = config or launch_config(cores)
    lookup = Lookup(plan, cores, weights_L, num_features, mean, config)
    weight_grads = torch.empty_like(weights_L) if needs_weights and weights_L is not None else None
    if not plan.num_lookups:
        return [torch.zeros_like(core) for core in cores] if needs_cores else None, weight_grads

    def other_bytes(cut: Cut) -> int:
        weights_bytes = 12 * plan.num_lookups if needs_weights else 0
        return weights_bytes + (CoreGrads.nbytes(lookup, cut) if needs_cores else 0)

    with torch.cuda.device_of(grad):
        parts = lookup.cut(workspace_bytes, other_bytes)
        core_grads = CoreGrads(lookup, parts, grad) if needs_cores else None
        prefixes, rows = lookup.new_prefixes(parts), lookup.new_rows(parts)
        for part in range(parts.cut.num_parts):
            lookup.multiply_prefixes(parts, part, prefixes)
            if weight_grads is not None:
                lookup.multiply_rows(parts, part, prefixes, rows)
                lookup.differentiate_weights(parts, part, rows, grad, weight_grads)
            if core_grads is not None:
                core_grads.add(part, prefixes, rows)
        return core_grads.finish() if core_grads is not None else None, weight_grads
