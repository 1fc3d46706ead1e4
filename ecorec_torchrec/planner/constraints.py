"""What a user may demand of the plan of one table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from torchrec.distributed.planner.types import ParameterConstraints

from ecorec_torchrec.plan import check_dist_group

TT_MODES = ("auto", "always", "never")
TIER_MODES = TT_MODES


@dataclass
class EcoRecConstraints(ParameterConstraints):
    """TorchRec's `ParameterConstraints`, and in which other forms the table may be stored.

    Compression loses accuracy, so a plain dense table becomes TT only where `tt_ranks` allows it.
    A table whose config has a TT shape of its own keeps that shape. Tiers (a cache in front of
    memory and a file) are exact but need storage: a table is tiered only where `tier_folder` says
    on which.

    Args:
        tt: "auto" keeps the table dense where it fits and compresses it where it does not;
            "always" compresses it; "never" keeps it dense.
        tt_ranks: the TT ranks that the planner may choose from, for a table without a shape of its
            own. The highest that fits is taken.
        tiers: "auto" tiers the table where it does not fit into the ranks' memory; "always" tiers
            it; "never" does not.
        tier_folder: where its row files would lie, on storage of the host.
        prefetch_batches: how many batches ahead rows of a tiered table are fetched.
        direct_reads: whether its file is read and written past the page cache.
        dist_group: the dist group of the table, from 0, see `GroupedParameterSharding`; None leaves
            it to the sharder's `num_dist_groups`.

    Raises:
        TypeError: `tt_ranks` is no collection of integers, `dist_group` no integer.
        ValueError: `tt` or `tiers` is none of the three, or contradicts another field, a rank is
            below 1, `prefetch_batches` or `dist_group` is negative, or a pooling factor is negative
            or not finite.

    Example::

        constraints = {
            "users": EcoRecConstraints(tt_ranks=(16, 32, 64), pooling_factors=[1.0]),
            "ads": EcoRecConstraints(tier_folder="/nvme/tables"),
            "countries": EcoRecConstraints(tt="never", sharding_types=["data_parallel"]),
        }
        EcoRecPlanner(topology, constraints=constraints)
    """

    tt: str = field(default="auto", kw_only=True)
    tt_ranks: tuple[int, ...] = field(default=(), kw_only=True)
    tiers: str = field(default="auto", kw_only=True)
    tier_folder: str | None = field(default=None, kw_only=True)
    prefetch_batches: int = field(default=1, kw_only=True)
    direct_reads: bool = field(default=False, kw_only=True)
    dist_group: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.tt_ranks, str) or not isinstance(self.tt_ranks, Iterable):
            raise TypeError(f"tt_ranks must be integers, such as (16, 32), got {self.tt_ranks!r}")
        self.tt_ranks = tuple(self.tt_ranks)
        for name, modes in (("tt", TT_MODES), ("tiers", TIER_MODES)):
            if getattr(self, name) not in modes:
                known = ", ".join(map(repr, modes))
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {known}")
        if any(type(rank) is not int or rank < 1 for rank in self.tt_ranks):
            raise ValueError(f"tt_ranks={self.tt_ranks} must be integers of at least 1")
        if any(
            not (math.isfinite(factor) and factor >= 0) for factor in self.pooling_factors or ()
        ):
            raise ValueError(f"pooling_factors={self.pooling_factors} must be finite and >= 0")
        check_dist_group(self.dist_group)
        if self.tt == "never" and self.tt_ranks:
            raise ValueError(f"tt='never' contradicts tt_ranks={self.tt_ranks}")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if self.tiers == "never" and self.tier_folder is not None:
            raise ValueError(f"tiers='never' contradicts tier_folder={self.tier_folder!r}")
        if self.tiers == "always" and self.tier_folder is None:
            raise ValueError("tiers='always' needs a tier_folder")
        if self.tiers == "always" and self.tt_ranks:
            raise ValueError(
                f"tiers='always' contradicts tt_ranks={self.tt_ranks}: a table has one form"
            )
        if self.tt == "always" and self.tier_folder is not None:
            raise ValueError(f"tt='always' contradicts tier_folder={self.tier_folder!r}")
        if type(self.prefetch_batches) is not int or self.prefetch_batches < 0:
            raise ValueError(f"prefetch_batches={self.prefetch_batches!r} must be an integer >= 0")

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
        own = (self.tt, self.tt_ranks, self.tiers, self.tier_folder, self.prefetch_batches)
        return hash((super().__hash__(), *own, self.direct_reads, self.dist_group))
