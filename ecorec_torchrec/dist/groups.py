"""Dist groups: the tables of one sharding type in several slices, each with its own all-to-alls.

TorchRec builds one input dist, lookup and output dist per key of its table of sharding infos, and
issues the output all-to-all of one key before the lookup of the next. So a sharding type under
several keys ("table_wise", "table_wise#1", ..) overlaps the one's communication with the other's
computation, with no communication code of ours and exactly the same numbers.
"""

from __future__ import annotations

from collections import Counter

from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ShardingType

NUM_DIST_GROUPS = "num_dist_groups"
"""Key of the sharder's `fused_params` under which the number of groups travels."""


def split_dist_groups(
    infos_by_type: dict[str, list[EmbeddingShardingInfo]], num_dist_groups: int
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Deals the tables of every model-parallel sharding type out to at most `num_dist_groups`.

    Each rank's tables are dealt in turn, so that the groups ask equal work of every rank.
    Data-parallel tables have no all-to-all and stay together.

    Example::

        split_dist_groups({"table_wise": [a, b, c]}, 2)   # a, b on rank 0, c on rank 1
        # {"table_wise": [a, c], "table_wise#1": [b]}
    """
    groups: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, infos in infos_by_type.items():
        dealt: Counter[int] = Counter()
        for info in infos:
            if sharding_type == ShardingType.DATA_PARALLEL.value:
                group = 0
            else:
                owner = (info.param_sharding.ranks or [0])[0]
                group = dealt[owner] % num_dist_groups
                dealt[owner] += 1
            key = f"{sharding_type}#{group}" if group else sharding_type
            groups.setdefault(key, []).append(info)
    return groups


def sharding_type_of(key: str) -> str:
    """The sharding type of a dist group's key: "table_wise" for "table_wise#1"."""
    return key.partition("#")[0]
