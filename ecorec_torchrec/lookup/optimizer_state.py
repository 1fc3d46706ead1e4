"""State of a group's optimizer: kept per flat leaf, seen, saved and loaded per table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .cores import CoreSlice


def leaf_of(param: Tensor) -> Tensor:
    """What an optimizer steps for a parameter: itself, or the flat leaf behind a core slice."""
    return param.flat if isinstance(param, CoreSlice) else param


@torch.no_grad()
def make_state(optimizer: Optimizer) -> None:
    """Makes the state that Adam and SGD with momentum make in their first step.

    A checkpoint is loaded into state that exists. Weights and counters stay as they are.

    Raises:
        ValueError: the optimizer has state that does not start at zero, such as NAdam's
            `mu_product`: what it started at cannot be told from what the first step made of it.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(optimizer.state.get(param) for param in params):
        return
    weights = [param.clone() for param in params]
    for param in params:
        param.zero_()  # weight decay adds weights to gradients
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, weight in zip(params, weights, strict=True):
        param.copy_(weight)
        param.grad = None
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                if key != "step" and value.any():
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r}, which does not start at zero, "
                        "and cannot step TT tables by groups: use torchrec's KeyedOptimizerWrapper"
                    )
                value.zero_()


def set_steps(optimizer: Optimizer, step: int) -> None:
    """Sets the step counters of an optimizer that has some."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


class SharedSteps:
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

    def __init__(self, steps: SharedSteps, step: Tensor, name: str) -> None:
        self._steps, self._step, self._name = steps, step, name

    def state_dict(self) -> Tensor:
        return self._step.clone()

    def load_state_dict(self, value: Tensor) -> None:
        self._steps.load(self._step, self._name, value)


def table_states(
    params: Mapping[str, Tensor],
    leaves: list[Tensor],
    leaf_states: list[dict[str, Any]],
    steps: SharedSteps,
) -> dict[Tensor, dict[str, Any]]:
    """Per-table views of the leaves' states.

    Parameters without state (plain SGD) have no entry: torch's checkpoints lose empty ones.
    """
    by_leaf = {id(leaf): state for leaf, state in zip(leaves, leaf_states, strict=True)}
    states: dict[Tensor, dict[str, Any]] = {}
    for name, param in params.items():
        leaf_state = by_leaf.get(id(leaf_of(param)))
        if not leaf_state:
            continue
        if isinstance(param, CoreSlice):
            leaf_state = {
                key: param.rows_of(value) if value.dim() else _TableStep(steps, value, name)
                for key, value in leaf_state.items()
            }
        states[param] = leaf_state
    return states
