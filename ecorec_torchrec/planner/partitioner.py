"""Placing options by a partitioner of TorchRec's kind: ours, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import (
    Partitioner,
    Perf,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank

from .compression import Form
from .enumerator import EcoRecEnumerator
from .options import main_memory_bytes


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
        return self._balance_storage(proposal, storage_constraint)

    def _balance_storage(
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


class PartitionerCheck:
    """Whether the tables fit in given forms: tries a partitioner on a few proposals.

    Args:
        partitioner: places a proposal or raises `PlannerError`.
        enumerator: whose candidates the forms hold.
        capacity: the ranks with what is left of their memory for tables.
    """

    def __init__(
        self, partitioner: Partitioner, enumerator: EcoRecEnumerator, capacity: Topology
    ) -> None:
        self._partitioner = partitioner
        self._enumerator = enumerator
        self._capacity = capacity
        devices = capacity.devices
        self._total = sum(main_memory_bytes(device.storage, capacity) for device in devices)

    def __call__(self, forms: Sequence[Form]) -> list[ShardingOption] | None:
        """A proposal of these forms, one per table, that can be placed; None if there is none."""
        if sum(form.num_bytes for form in forms) > self._total:
            return None
        for proposal in zip(*(form.candidates for form in forms), strict=True):
            options = [self._enumerator.expanded(candidate) for candidate in proposal]
            try:
                self._partitioner.partition(proposal=options, storage_constraint=self._capacity)
                return options
            except PlannerError:
                continue
            finally:
                reset_shard_rank(options)
        return None
