"""How many ids a rank looks up."""

from __future__ import annotations

from collections.abc import Mapping

from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ShardingType


def lookups_per_sample(
    option: ShardingOption, constraints: Mapping[str, ParameterConstraints] | None
) -> float:
    """Ids that a table's features look up per sample, on average."""
    poolings = get_num_poolings(dict(constraints or {}), option)
    return sum(length * count for length, count in zip(option.input_lengths, poolings, strict=True))


def lookups_per_rank(
    option: ShardingOption,
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> float:
    """Ids that a rank looks up per step: of the global batch, or of its own if data-parallel."""
    constraint = (constraints or {}).get(option.name)
    batch_sizes = (constraint.batch_sizes if constraint else None) or (
        [option.batch_size] * option.num_inputs
    )
    poolings = get_num_poolings(constraints, option)
    local = sum(
        length * count * batch_size
        for length, count, batch_size in zip(
            option.input_lengths, poolings, batch_sizes, strict=True
        )
    )
    data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
    return local if data_parallel else local * topology.world_size
