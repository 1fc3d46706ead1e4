"""Dist groups: the tables of one sharding type in several slices, each with its own all-to-alls.

TorchRec builds one input dist, lookup and output dist per key of its table of sharding infos, and
issues the output all-to-all of one key before the lookup of the next. So a sharding type under
several keys ("table_wise", "table_wise#1", ..) overlaps the one's communication with the other's
computation, with no communication code of ours and exactly the same numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ShardingType

DIST_GROUPS = "dist_groups"
"""Key of the sharder's `fused_params` under which its `DistGroups` travel."""


@dataclass(frozen=True)
class DistGroups:
    """How many groups the tables of a rank are cut into, and how unlike the groups' sizes are.

    Args:
        count: groups at most; a rank with fewer tables has no part in the later ones.
        slope: 0 for groups of equal size; 1 for the steepest arithmetic progression, which ends in
            a group of one table; between them in proportion. A large first group starts
            communication with many tables, a small last one leaves little of it exposed (EcoRec's
            `skew_degree`).

    Raises:
        TypeError: `count` is not an integer.
        ValueError: `count` is below 1, or `slope` is not within 0..1.
    """

    count: int = 1
    slope: float = 0.0

    def __post_init__(self) -> None:
        if type(self.count) is not int:
            raise TypeError(f"num_dist_groups must be an integer, got {self.count!r}")
        if self.count < 1:
            raise ValueError(f"num_dist_groups={self.count} must be at least 1")
        if not 0 <= self.slope <= 1:
            raise ValueError(f"dist_group_slope={self.slope} is not within 0..1")

    def sizes(self, num_tables: int) -> list[int]:
        """Tables in each group, none of them empty.

        Example::

            DistGroups(4).sizes(24)  # [6, 6, 6, 6]
            DistGroups(4, slope=0.5).sizes(24)  # [9, 7, 5, 3]
            DistGroups(4, slope=1).sizes(24)  # [11, 8, 4, 1]
        """
        count = min(self.count, num_tables)
        if count <= 1:
            return [num_tables] * count
        mean = num_tables / count
        drop = self.slope * (mean - 1)  # from the mean to the last size, and from the first to it
        exact = [round(mean + drop * (1 - 2 * g / (count - 1)), 9) for g in range(count)]
        sizes = [math.floor(size) for size in exact]
        by_remainder = sorted(range(count), key=lambda g: sizes[g] - exact[g])
        for group in by_remainder[: num_tables - sum(sizes)]:
            sizes[group] += 1
        return sizes


def split_dist_groups(
    infos_by_type: dict[str, list[EmbeddingShardingInfo]], dist_groups: DistGroups
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Deals the tables of every model-parallel sharding type out to groups.

    A table whose plan entry names a `dist_group` is in that one. The others of each rank are cut in
    table order, so that the groups ask equal work of every rank. Data-parallel tables have no
    all-to-all and stay together.

    Example::

        split_dist_groups({"table_wise": [a, b, c]}, DistGroups(2))  # a, b on rank 0, c on rank 1
        # {"table_wise": [a, c], "table_wise#1": [b]}
    """
    found: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, infos in infos_by_type.items():
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            _warn_of_groups(infos)
            found[sharding_type] = infos
            continue
        groups = _groups_of(infos, dist_groups)
        for group in sorted(set(groups)):
            key = f"{sharding_type}#{group}" if group else sharding_type
            found[key] = [info for info, g in zip(infos, groups, strict=True) if g == group]
    return found


def sharding_type_of(key: str) -> str:
    """The sharding type of a dist group's key: "table_wise" for "table_wise#1"."""
    return key.partition("#")[0]


def _groups_of(infos: Sequence[EmbeddingShardingInfo], dist_groups: DistGroups) -> list[int]:
    groups = [_planned_group(info) for info in infos]
    open_of_owner: dict[int, list[int]] = {}
    for i, info in enumerate(infos):
        if groups[i] is None:
            owner = (info.param_sharding.ranks or [0])[0]
            open_of_owner.setdefault(owner, []).append(i)
    for positions in open_of_owner.values():
        sizes = dist_groups.sizes(len(positions))
        dealt = [group for group, size in enumerate(sizes) for _ in range(size)]
        for i, group in zip(positions, dealt, strict=True):
            groups[i] = group
    return [group for group in groups if group is not None]


def _planned_group(info: EmbeddingShardingInfo) -> int | None:
    return getattr(info.param_sharding, "dist_group", None)  # TorchRec's own entries have none


def _warn_of_groups(infos: Sequence[EmbeddingShardingInfo]) -> None:
    for info in infos:
        if _planned_group(info) is not None:
            warnings.warn(
                f"dist_group={_planned_group(info)} is ignored for table "
                f"{info.embedding_config.name!r}: it is data-parallel and travels in no group",
                stacklevel=2,
            )
