"""How the Triton kernels are launched: tile sizes, warps and arithmetic, chosen by shape.

Not measured on a GPU. The choice follows what the compiler reports for sm_80, sm_90, sm_100 and
gfx942: no spilled registers, shared memory within the chip
(docs/benchmarks/triton_compile.csv, written by `ecorec bench compile`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

_MIN_DOT = 16
"""What the matrix units of all targets take: smaller sides are padded."""
_MAX_REGISTERS = 128
_MAX_WARPS = 8

LOOKUPS_PER_PIECE = 128
PREFIXES_PER_PIECE = 32
ROWS_PER_PIECE = 64
"""Entries of a piece of a long sum (`triton_backward.py`); with them the bits would change."""


@dataclass(frozen=True)
class Blocks:
    """Tile of one kernel: `m` x `n` results per program, `k` summed per step."""

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def schedule(self) -> dict[str, int]:
        """Launch options.

        Left to itself NVIDIA's assembler spills a few registers to fit more warps on the chip,
        while using a fourth of what it may: a stated limit stops that.
        """
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if torch.version.hip is not None else options | {"maxnreg": _MAX_REGISTERS}

    def varied(
        self, warps_factor: int, num_stages: int, *, m: int | None = None, n: int | None = None
    ) -> Blocks:
        """The same tile with more warps or other stages, its sides at most `m` and `n`."""
        return replace(
            self,
            m=min(self.m, m or self.m),
            n=min(self.n, n or self.n),
            num_warps=min(self.num_warps * warps_factor, _MAX_WARPS),
            num_stages=num_stages,
        )


@dataclass(frozen=True)
class LaunchConfig:
    """One configuration for all kernels of a lookup; hashable.

    A function of the shape of the cores and the arithmetic alone, never of the batch or the number
    of tables: the order of every sum, and with it a table's bits, must not depend on them.
    """

    precision: str
    """`input_precision` of `tl.dot`: "ieee", "tf32" or "bf16x3"."""
    tile_prefixes: int
    """Prefixes of one group that are multiplied together."""
    prefix: Blocks
    """Part 1: m over (prefix, q1), n over (q2, r2), k over r1."""
    row: Blocks
    """Part 2, one program per prefix: m over (q1, q2), n over (row, q3), k over r2."""
    prefix_grad: Blocks
    """One program per prefix: m over (q1, q2), n over r2, k over (row, q3)."""
    left_grad: Blocks
    """Gradient of the gathered rows of core 0: m over (prefix, q1), n over r1, k over (q2, r2)."""
    core1_grad: Blocks
    """One program per row of core 1: m over r1, n over (q2, r2), k over (prefix, q1)."""
    core2_grad: Blocks
    """One program per piece of a row of core 2: m over r2, n over q3, k over (q1, q2)."""
    gather: Blocks
    """Sums of gathered rows: m segments (bags, rows, lookups) by n columns, k entries per step."""
    pieces0: Blocks
    """Sums of the pieces of a row of core 0: n of its (q1, r1) elements."""
    pieces2: Blocks
    """Sums of the pieces of a row of core 2: n of its (r2, q3) elements."""

    @classmethod
    def choose(
        cls, col_factors: tuple[int, int, int], ranks: tuple[int, int], precision: str
    ) -> LaunchConfig:
        """The heuristic.

        Args:
            col_factors: q1, q2, q3.
            ranks: r1, r2.
            precision: from `dot_precision`.

        Example::

            LaunchConfig.choose((4, 4, 4), (16, 16), "tf32").prefix   # m=64, n=64, k=16
        """
        (q1, q2, q3), (r1, r2) = col_factors, ranks
        side, step = 64, 32 if precision == "tf32" else 16
        tile_rows = max(64, _pow2(q1))
        return cls(
            precision=precision,
            tile_prefixes=tile_rows // q1,
            prefix=_blocks(tile_rows, _fit(q2 * r2, side), _fit(r1, step)),
            row=_blocks(_fit(q1 * q2, side), max(_pow2(q3), _MIN_DOT), _fit(r2, step)),
            prefix_grad=_blocks(_fit(q1 * q2, side), _fit(r2, side), max(_pow2(q3), _MIN_DOT)),
            left_grad=_blocks(tile_rows, _fit(r1, side), _fit(q2 * r2, step)),
            core1_grad=_blocks(_fit(r1, side), _fit(q2 * r2, side), step),
            core2_grad=_blocks(_fit(r2, side), max(_pow2(q3), _MIN_DOT), _fit(q1 * q2, step)),
            gather=_gather_blocks(q1 * q2 * q3),
            pieces0=_sum_blocks(q1 * r1),
            pieces2=_sum_blocks(r2 * q3),
        )

    def candidates(self) -> list[LaunchConfig]:
        """What a search may choose from (`autotune.py`), this configuration first.

        Only the sides that no sum runs over, warps and stages vary: the order in which the kernels
        add is the same in all. How a GPU adds within one matrix instruction, or across the threads
        of a program, may still depend on them, and with it the last bits.
        """
        return list(
            dict.fromkeys(
                replace(
                    self,
                    prefix=self.prefix.varied(warps, stages, n=side),
                    row=self.row.varied(warps, stages, m=side),
                    prefix_grad=self.prefix_grad.varied(warps, stages, m=side, n=side),
                    left_grad=self.left_grad.varied(warps, stages, n=side),
                    core1_grad=self.core1_grad.varied(warps, stages, m=side, n=side),
                    core2_grad=self.core2_grad.varied(warps, stages, m=side),
                )
                for side, warps, stages in product((64, 32), (1, 2), (2, 3))
            )
        )


def dot_precision(core_dtype: torch.dtype) -> str:
    """The arithmetic of the matrix products: operands are fp32, half cores are widened on load.

    fp32 cores follow `torch.get_float32_matmul_precision()`: "highest" is "ieee"; the others allow
    "tf32", on AMD "bf16x3" (three products of bf16 halves). For bf16 and fp16 cores the same fast
    forms are exact in the cores and round the other operand to 11 (bf16x3: 16) bits.
    """
    if core_dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32" if torch.version.hip is None else "bf16x3"


def _pow2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _fit(size: int, limit: int) -> int:
    """The block side for a dimension: padded to what matrix units take, at most `limit`."""
    return min(max(_pow2(size), _MIN_DOT), limit)


def _blocks(m: int, n: int, k: int) -> Blocks:
    warps = 1 if m * n <= 512 else 4 if m * n <= 8192 else 8
    return Blocks(m, n, k, num_warps=warps)


def _gather_blocks(dim: int) -> Blocks:
    columns = min(_pow2(dim), 128)
    return Blocks(m=512 // columns, n=columns, k=4)


def _sum_blocks(size: int) -> Blocks:
    return Blocks(m=1, n=min(_pow2(size), 256), k=1, num_warps=1)
