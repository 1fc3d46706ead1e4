"""What a user may demand of the plan of one table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from torchrec.distributed.planner.types import ParameterConstraints

from ecorec_torchrec.plan import check_dist_group

TT_MODES = ("auto", "always", "never")


@dataclass
class EcoRecConstraints(ParameterConstraints):
    """TorchRec's `ParameterConstraints`, whether the table may be compressed, and its dist group.

    Compression loses accuracy, so a plain dense table becomes TT only where `tt_ranks` allows it.
    A table whose config has a TT shape of its own keeps that shape.

    Args:
        tt: "auto" keeps the table dense where it fits and compresses it where it does not;
            "always" compresses it; "never" keeps it dense.
        tt_ranks: the TT ranks that the planner may choose from, for a table without a shape of its
            own. The highest that fits is taken.
        dist_group: the dist group of the table, from 0, see `GroupedParameterSharding`; None leaves
            it to the sharder's `num_dist_groups`.

    Raises:
        TypeError: `tt_ranks` is no collection of integers, `dist_group` no integer.
        ValueError: `tt` is none of the three, a rank is below 1, `dist_group` is negative, or a
            pooling factor is negative or not finite.

    Example::

        constraints = {
            "users": EcoRecConstraints(tt_ranks=(16, 32, 64), pooling_factors=[1.0]),
            "countries": EcoRecConstraints(tt="never", sharding_types=["data_parallel"]),
        }
        EcoRecPlanner(topology, constraints=constraints)
    """

    tt: str = field(default="auto", kw_only=True)
    tt_ranks: tuple[int, ...] = field(default=(), kw_only=True)
    dist_group: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.tt_ranks, str) or not isinstance(self.tt_ranks, Iterable):
            raise TypeError(f"tt_ranks must be integers, such as (16, 32), got {self.tt_ranks!r}")
        self.tt_ranks = tuple(self.tt_ranks)
        if self.tt not in TT_MODES:
            raise ValueError(f"tt={self.tt!r} is none of {', '.join(map(repr, TT_MODES))}")
        if any(type(rank) is not int or rank < 1 for rank in self.tt_ranks):
            raise ValueError(f"tt_ranks={self.tt_ranks} must be integers of at least 1")
        if any(
            not (math.isfinite(factor) and factor >= 0) for factor in self.pooling_factors or ()
        ):
            raise ValueError(f"pooling_factors={self.pooling_factors} must be finite and >= 0")
        check_dist_group(self.dist_group)
        if self.tt == "never" and self.tt_ranks:
            raise ValueError(f"tt='never' contradicts tt_ranks={self.tt_ranks}")

    @classmethod
    def of(cls, constraint: ParameterConstraints | None) -> EcoRecConstraints:
        """`constraint`, or one that says what TorchRec's kind, or a subclass of it, says."""
        if isinstance(constraint, EcoRecConstraints):
            return constraint
        if constraint is None:
            return cls()
        stock = fields(ParameterConstraints)
        return cls(**{field.name: getattr(constraint, field.name) for field in stock})

    def limits(self) -> str:
        """What it demands, without the fields that are as by default."""
        default = EcoRecConstraints()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{k}={v!r}" for k, v in values.items() if v != getattr(default, k))

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.tt, self.tt_ranks, self.dist_group))
