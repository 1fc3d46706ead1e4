"""A small tiered table beside the plain one that it must equal, and a loop that trains both."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecorec_torchrec.tiers import RowInit, RowLayout, Ticket, TieredTable, TierSpec

DIM = 4


def zipf_batches(
    num_rows: int, num_batches: int, batch_size: int, *, exponent: float = 1.1, seed: int = 0
) -> list[Tensor]:
    """Batches of ids that repeat within and between batches; frequent ones lie anywhere."""
    rng = np.random.default_rng(seed)
    scatter = rng.permutation(num_rows)
    weights = np.arange(1, num_rows + 1) ** -exponent
    draws = rng.choice(num_rows, (num_batches, batch_size), p=weights / weights.sum())
    return list(torch.from_numpy(scatter[draws]))


def row_wise_adagrad_(weight: Tensor, momentum: Tensor, rows: Tensor, gradients: Tensor) -> None:
    """One step on the unique `rows` of `weight`, as FBGEMM's row-wise Adagrad."""
    momentum[rows] += gradients.square().mean(1, keepdim=True)
    weight[rows] -= 0.1 * gradients / (momentum[rows].sqrt() + 1e-8)


@dataclass
class Trained:
    """A tiered table and its plain twin.

    Attributes:
        table: the tiered one; `weight` and `momentum` are its slots.
        plain_weight, plain_momentum: every row.
    """

    table: TieredTable
    weight: Tensor
    momentum: Tensor
    plain_weight: Tensor
    plain_momentum: Tensor
    in_flight: list[Ticket] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, num_rows: int, cache_rows: int, **wishes: Any) -> "Trained":
        """`wishes` go to `TierSpec`, except `hot_rows`, `weight_dtype` and `device`."""
        hot_rows = wishes.pop("hot_rows", ())
        dtype = wishes.pop("weight_dtype", torch.float32)
        layout = RowLayout((("weight", DIM, dtype), ("momentum1", 1, torch.float32)))
        device = wishes.pop("device", "cpu")
        weight = torch.full((cache_rows, DIM), torch.nan, dtype=dtype, device=device)
        momentum = torch.full((cache_rows, 1), torch.nan, device=device)
        init = RowInit(DIM, seed=5)
        spec = TierSpec(cache_rows, str(folder), **wishes)
        slots = {"weight": weight, "momentum1": momentum}
        table = TieredTable("ads", num_rows, layout, spec, init, slots, hot_rows)
        plain = init.rows(torch.arange(num_rows)).to(device)
        return cls(table, weight, momentum, plain, torch.zeros(num_rows, 1, device=device))

    def train(self, batches: list[Tensor]) -> bool:
        """Trains both tables; whether every looked-up row was the same, bit for bit."""
        same = True
        for ids, slots in self._remapped(batches):
            same &= torch.equal(self.weight[slots], self.plain_weight[ids])
            rows, first = (found.to(self.weight.device) for found in _unique(ids))
            # A gradient that depends on the row: an error of one step shows in all later ones.
            gradients = 0.1 * self.plain_weight[rows] + rows[:, None] % 7 - 3
            row_wise_adagrad_(self.plain_weight, self.plain_momentum, rows, gradients)
            own = 0.1 * self.weight[slots[first]] + rows[:, None] % 7 - 3
            row_wise_adagrad_(self.weight, self.momentum, slots[first], own)
        return same

    def _remapped(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        ahead = self.table.spec.prefetch_batches
        coming = iter(batches)
        for ids in batches:
            while len(self.in_flight) <= ahead and (following := next(coming, None)) is not None:
                self.in_flight.append(self.table.prefetch(following))
            ticket = self.in_flight.pop(0)
            yield ids, self.table.remap(ticket)
            self.table.release(ticket, dirty=True)

    def equal(self) -> bool:
        """Whether every row of both tables is the same, bit for bit."""
        rows = self.table.read(torch.arange(len(self.plain_weight)))
        return torch.equal(rows["weight"], self.plain_weight.cpu()) and torch.equal(
            rows["momentum1"], self.plain_momentum.cpu()
        )


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unique ids, and a place of each in `ids`."""
    rows, first = np.unique(ids.numpy(), return_index=True)
    return torch.from_numpy(rows), torch.from_numpy(first)
