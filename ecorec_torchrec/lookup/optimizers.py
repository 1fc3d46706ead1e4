"""Optimizers of TT cores: library optimizers that step the flat leaves of a group at once.

Cores are small and their gradients dense, so no optimizer kernels are needed: the optimizer that
TorchRec fuses into a table's backward is here a `torch.optim` one, run when the gradients of a
group are there. Unlike FBGEMM's, which touch only the rows of a batch, it steps every core row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import KeyedOptimizer

from .cores import CoreSlice, GroupCores
from .optimizer_spec import OptimizerSpec

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class FusedTTOptimizer(FusedOptimizer):
    """Steps the cores of a group in the backward pass, once, when all its gradients are there.

    Replaces TorchRec's `EmbeddingFusedOptimizer`. `params` and `state` are per table and core,
    named `<table>.tt_cores.<k>`; hyperparameters are read from `param_groups` at every step. Cores
    of 16 bits are stepped through a float32 copy (state "master"), so that small updates add up.

    Args:
        cores: the group.
        spec: which optimizer.
    """

    def __init__(self, cores: GroupCores, spec: OptimizerSpec) -> None:
        self._flats = list(cores.flat)
        self._weights = [
            nn.Parameter(flat.detach().float()) if flat.dtype in _LOW_PRECISION else flat
            for flat in self._flats
        ]
        self._optimizer = spec.build(self._weights)
        _make_state(self._optimizer)
        params = cores.named_slices()
        self._steps = _SharedSteps()
        state = _table_states(params, self._flats, self._flat_states(), self._steps)
        group = {**self._optimizer.param_groups[0], "params": list(params.values())}
        super().__init__(params, state, [group])
        mark_in_backward((*self._flats, *params.values()), self)
        for flat in self._flats:
            flat.register_post_accumulate_grad_hook(self._on_gradient)

    def _flat_states(self) -> list[dict[str, Tensor]]:
        masters = (
            {} if weight is flat else {"master": weight.detach()}
            for weight, flat in zip(self._weights, self._flats, strict=True)
        )
        return [
            {**self._optimizer.state[weight], **master}
            for weight, master in zip(self._weights, masters, strict=True)
        ]

    def _on_gradient(self, _: Tensor) -> None:
        if all(flat.grad is not None for flat in self._flats):
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        _copy_settings(self.param_groups, self._optimizer)
        for flat, weight in zip(self._flats, self._weights, strict=True):
            if weight is not flat:
                assert flat.grad is not None
                # Where the cores were changed from outside (loaded, initialised), they count.
                torch.where(weight.to(flat.dtype) == flat, weight, flat.float(), out=weight)
                weight.grad = flat.grad.float()
        self._optimizer.step()
        for flat, weight in zip(self._flats, self._weights, strict=True):
            if weight is not flat:
                flat.copy_(weight)
                weight.grad = None
            flat.grad = None

    def step(self, closure: Any = None) -> None:
        """Does nothing: the cores are stepped in the backward pass."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: gradients are dropped as soon as they are used."""

    def set_optimizer_step(self, step: int) -> None:
        """Sets the step counter that Adam's bias correction and Adagrad's decay read."""
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)

    def post_load_state_dict(self) -> None:
        self._steps.forget()


def mark_in_backward(parameters: Iterable[nn.Parameter], optimizer: FusedOptimizer) -> None:
    """Marks what an optimizer of the dense part must leave alone, for TorchRec's filter."""
    for parameter in parameters:
        parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]


