"""What a machine's operations cost, as measured: nanoseconds per unit of work.

The time of an operation is the sum over its units of (count * cost): a call costs a latency, every
byte or lookup of it a little more. TorchRec's `HardwarePerfConfig` knows one bandwidth per kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_NS_PER_MS = 1e6

OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "copy": ("bytes",),
    "host_copy": ("bytes",),
    "to_device": ("bytes",),
    "gemm": ("flops",),
    "narrow_gemm": ("flops",),
    "gather": ("rows", "bytes"),
    "all_to_all": ("calls", "bytes"),
    "all_reduce": ("calls", "bytes"),
    "file_read": ("bytes",),
    "file_write": ("bytes",),
    "dense_forward": ("calls", "lookups", "row_bytes", "bag_bytes"),
    "dense_backward": ("calls", "lookups", "unique_rows", "unique_bytes", "bag_bytes"),
    "tt_forward": (
        "calls",
        "lookups",
        "unique_rows",
        "prefixes",
        "flops",
        "row_bytes",
        "bag_bytes",
    ),
    "tt_backward": ("calls", "lookups", "unique_rows", "flops", "parameters", "bag_bytes"),
    "step": ("calls", "features", "bags", "lookups", "bag_bytes", "tt_groups"),
}  # fmt: skip
"""Operation -> units of work that its time is made of.

- copy: bytes copied (each is read and written) in the memory of the device; host_copy: in that of
  the host; to_device: from host to device. gather: rows at random, bytes in them.
- gemm: operations of a large fp32 product (a multiply-add is two); narrow_gemm: of one whose inner
  side is a TT rank.
- all_to_all: bytes that a rank sends to others. all_reduce: bytes of the buffer.
- file_read, file_write: bytes, through the page cache of the operating system.
- dense_*: one call of a table-batched dense lookup: `lookups` ids, `row_bytes` of the rows that
  they read, `bag_bytes` of pooled rows, `unique_rows` and `unique_bytes` updated.
- tt_*: one call of a table-batched TT lookup (see kernels/tt_lookup): U unique rows, P prefixes,
  the operations of both products, `row_bytes` of the looked-up rows, `parameters` of the cores.
- step: what a training step takes beside lookups, collectives of pooled rows and matrix products:
  input distribution, permutations, autograd, optimizers of the dense part, Python. `bags`,
  `lookups` and `bag_bytes` are those of a rank's own samples, `tt_groups` the TT kernels of a rank.
"""


@dataclass(frozen=True)
class Calibration:
    """Costs of operations on a machine.

    Args:
        costs_ns: operation -> unit of work -> nanoseconds, of `OPERATIONS`; an operation that is
            not in it has not been measured. A unit that is missing costs nothing.
        step_bytes: unit of work of `step` -> bytes that a rank needs for it at the height of a
            step, beside weights, optimizer state and what the storage estimates charge to tables.
        machine: what was measured: names and versions; empty for values of a data sheet.
        assumptions: what the costs follow from where nothing was measured.

    Raises:
        ValueError: an unknown operation or unit, or a cost below 0.

    Example::

        calibration = Calibration({"all_to_all": {"calls": 80_000, "bytes": 0.5}})
        calibration.time_ms("all_to_all", calls=2, bytes=1_000_000)   # 0.66
    """

    costs_ns: Mapping[str, Mapping[str, float]]
    step_bytes: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for operation, costs in self.costs_ns.items():
            if operation not in OPERATIONS:
                raise ValueError(f"costs_ns: {operation!r} is none of {', '.join(OPERATIONS)}")
            for unit, cost in costs.items():
                if unit not in OPERATIONS[operation]:
                    known = ", ".join(OPERATIONS[operation])
                    raise ValueError(f"costs_ns.{operation}: {unit!r} is none of {known}")
                if not 0 <= cost < math.inf:
                    raise ValueError(f"costs_ns.{operation}.{unit}={cost} must be >= 0")
        if unknown := set(self.step_bytes) - set(OPERATIONS["step"]):
            known = ", ".join(OPERATIONS["step"])
            raise ValueError(f"step_bytes: {', '.join(sorted(unknown))} is none of {known}")

    def step_memory_bytes(self, **work: float) -> int:
        """What a step of so much work needs beside its tables."""
        return int(sum(self.step_bytes.get(unit, 0.0) * count for unit, count in work.items()))

    def __contains__(self, operation: str) -> bool:
        return operation in self.costs_ns

    def time_ms(self, operation: str, **work: float) -> float:
        """Milliseconds of so much work; units without a cost are free.

        Raises:
            KeyError: an operation that has no costs.
        """
        assert work.keys() <= set(OPERATIONS[operation]), (operation, work)
        costs = self.costs_ns[operation]
        return sum(costs.get(unit, 0.0) * count for unit, count in work.items()) / _NS_PER_MS

    @classmethod
    def of_data_sheet(cls, fp32_tflops: float, memory_gb_per_s: float) -> Calibration:
        """What peak rates tell: products at the peak, copies at the memory's bandwidth.

        Lookups and collectives are not in it: they are predicted from the bandwidths that the
        planner's `Topology` knows.
        """
        flop_ns, byte_ns = 1e-3 / fp32_tflops, 1 / memory_gb_per_s
        return cls(
            {
                "copy": {"bytes": 2 * byte_ns},
                "gemm": {"flops": flop_ns},
                "narrow_gemm": {"flops": flop_ns},
                "gather": {"bytes": byte_ns},
            },
            assumptions=(
                "products of any shape run at the peak rate",
                "rows at random are read at the memory's bandwidth",
                "collectives have no latency",
            ),
        )
