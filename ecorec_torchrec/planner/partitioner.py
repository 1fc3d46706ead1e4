"""Placing options on ranks: even in time where that fits, else even in memory."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import Perf, PlannerError, ShardingOption, Storage, Topology
from torchrec.distributed.planner.utils import reset_shard_rank


class EcoRecPartitioner(GreedyPerfPartitioner):
    """TorchRec's `GreedyPerfPartitioner` with a second try.

    Placing every table on the rank with the least work fills the ranks unevenly and can fail where
    another placement fits; then the tables are placed, the largest first, on the rank with the
    least memory in use.
    """

    def partition(
        self,
        proposal: list[ShardingOption],
        storage_constraint: Topology,
        *args: Any,
        **kwargs: Any,
    ) -> list[ShardingOption]:
        try:
            return super().partition(proposal, storage_constraint, *args, **kwargs)
        except PlannerError:
            reset_shard_rank(proposal)
        return self.balance_storage(proposal, storage_constraint)

    def balance_storage(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Places the options so that the ranks hold equal bytes.

        Raises:
            PlannerError: it does not fit.
        """
        shards = [shard for option in proposal for shard in option.shards]
        perfs = [shard.perf for shard in shards]
        try:
            for shard in shards:
                # The partitioner evens out what it takes for time.
                load = main_memory_bytes(shard.storage, storage_constraint)
                shard.perf = Perf(fwd_compute=load, fwd_comms=0, bwd_compute=0, bwd_comms=0)
            return super().partition(proposal, storage_constraint)
        finally:
            for shard, perf in zip(shards, perfs, strict=True):
                shard.perf = perf


def main_memory_bytes(storage: Storage, topology: Topology) -> int:
    """Bytes of the memory that caps the ranks: host memory on CPU, HBM elsewhere."""
    return storage.ddr if topology.compute_device == "cpu" else storage.hbm
