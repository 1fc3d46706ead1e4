"""What other planners would do, predicted with the same costs: for comparison in reports."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import (
    PartitionByType,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank
from torchrec.distributed.types import ShardingType

from .options import Candidate, main_memory_bytes
from .placement import Array

_PLACED_SHARDS = 1_500_000  # after which TorchRec's search is cut short


@dataclass(frozen=True)
class Baseline:
    """A placement by another planner's rule.

    Args:
        rule: what it does.
        ms_W: predicted time per rank; empty when it found no placement.
        over_cap_ranks: ranks with more than they have; that rule looks at no memory.
    """

    rule: str
    ms_W: Array
    over_cap_ranks: int = 0

    @property
    def step_ms(self) -> float | None:
        return float(self.ms_W.max()) if len(self.ms_W) else None

    @property
    def imbalance(self) -> float | None:
        return float(self.ms_W.max() / self.ms_W.mean()) if len(self.ms_W) else None


def greedy_by_unique_ids(
    candidates: Sequence[Candidate], unique_ids: Mapping[str, float], capacity: Topology
) -> Baseline:
    """EcoRec's placement: whole tables, most distinct ids first, to the rank with fewest so far.

    Args:
        candidates: of tables in the forms of a plan.
        unique_ids: table -> distinct ids in a global batch.
        capacity: the ranks, with what they have for tables.
    """
    whole = [c for c in candidates if c.option.sharding_type == ShardingType.TABLE_WISE.value]
    by_table = {candidate.option.fqn: candidate for candidate in reversed(whole)}
    order = sorted(by_table.values(), key=lambda c: (-unique_ids[c.option.name], c.option.fqn))
    ranks = [(0.0, rank) for rank in range(capacity.world_size)]
    ms_W, left_W = np.zeros(capacity.world_size), np.array(_caps(capacity))
    for candidate in order:
        ids, rank = heapq.heappop(ranks)
        ms_W[rank] += candidate.perfs[0].total
        left_W[rank] -= main_memory_bytes(candidate.storages[0], capacity)
        heapq.heappush(ranks, (ids + unique_ids[candidate.option.name], rank))
    rule = "EcoRec: table-wise, greedy by unique ids"
    return Baseline(rule, ms_W, over_cap_ranks=int((left_W < 0).sum()))


def torchrec_greedy(candidates: Sequence[Candidate], capacity: Topology) -> Baseline:
    """TorchRec's default: its uniform and greedy proposers and partitioner, cut short.

    Args:
        candidates: of tables in the forms of a plan.
        capacity: the ranks, with what they have for tables.
    """
    options = [_option(candidate) for candidate in candidates if candidate.block is None]
    partitioner = GreedyPerfPartitioner()
    fastest_ms_W = np.zeros(0)
    num_shards = num_proposals = 0
    for proposer in (UniformProposer(), GreedyProposer()):
        proposer.load(options)
        while (proposal := proposer.propose()) and num_shards < _PLACED_SHARDS:
            num_proposals += 1
            num_shards += sum(len(option.shards) for option in proposal)
            try:
                partitioner.partition(proposal, capacity)
                ms_W = _ms_per_rank(proposal, capacity.world_size)
                if not len(fastest_ms_W) or ms_W.max() < fastest_ms_W.max():
                    fastest_ms_W = ms_W
                found, rating = True, float(ms_W.max())
            except PlannerError:
                found, rating = False, None
            proposer.feedback(found, proposal, rating, capacity)
            reset_shard_rank(proposal)
    rule = f"TorchRec: uniform and greedy proposers, {num_proposals} proposals"
    return Baseline(rule, fastest_ms_W)


def _option(candidate: Candidate) -> ShardingOption:
    """With one object per run of shards where nobody has to tell their ranks apart."""
    option = copy.copy(candidate.option)
    runs = zip(candidate.option.shards, candidate.counts, strict=True)
    shards = [shard for run, count in runs for shard in itertools.repeat(run, count)]
    option.shards = shards if _is_everywhere(option) else [copy.copy(shard) for shard in shards]
    return option


def _is_everywhere(option: ShardingOption) -> bool:
    return option.partition_by == PartitionByType.UNIFORM.value


def _ms_per_rank(plan: Sequence[ShardingOption], world_size: int) -> Array:
    ms_W = np.zeros(world_size)
    for option in plan:
        if _is_everywhere(option):
            ms_W += [shard.perf.total for shard in option.shards]
            continue
        for shard in option.shards:
            ms_W[shard.rank] += shard.perf.total
    return ms_W


def _caps(capacity: Topology) -> list[int]:
    return [main_memory_bytes(device.storage, capacity) for device in capacity.devices]
