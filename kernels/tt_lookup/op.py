"""The lookup and its gradients as operators: fake, autograd, one engine behind each call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor

from .dtypes import without_autocast

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


# Defined by hand, not by `torch.library.custom_op`: that one's autograd flattens and checks all
# arguments in Python on each call, which costs as much as a small lookup itself.
_LIBRARY = torch.library.Library("ecorec", "FRAGMENT")
_LIBRARY.define(
    "tt_lookup(Tensor[] plan, Tensor[] cores, Tensor? weights, SymInt num_features, bool mean, "
    "ScalarType output_dtype, SymInt? workspace_bytes, str engine) -> Tensor"
)


@torch.library.impl(_LIBRARY, "tt_lookup", "CompositeExplicitAutograd")
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


@torch.library.register_fake("ecorec::tt_lookup", lib=_LIBRARY)
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
    with without_autocast(grad.device.type):  # a backward pass may run within one
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


class _TTLookup(torch.autograd.Function):
    """Plan and settings go in as they are: autograd looks at cores and weights only."""

    @staticmethod
    def forward(
        ctx: Any, plan: list[Tensor], settings: tuple, weights: Tensor | None, *cores: Tensor
    ) -> Tensor:
        ctx.num_plan, ctx.num_cores, ctx.settings = len(plan), len(cores), settings
        ctx.save_for_backward(*plan, *cores, weights)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.ecorec.tt_lookup(plan, list(cores), weights, *settings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        *saved, weights = ctx.saved_tensors
        plan, cores = saved[: ctx.num_plan], saved[ctx.num_plan :]
        num_features, mean, _, workspace_bytes, engine = ctx.settings
        _, _, needs_weights, *needs = ctx.needs_input_grad
        found = torch.ops.ecorec.tt_lookup_backward(
            grads[0],
            plan,
            cores,
            weights,
            num_features,
            mean,
            any(needs),
            needs_weights,
            workspace_bytes,
            engine,
        )
        core_grads = found[: ctx.num_cores] if any(needs) else [None] * ctx.num_cores
        return None, None, found[-1] if needs_weights else None, *core_grads


@torch.library.impl(_LIBRARY, "tt_lookup", "Autograd")
def _(plan: list[Tensor], cores: list[Tensor], weights: Tensor | None, *settings: Any) -> Tensor:
    return _TTLookup.apply(plan, settings, weights, *cores)


def _refuse_second_order(ctx: Any, *grads: Any) -> tuple:
    raise RuntimeError(
        "TT lookups have no second-order gradients; backend='reference' of the functional API has"
    )


torch.library.register_autograd("ecorec::tt_lookup_backward", _refuse_second_order)