class GroupKeyedOptimizer(KeyedOptimizer):
    """Any torch optimizer over named parameters, stepping the flat leaves behind core slices.

    Replaces `KeyedOptimizerWrapper` for data-parallel TT tables: a group of T tables costs K
    tensors per step instead of T x K. Names, state and state dict are per table, as without it.

    Args:
        params: named parameters, core slices and others; of a group all tables or none.
        optim_factory: makes the optimizer of a list of tensors.

    Raises:
        ValueError: only some tables of a group are among `params`.

    Example::

        GroupKeyedOptimizer(
            dict(in_backward_optimizer_filter(dmp.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=1e-3),
        )
    """

    def __init__(
        self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        leaves = list({id(leaf): leaf for leaf in map(_leaf, params.values())}.values())
        _check_coverage(params)
        self._optimizer = optim_factory(leaves)
        _make_state(self._optimizer)
        self._steps = _SharedSteps()
        state = _table_states(
            params, leaves, [self._optimizer.state[leaf] for leaf in leaves], self._steps
        )
        groups = [
            {**group, "params": _members(params, group["params"])}
            for group in self._optimizer.param_groups
        ]
        super().__init__(params, state, groups)

    def step(self, closure: Any = None) -> None:
        _copy_settings(self.param_groups, self._optimizer)
        self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def post_load_state_dict(self) -> None:
        self._steps.forget()


def _leaf(param: Tensor) -> Tensor:
    return param.flat if isinstance(param, CoreSlice) else param


def _members(params: Mapping[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    ids = {id(leaf) for leaf in leaves}
    return [param for param in params.values() if id(_leaf(param)) in ids]


def _check_coverage(params: Mapping[str, Tensor]) -> None:
    covered: dict[int, int] = {}
    for param in params.values():
        covered[id(_leaf(param))] = covered.get(id(_leaf(param)), 0) + param.numel()
    for name, param in params.items():
        leaf = _leaf(param)
        if covered[id(leaf)] != leaf.numel():
            raise ValueError(
                f"{name} shares its storage with tables that are not among the parameters "
                f"({covered[id(leaf)]} of {leaf.numel()} elements are): give all tables of a TT "
                "group to one optimizer, or use torchrec's KeyedOptimizerWrapper"
            )


def _copy_settings(groups: Any, optimizer: Optimizer) -> None:
    """Learning rates and the like are set on the groups that users and schedulers see."""
    for seen, own in zip(groups, optimizer.param_groups, strict=True):
        own.update((name, value) for name, value in seen.items() if name != "params")


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Makes the state that Adam and SGD with momentum make in their first step.

    A checkpoint is loaded into state that exists. Weights and counters stay as they are.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(optimizer.state.get(param) for param in params):
        return
    weights = [param.clone() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        param.copy_(weight)
        param.grad = None
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()


class _SharedSteps:
    """Step counters: one per leaf, saved and loaded per table, which must agree."""

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[str, float]] = {}

    def load(self, step: Tensor, name: str, value: Tensor | float) -> None:
        first_name, first = self._loaded.setdefault(id(step), (name, float(value)))
        if first != float(value):
            self.forget()
            raise ValueError(
                f"{first_name} and {name} are stepped together but were saved after {first:g} and "
                f"{float(value):g} steps: their optimizer state cannot be loaded into one group"
            )
        step.fill_(first)

    def forget(self) -> None:
        self._loaded.clear()


class _TableStep:
    """What stands for a group's step counter in the state of one table."""

    def __init__(self, steps: _SharedSteps, step: Tensor, name: str) -> None:
        self._steps, self._step, self._name = steps, step, name

    def state_dict(self) -> Tensor:
        return self._step.clone()

    def load_state_dict(self, value: Tensor) -> None:
        self._steps.load(self._step, self._name, value)


def _table_states(
    params: Mapping[str, Tensor],
    leaves: list[Tensor],
    leaf_states: list[dict[str, Any]],
    steps: _SharedSteps,
) -> dict[Tensor, dict[str, Any]]:
    """Per-table views of the leaves' states.

    Parameters without state (plain SGD) have no entry: torch's checkpoints lose empty ones.
    """
    by_leaf = {id(leaf): state for leaf, state in zip(leaves, leaf_states, strict=True)}
    states: dict[Tensor, dict[str, Any]] = {}
    for name, param in params.items():
        leaf_state = by_leaf[id(_leaf(param))]
        if not leaf_state:
            continue
        if isinstance(param, CoreSlice):
            leaf_state = {
                key: param.rows_of(value) if value.dim() else _TableStep(steps, value, name)
                for key, value in leaf_state.items()
            }
        states[param] = leaf_state
    return states
