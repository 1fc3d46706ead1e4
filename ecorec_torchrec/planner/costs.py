"""What a shard's lookups and collectives take, from measured costs of operations.

Units: a *sample* is a row of the batch, a *bag* a pooled row of one feature of one sample. For a
shard of C columns (all D but for column-wise shards), L lookups in B bags and U distinct rows:

    forward lookup    dense_forward(L, row bytes L C s, bag bytes B C 4)
                      tt_forward(L, U, P, FLOPs of both products, row and bag bytes)
    backward lookup   dense_backward(L, U, bytes U C s, bag bytes B C 4), with its update
                      tt_backward(L, U, FLOPs, cores' parameters, bag bytes), with its update
    communication     of what the rank sends or receives of the bags: B C 4 (W - 1) / W bytes, by
                      all-to-all; of a data-parallel weight all bytes, by all-reduce in backward
    input dist        8 bytes per id and 8 per bag, of which (W - 1) / W travel

with s bytes per element, W ranks. L, B and U are those of the global batch, of the rank's own
samples for data-parallel tables; row-wise shards divide L and U among them. Costs of a call are
shared by all tables of a rank and left to `predict_step`. The formulas take the place of those in
`torchrec/distributed/planner/estimator`, which know one bandwidth per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from .calibration import Calibration
from .lookups import lookups_per_rank
from .options import TTShardingOption
from .profile import TableProfile
from .tt_work import distinct_prefixes, expected_distinct, lookup_flops

_ID_BYTES = 8
_POOLED_BYTES = 4
_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
_MEASURED = ("dense_forward", "dense_backward", "tt_forward", "tt_backward")


@dataclass(frozen=True)
class ShardWork:
    """What one shard has to do per step.

    Args:
        lookups, unique_rows: L and U.
        bag_bytes: of pooled rows.
        sent_bytes: of them, what its rank sends in forward and receives in backward.
        input_bytes: of ids and bag lengths, what its rank receives.
    """

    lookups: float
    unique_rows: float
    bag_bytes: float
    sent_bytes: float
    input_bytes: float


class MeasuredCosts:
    """Predicts from a calibration of the ranks' own machine.

    Args:
        calibration: has costs of dense and TT lookups.
        topology: the ranks.
        constraints: what the planner knows of tables: batch sizes and poolings.
        profiles: of tables; ids of others count as drawn uniformly.
    """

    def __init__(
        self,
        calibration: Calibration,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        profiles: Mapping[str, TableProfile],
    ) -> None:
        assert all(operation in calibration for operation in _MEASURED)
        self._calibration = calibration
        self._topology = topology
        self._constraints = constraints
        self._profiles = profiles

    @staticmethod
    def knows(calibration: Calibration | None, option: ShardingOption) -> bool:
        """Whether lookups of the option have been measured: not those that spill over to a host."""
        if calibration is None or any(name not in calibration for name in _MEASURED):
            return False
        return isinstance(option, TTShardingOption) or option.compute_kernel in _KERNELS

    def perf(self, option: ShardingOption, shard_size: tuple[int, ...]) -> Perf:
        """Of one shard of that size."""
        work = self.work(option, shard_size)
        data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        if isinstance(option, TTShardingOption):
            forward_ms, backward_ms = self._tt_ms(option, work)
            weight_bytes = option.tt.num_parameters * option.dtype.itemsize
        else:
            forward_ms, backward_ms = self._dense_ms(option, shard_size[1], work)
            weight_bytes = option.tensor.numel() * option.tensor.element_size()
        if data_parallel:
            reduce_ms = self.all_reduce_ms(weight_bytes)
            return Perf(forward_ms, 0.0, backward_ms + self.update_ms(weight_bytes), reduce_ms)
        return Perf(
            fwd_compute=forward_ms,
            fwd_comms=self.all_to_all_ms(work.sent_bytes),
            bwd_compute=backward_ms,
            bwd_comms=self.all_to_all_ms(work.sent_bytes),
            input_dist_comms=self.all_to_all_ms(work.input_bytes),
        )

    def work(self, option: ShardingOption, shard_size: tuple[int, ...]) -> ShardWork:
        lookups = lookups_per_rank(option, self._constraints, self._topology)
        unique = self._unique_rows(option, lookups)
        samples = option.batch_size * option.num_inputs
        data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        samples *= 1 if data_parallel else self._topology.world_size
        bags = samples if option.is_pooled else lookups
        input_bytes = 0.0 if data_parallel else _ID_BYTES * (lookups + samples)
        shares = self._row_shares(option)
        bag_bytes = bags * shard_size[1] * _POOLED_BYTES
        travels = 0.0 if data_parallel else 1 - 1 / self._topology.world_size
        return ShardWork(
            lookups / shares,
            unique / shares,
            bag_bytes,
            bag_bytes * travels,
            input_bytes * travels / shares,
        )

    def all_to_all_ms(self, num_bytes: float) -> float:
        """Without latency. Between hosts at their bandwidth: one host has been measured."""
        return self._transfer_ms("all_to_all", num_bytes)

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Without latency."""
        return self._transfer_ms("all_reduce", num_bytes)

    def update_ms(self, weight_bytes: float) -> float:
        """Gradient zeroed and added, copied to be reduced and back, weight updated: 5 passes."""
        return self._calibration.time_ms("copy", bytes=5 * weight_bytes)

    def _transfer_ms(self, operation: str, num_bytes: float) -> float:
        topology = self._topology
        if topology.world_size > topology.local_world_size:
            return num_bytes / topology.inter_host_bw
        if operation not in self._calibration:
            return num_bytes / topology.intra_host_bw
        return self._calibration.time_ms(operation, bytes=num_bytes)

    def _row_shares(self, option: ShardingOption) -> int:
        """Ranks that the rows of a table are cut over."""
        if option.sharding_type == ShardingType.ROW_WISE.value:
            return self._topology.world_size
        if option.sharding_type in (
            ShardingType.TABLE_ROW_WISE.value,
            ShardingType.GRID_SHARD.value,
        ):
            return self._topology.local_world_size
        return 1

    def _unique_rows(self, option: ShardingOption, lookups: float) -> float:
        profile = self._profiles.get(option.name)
        if profile is None:
            return expected_distinct(option.tensor.shape[0], lookups)
        return profile.unique_rows(lookups / profile.all_lookups_per_sample)

    def _dense_ms(
        self, option: ShardingOption, columns: int, work: ShardWork
    ) -> tuple[float, float]:
        row_bytes = columns * option.tensor.element_size()
        forward_ms = self._calibration.time_ms(
            "dense_forward",
            lookups=work.lookups,
            row_bytes=work.lookups * row_bytes,
            bag_bytes=work.bag_bytes,
        )
        backward_ms = self._calibration.time_ms(
            "dense_backward",
            lookups=work.lookups,
            unique_rows=work.unique_rows,
            unique_bytes=work.unique_rows * row_bytes,
            bag_bytes=work.bag_bytes,
        )
        return forward_ms, backward_ms

    def _tt_ms(self, option: TTShardingOption, work: ShardWork) -> tuple[float, float]:
        spec, profile = option.tt, self._profiles.get(option.name)
        prefixes = distinct_prefixes(spec, spec.num_cores - 2, work.lookups, profile)
        forward_flops, backward_flops = lookup_flops(spec, work.unique_rows, prefixes)
        forward_ms = self._calibration.time_ms(
            "tt_forward",
            lookups=work.lookups,
            unique_rows=work.unique_rows,
            prefixes=prefixes,
            flops=forward_flops,
            row_bytes=work.lookups * spec.embedding_dim * _POOLED_BYTES,
            bag_bytes=work.bag_bytes,
        )
        backward_ms = self._calibration.time_ms(
            "tt_backward",
            lookups=work.lookups,
            unique_rows=work.unique_rows,
            flops=backward_flops,
            parameters=spec.num_parameters,
            bag_bytes=work.bag_bytes,
        )
        return forward_ms, backward_ms
