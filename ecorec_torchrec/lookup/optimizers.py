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

from .cores import GroupCores
from .nonfinite import NonfiniteGuard
from .optimizer_spec import OptimizerSpec
from .optimizer_state import SharedSteps, leaf_of, make_state, set_steps, table_states

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class FusedTTOptimizer(FusedOptimizer):
    """Steps the cores of a group in the backward pass, once, when all its gradients are there.

    Replaces TorchRec's `EmbeddingFusedOptimizer`. `params` and `state` are per table and core,
    named `<table>.tt_cores.<k>`; hyperparameters are read from `param_groups` at every update.
    Cores of 16 bits are stepped through a float32 copy (state "master") and rounded to nearest
    from it, so that small updates add up.

    `copy.deepcopy` of a group with its optimizer gives a group that trains by itself.

    Args:
        cores: the group.
        spec: which optimizer.
        step_in_backward: False leaves the gradients on the cores until `step()`, so that they can
            be summed over backward passes, unscaled and clipped; `zero_grad()` drops them.
        nonfinite_gradients: see `NonfiniteGuard`.
    """

    def __init__(
        self,
        cores: GroupCores,
        spec: OptimizerSpec,
        *,
        step_in_backward: bool = True,
        nonfinite_gradients: str = "ignore",
    ) -> None:
        self._flats = list(cores.flat)
        self._weights = [
            nn.Parameter(flat.detach().float()) if flat.dtype in _LOW_PRECISION else flat
            for flat in self._flats
        ]
        self._step_in_backward = step_in_backward
        self._optimizer = spec.build(self._weights)
        make_state(self._optimizer)
        self._cores = cores
        params = cores.named_slices()
        self._guard = NonfiniteGuard(params, self._flats, nonfinite_gradients)
        self._steps = SharedSteps()
        group = {**self._optimizer.param_groups[0], "params": list(params.values())}
        super().__init__(params, {}, [group])
        self._attach()

    def _attach(self) -> None:
        """Makes what a copy loses: views of the state, marks and hooks."""
        slices = self._cores.named_slices()
        self.state.update(table_states(slices, self._flats, self._flat_states(), self._steps))
        mark_in_backward((*self._flats, *slices.values()), self)
        if self._step_in_backward:
            for flat in self._flats:
                flat.register_post_accumulate_grad_hook(self._on_gradient)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

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
            try:
                self._update()
            finally:
                self._drop_gradients()

    @torch.no_grad()
    def _update(self) -> None:
        _copy_settings(self.param_groups, self._optimizer)
        for flat, weight in zip(self._flats, self._weights, strict=True):
            if weight is not flat:
                # Where the cores were changed from outside (loaded, initialised), they count.
                torch.where(weight.to(flat.dtype) == flat, weight, flat.float(), out=weight)
                weight.grad = None if flat.grad is None else flat.grad.float()
        self._guard.step(self._optimizer, self._weights)
        for flat, weight in zip(self._flats, self._weights, strict=True):
            if weight is not flat:
                flat.copy_(weight)
                weight.grad = None

    def _drop_gradients(self) -> None:
        for flat in self._flats:
            flat.grad = None

    def step(self, closure: Any = None) -> None:
        """Updates the cores with the gradients they have; does nothing if backward does it.

        Raises:
            FloatingPointError: see `NonfiniteGuard`.
        """
        if not self._step_in_backward and any(flat.grad is not None for flat in self._flats):
            self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, whatever `set_to_none` says: backward makes them anew."""
        self._drop_gradients()

    def set_optimizer_step(self, step: int) -> None:
        """Sets the step counter that Adam's bias correction and Adagrad's decay read."""
        set_steps(self._optimizer, step)

    def post_load_state_dict(self) -> None:
        self._steps.forget()


def mark_in_backward(parameters: Iterable[nn.Parameter], optimizer: FusedOptimizer) -> None:
    """Marks what an optimizer of the dense part must leave alone, for TorchRec's filter."""
    for parameter in parameters:
        parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]


class GroupKeyedOptimizer(KeyedOptimizer):
    """A torch optimizer over named parameters, stepping the flat leaves behind core slices.

    Replaces `KeyedOptimizerWrapper` for data-parallel TT tables: a group of T tables costs K
    tensors per step instead of T x K. Names, state and state dict are per table, as without it.

    Args:
        params: named parameters, core slices and others; of a group all tables or none.
        optim_factory: makes the optimizer of a list of tensors.
        nonfinite_gradients: "ignore", "skip" or "stop", see `NonfiniteGuard`.

    Raises:
        ValueError: only some tables of a group are among `params`; `nonfinite_gradients` is not
            one of the three; or the optimizer has state that does not start at zero (NAdam, Rprop,
            ASGD).

    Example::

        GroupKeyedOptimizer(
            dict(in_backward_optimizer_filter(dmp.named_parameters())),
            lambda params: torch.optim.Adam(params, lr=1e-3),
        )
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[list[Tensor]], Optimizer],
        *,
        nonfinite_gradients: str = "ignore",
    ) -> None:
        leaves = list({id(leaf): leaf for leaf in map(leaf_of, params.values())}.values())
        _check_coverage(params)
        self._leaves = leaves
        self._guard = NonfiniteGuard(params, leaves, nonfinite_gradients)
        self._optimizer = optim_factory(leaves)
        make_state(self._optimizer)
        self._steps = SharedSteps()
        groups = [
            {**group, "params": _members(params, group["params"])}
            for group in self._optimizer.param_groups
        ]
        super().__init__(params, {}, groups)
        self._attach()

    def _attach(self) -> None:
        """Makes what a copy loses: views of the state."""
        leaf_states = [self._optimizer.state[leaf] for leaf in self._leaves]
        self.state.update(table_states(self.params, self._leaves, leaf_states, self._steps))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

    def set_optimizer_step(self, step: int) -> None:
        """Sets the step counter that Adam's bias correction and Adagrad's decay read."""
        set_steps(self._optimizer, step)

    def step(self, closure: Any = None) -> None:
        """As the optimizer's own.

        Raises:
            FloatingPointError: see `NonfiniteGuard`.
        """
        _copy_settings(self.param_groups, self._optimizer)
        self._guard.step(self._optimizer, self._leaves, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def post_load_state_dict(self) -> None:
        self._steps.forget()


def _members(params: Mapping[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    ids = {id(leaf) for leaf in leaves}
    return [param for param in params.values() if id(leaf_of(param)) in ids]


def _check_coverage(params: Mapping[str, Tensor]) -> None:
    covered: dict[int, int] = {}
    for param in params.values():
        covered[id(leaf_of(param))] = covered.get(id(leaf_of(param)), 0) + param.numel()
    for name, param in params.items():
        leaf = leaf_of(param)
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
