"""The lookup and its gradients as operators: fake, autograd, one engine behind each call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor

ENGINES = ("torch", "numba", "triton")


def tt_lookup(
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    *,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
    engine: str,
) -> Tensor:
    """Pooled rows `(B, F*D)` of 3-core tables; arguments as in this folder's README.

    Differentiable once in the cores and in the weights. Checked input only: what users call is in
    `functional.py`. Replaces FBGEMM's `split_embedding_codegen_lookup_*` operators.

    Args:
        engine: "torch", "numba" or "triton".

    Raises:
        ValueError: `workspace_bytes` is below the floor that the message names.

    Example::

        plan = index_plan(ids, offsets, batch)
        out = tt_lookup(plan, cores, None, num_features=batch.num_features, mean=False,
                        output_dtype=torch.float32, workspace_bytes=None, engine="torch")
    """
    return torch.ops.ecorec.tt_lookup(
        list(plan), cores, weights_L, num_features, mean, output_dtype, workspace_bytes, engine
    )


def _engine(name: str) -> ModuleType:
    assert name in ENGINES, name
    if name == "numba":
        from . import cpu_engine  # imported on use: numba takes a second

        return cpu_engine
    if name == "triton":
        from . import triton_engine  # imported on use: Triton may be missing

        return triton_engine
    from . import torch_grouped

    return torch_grouped


@torch.library.custom_op("ecorec::tt_lookup", mutates_args=())
def _forward(
    plan: list[Tensor],
    cores: list[Tensor],
    weights: Tensor | None,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
    engine: str,
) -> Tensor:
    return _engine(engine).forward(
        IndexPlan(*plan),
        [core.contiguous() for core in cores],
        None if weights is None else weights.contiguous(),
        num_features,
        mean,
        output_dtype,
        workspace_bytes,
    )


@_forward.register_fake
def _(
    plan: list[Tensor],
    cores: list[Tensor],
    weights: Tensor | None,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
    engine: str,
) -> Tensor:
    dim = cores[0].shape[2] * cores[1].shape[2] * cores[2].shape[2]
    num_bags = IndexPlan(*plan).num_bags
    return cores[0].new_empty(num_bags // num_features, num_features * dim, dtype=output_dtype)


@torch.library.custom_op("ecorec::tt_lookup_backward", mutates_args=())
def _backward(
    grad: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    weights: Tensor | None,
    num_features: int,
    mean: bool,
    needs_cores: bool,
    needs_weights: bool,
    workspace_bytes: int | None,
    engine: str,
) -> list[Tensor]:
    """The core gradients if wanted, then the weights gradient if wanted."""
    core_grads, weights_grad = _engine(engine).backward(
        grad.contiguous(),
        IndexPlan(*plan),
        [core.contiguous() for core in cores],
        None if weights is None else weights.contiguous(),
        num_features,
        mean,
        needs_cores,
        needs_weights,
        workspace_bytes,
    )
    return [*(core_grads or ()), *(() if weights_grad is None else (weights_grad,))]


@_backward.register_fake
def _(
    grad: Tensor,
    plan: list[Tensor],
    cores: list[Tensor],
    weights: Tensor | None,
    num_features: int,
    mean: bool,
    needs_cores: bool,
    needs_weights: bool,
    workspace_bytes: int | None,
    engine: str,
) -> list[Tensor]:
    grads = [torch.empty_like(c, memory_format=torch.contiguous_format) for c in cores]
    wanted = grads if needs_cores else []
    if needs_weights and weights is not None:
        wanted.append(torch.empty_like(weights, memory_format=torch.contiguous_format))
    return wanted


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    plan, cores, weights, *ctx.settings = inputs
    ctx.num_plan, ctx.num_cores, ctx.has_weights = len(plan), len(cores), weights is not None
    ctx.save_for_backward(*plan, *cores, *([] if weights is None else [weights]))


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    saved = list(ctx.saved_tensors)
    weights = saved.pop() if ctx.has_weights else None
    plan, cores = saved[: ctx.num_plan], saved[ctx.num_plan :]
    num_features, mean, _, workspace_bytes, engine = ctx.settings
    needs_cores, needs_weights = any(ctx.needs_input_grad[1]), bool(ctx.needs_input_grad[2])
    grads = torch.ops.ecorec.tt_lookup_backward(
        grad,
        plan,
        cores,
        weights,
        num_features,
        mean,
        needs_cores,
        needs_weights,
        workspace_bytes,
        engine,
    )
    weights_grad = grads[-1] if needs_weights else None
    core_grads = grads[: ctx.num_cores] if needs_cores else [None] * ctx.num_cores
    return [None] * ctx.num_plan, core_grads, weights_grad, None, None, None, None, None


def _refuse_second_order(ctx: Any, *grads: Any) -> tuple:
    raise RuntimeError(
        "TT lookups have no second-order gradients; backend='reference' of the functional API has"
    )


torch.library.register_autograd(
    "ecorec::tt_lookup", _differentiate, setup_context=_save_for_backward
)
torch.library.register_autograd("ecorec::tt_lookup_backward", _refuse_second_order)
