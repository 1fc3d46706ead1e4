"""Initial rows as a function of (seed, row id) only: a table of any size costs no first write.

Counter-based: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014) hashes seed, row and column to 64 bits, in numpy's vectorised integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
# Rows that are drawn at once: what is in hand stays in the processor's cache.
_CHUNK_NUMBERS = 1 << 16


@dataclass(frozen=True)
class RowInit:
    """The distribution of a table's initial weights.

    Args:
        embedding_dim: D.
        seed: tables of different seeds have independent rows.
        distribution: "uniform" in [a, b), or "normal" of mean a and standard deviation b.
        a, b: as `distribution` says.
        first_row: the row of the whole table that is row 0 here, where a table is cut by rows: its
            parts hold what it would hold uncut.

    Raises:
        ValueError: an unknown distribution, D < 1, a negative first_row, or values of a and b that
            do not fit it.

    Example::

        init = RowInit(64, seed=7, distribution="uniform", a=-0.01, b=0.01)
        init.rows(torch.tensor([5, 3]))[0].equal(init.rows(torch.tensor([5]))[0])   # True
    """

    embedding_dim: int
    seed: int
    distribution: Literal["uniform", "normal"] = "uniform"
    a: float = -0.01
    b: float = 0.01
    first_row: int = 0

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ValueError(f"embedding_dim={self.embedding_dim} must be positive")
        if self.first_row < 0:
            raise ValueError(f"first_row={self.first_row} must not be negative")
        if self.distribution not in ("uniform", "normal"):
            raise ValueError(
                f"distribution={self.distribution!r} is unknown; choose 'uniform' or 'normal'"
            )
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            raise ValueError(f"a={self.a} and b={self.b} must be finite")
        if self.distribution == "uniform" and self.a > self.b:
            raise ValueError(f"a={self.a} must not be larger than b={self.b}")
        if self.distribution == "normal" and self.b < 0:
            raise ValueError(f"the standard deviation b={self.b} must not be negative")

    def rows(self, ids_U: Tensor) -> Tensor:
        """The initial weights of rows `ids_U` (U,): (U, D) float32."""
        ids = ids_U.detach().cpu().numpy().astype(np.uint64) + np.uint64(self.first_row)
        rows = np.empty((len(ids), self.embedding_dim), np.float32)
        step = max(1, _CHUNK_NUMBERS // self.embedding_dim)
        for start in range(0, len(ids), step):
            rows[start : start + step] = self._draw(ids[start : start + step])
        return torch.from_numpy(rows)

    def _draw(self, ids: np.ndarray) -> np.ndarray:
        pairs = (self.embedding_dim + 1) // 2  # one hash gives two numbers of 32 bits
        seed = mix64(np.array([self.seed % 2**64], np.uint64))
        row_keys = mix64(mix64(ids + _GOLDEN_GAMMA) ^ seed)
        counters = np.arange(1, pairs + 1, dtype=np.uint64) * _GOLDEN_GAMMA
        bits = mix64(row_keys[:, None] + counters).view(np.uint32)
        if self.distribution == "uniform":
            unit = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)  # [0, 1)
            rows = unit * np.float32(self.b - self.a) + np.float32(self.a)
        else:
            rows = self._normal(bits.reshape(len(ids), pairs, 2))
        return rows[:, : self.embedding_dim]

    def _normal(self, bits: np.ndarray) -> np.ndarray:
        """Box-Muller: two uniform numbers to two normal ones."""
        unit = (bits + 0.5) * 2.0**-32  # (0, 1), so that its logarithm is finite
        radius = np.sqrt(-2 * np.log(unit[..., 0]))
        angle = 2 * math.pi * unit[..., 1]
        normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
        return (normal * self.b + self.a).astype(np.float32).reshape(len(bits), -1)


def mix64(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: a bijection of uint64 that spreads every bit over all."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
