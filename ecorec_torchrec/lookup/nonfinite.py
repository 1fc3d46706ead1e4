"""Gradients that are NaN or infinite: found by table, skipped or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .cores import CoreSlice

NONFINITE_POLICIES = ("ignore", "skip", "stop")


class NonfiniteGuard:
    """Steps an optimizer, except for tables whose gradients are NaN or infinite.

    A table's fate does not depend on the tables that share its storage: "skip" leaves its weights
    and their state as they are, while step counters, which a group shares, count the step (as
    FBGEMM's do for rows that are not touched).

    "ignore" costs nothing. "skip" reads the gradients once more and copies weights and state; it
    waits for no device, and so its warning may come a step later on a GPU. "stop" reads the
    gradients and waits for the device once per step.

    Args:
        params: named parameters: core slices, and others, each of which counts as a table.
        leaves: the tensors behind `params`.
        policy: "ignore", "skip" or "stop".

    Raises:
        ValueError: `policy` is another.
    """

    def __init__(
        self, params: Mapping[str, Tensor], leaves: Sequence[Tensor], policy: str = "ignore"
    ) -> None:
        if policy not in NONFINITE_POLICIES:
            raise ValueError(f"nonfinite_gradients={policy!r} is not one of {NONFINITE_POLICIES}")
        self._policy = policy
        if policy == "ignore" or not leaves:
            return
        self._tables = list(dict.fromkeys(map(_table, params)))
        self._table_of_rows = _table_of_rows(params, leaves, self._tables)
        device = leaves[0].device
        # Counted on the device and copied to pinned memory without waiting: what the host reads
        # may lag behind but is never wrong.
        self._skipped_T = torch.zeros(len(self._tables), dtype=torch.int32, device=device)
        self._seen_T = torch.zeros(
            len(self._tables), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._told_T = self._seen_T.clone()

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        weights: Sequence[Tensor],
        closure: Callable[[], Any] | None = None,
    ) -> None:
        """Steps `optimizer`.

        Args:
            optimizer: whose parameters are `weights`.
            weights: laid out like the leaves.
            closure: makes the gradients, as in torch.

        Raises:
            FloatingPointError: a gradient is not finite and the policy is "stop"; nothing has
                changed then.
        """
        if self._policy == "ignore" or not weights:
            optimizer.step(closure)
            return
        if closure is not None:
            with torch.enable_grad():
                closure()
        bad_T = self._find(weights)
        if self._policy == "stop":
            if names := self._names(bad_T):
                raise FloatingPointError(
                    f"the gradient of {', '.join(names)} is not finite; nothing was updated"
                )
            optimizer.step()
            return
        before = [[kept.clone() for kept in _kept(optimizer, weight)] for weight in weights]
        optimizer.step()
        for weight, rows, saved in zip(weights, self._table_of_rows, before, strict=True):
            for tensor, old in zip(_kept(optimizer, weight), saved, strict=True):
                mask = bad_T[rows].view(_broadcastable(len(rows), tensor))
                torch.where(mask, old, tensor, out=tensor)
        self._report(bad_T)

    def _find(self, weights: Sequence[Tensor]) -> Tensor:
        bad_T = torch.zeros_like(self._skipped_T)
        for weight, rows in zip(weights, self._table_of_rows, strict=True):
            if weight.grad is not None and weight.numel():
                # The extremes are NaN where any number is.
                low, high = weight.grad.reshape(len(rows), -1).aminmax(dim=1)
                bad_T.index_add_(0, rows, (~(low.isfinite() & high.isfinite())).int())
        return bad_T > 0

    def _report(self, bad_T: Tensor) -> None:
        self._skipped_T += bad_T
        self._seen_T.copy_(self._skipped_T, non_blocking=True)
        seen_T = self._seen_T.clone()
        if names := self._names(seen_T > self._told_T):
            warnings.warn(
                f"the gradient of {', '.join(names)} is not finite: the update was skipped",
                stacklevel=2,
            )
        self._told_T = seen_T

    def _names(self, bad_T: Tensor) -> list[str]:
        return [name for name, bad in zip(self._tables, bad_T.tolist(), strict=True) if bad]


def _table(name: str) -> str:
    return name.split(".tt_cores.")[0]


def _table_of_rows(
    params: Mapping[str, Tensor], leaves: Sequence[Tensor], tables: Sequence[str]
) -> list[Tensor]:
    """Per leaf, which table each row is of; one entry for a leaf that is one parameter."""
    index = {table: i for i, table in enumerate(tables)}
    found: dict[int, Tensor] = {}
    for name, param in params.items():
        table = index[_table(name)]
        if isinstance(param, CoreSlice):
            rows = found.get(id(param.flat))
            if rows is None:
                rows = torch.empty(len(param.flat), dtype=torch.int64, device=param.device)
                found[id(param.flat)] = rows
            param.rows_of(rows).fill_(table)
        else:
            found[id(param)] = torch.full((1,), table, device=param.device)
    return [found[id(leaf)] for leaf in leaves]


def _kept(optimizer: Optimizer, weight: Tensor) -> list[Tensor]:
    state = optimizer.state.get(weight, {})
    return [weight] + [v for k, v in state.items() if isinstance(v, Tensor) and k != "step"]


def _broadcastable(rows: int, tensor: Tensor) -> tuple[int, ...]:
    return (rows, *(1,) * (tensor.dim() - 1)) if tensor.dim() else ()
