"""Predicted memory and time of sharding options, with what TorchRec's estimators leave out.

Times are in milliseconds, bandwidths in bytes per millisecond, as in TorchRec's `Topology`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torchrec.optim as torchrec_optim
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    Perf,
    Shard,
    SharderDataMap,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingType

from ecorec_torchrec.lookup import OptimizerSpec

from .calibration import Calibration
from .costs import MeasuredCosts
from .lookups import lookups_per_rank
from .options import TTShardingOption
from .profile import Profile
from .tt_work import TTWork, cpu_workspace_bytes

# Operations that a device does while its main memory moves one byte, where neither a data sheet nor
# a measurement tells: single precision peak over bandwidth of V100 17, A100 13, H200 14, servers
# with DDR4 about 10 to 20. TorchRec's Topology knows the bandwidth only.
FLOPS_PER_BYTE = 14.0

_STATE_BYTES = 4
# Of the cores on CPUs, for a moment of backward: gradients before they are added to those of the
# leaves, and what the optimizer's step makes on its way, of Adam two.
_PASSING_COPIES = 3
_FUSED_KERNELS = (
    EmbeddingComputeKernel.FUSED.value,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)


class EcoRecPerfEstimator(EmbeddingPerfEstimator):
    """TorchRec's `EmbeddingPerfEstimator`, and the time of TT lookups.

    With measured costs of lookups everything is predicted from them (`MeasuredCosts`), but for
    kernels that spill over to host memory. Without them dense tables are TorchRec's formulas.
    Collectives of a TT table are then those of a dense table with the same outputs, or, data
    parallel, with as many bytes to reduce as the cores have; its compute is the larger of memory
    time and arithmetic time of `TTWork`, over the topology's bandwidth and the calibration's rate
    of products (a data sheet's), or `FLOPS_PER_BYTE`.

    Args:
        profile: of the data; ids of tables that it lacks count as drawn uniformly.
        calibration: of the machine.
    """

    def __init__(
        self,
        *args: Any,
        profile: Profile | None = None,
        calibration: Calibration | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._profiles = {} if profile is None else profile.tables
        self._calibration = calibration

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        stand_ins = [_with_distinct_shards(option) for option in sharding_options]
        super().estimate(stand_ins, sharder_data_map)
        for option, stand_in in zip(sharding_options, stand_ins, strict=True):
            if MeasuredCosts.knows(self._calibration, option):
                self._measured(option)
                continue
            option.is_weighted = stand_in.is_weighted
            if isinstance(option, TTShardingOption):
                perf = self._tt_perf(option, stand_in.shards[0].perf)
                perfs = dict.fromkeys((tuple(shard.size) for shard in option.shards), perf)
            else:
                perfs = {tuple(shard.size): shard.perf for shard in stand_in.shards}
            for shard in option.shards:
                shard.perf = copy.copy(perfs[tuple(shard.size)])

    def _measured(self, option: ShardingOption) -> None:
        assert self._calibration is not None
        costs = MeasuredCosts(self._calibration, self._topology, self._constraints, self._profiles)
        perfs = {
            size: costs.perf(option, size)
            for size in dict.fromkeys(tuple(shard.size) for shard in option.shards)
        }
        for shard in option.shards:
            shard.perf = copy.copy(perfs[tuple(shard.size)])

    def _tt_perf(self, option: TTShardingOption, stand_in: Perf) -> Perf:
        lookups = lookups_per_rank(option, self._constraints, self._topology)
        work = TTWork.of(option.tt, lookups, self._profiles.get(option.name))
        return Perf(
            fwd_compute=self._time_ms(work.forward_flops, work.forward_bytes),
            fwd_comms=stand_in.fwd_comms,
            bwd_compute=self._time_ms(work.backward_flops, work.backward_bytes),
            bwd_comms=stand_in.bwd_comms,
            input_dist_comms=stand_in.input_dist_comms,
        )

    def _time_ms(self, flops: float, num_bytes: float) -> float:
        on_host = self._topology.compute_device == "cpu"
        bandwidth = self._topology.ddr_mem_bw if on_host else self._topology.hbm_mem_bw
        flops_ms = flops / FLOPS_PER_BYTE / bandwidth
        if self._calibration is not None and "gemm" in self._calibration:
            flops_ms = self._calibration.time_ms("gemm", flops=flops)
        return max(num_bytes / bandwidth, flops_ms)


class EcoRecStorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's `EmbeddingStorageEstimator` with the true size of TT tables.

    Takes the place of the N x D that TorchRec charges: the cores, their gradients, the state of the
    optimizer in use, the workspace of the lookup and the index plan. Dense tables are charged two
    things that TorchRec leaves out: the state of an optimizer that is named in the sharder's
    `fused_params`, and gradient and optimizer state of data-parallel tables. Where no optimizer is
    known, a table that needs one is charged for Adam's two states.
    """

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        for option in sharding_options:
            fused_params = sharder_data_map[option.module_type_key].fused_params
            if isinstance(option, TTShardingOption):
                self._estimate_tt(option, fused_params, sharder_data_map)
            else:
                self._estimate_dense(option, fused_params, sharder_data_map)

    def _estimate_tt(
        self,
        option: TTShardingOption,
        fused_params: Mapping[str, Any],
        sharder_data_map: SharderDataMap,
    ) -> None:
        stand_in = option.dense_stand_in()
        super().estimate([stand_in], sharder_data_map)
        lookups = lookups_per_rank(option, self._constraints, self._topology)
        work = TTWork.of(option.tt, lookups)
        workspace = float(work.workspace_bytes)
        if self._topology.compute_device == "cpu":
            workspace = cpu_workspace_bytes(option.tt, lookups)
        workspace = min(workspace, fused_params.get("workspace_bytes") or math.inf)
        cores = option.tt.nbytes(option.dtype)
        held = cores
        if not self._is_inference:
            held += cores + _tt_state_bytes(option, fused_params)
            if self._topology.compute_device == "cpu":
                held += _PASSING_COPIES * option.tt.nbytes(torch.float32)
        missing = held + int(workspace) + work.index_plan_bytes - _weight_bytes(stand_in.tensor)
        for shard in option.shards:
            shard.storage = stand_in.shards[0].storage + self._in_main_memory(missing)

    def _estimate_dense(
        self,
        option: ShardingOption,
        fused_params: Mapping[str, Any],
        sharder_data_map: SharderDataMap,
    ) -> None:
        stand_in = option
        optimizer = optimizer_class(option, fused_params)
        if optimizer is not None and option.compute_kernel in _FUSED_KERNELS:
            stand_in = copy.copy(option)
            stand_in._tensor = torch.empty_like(option.tensor, device="meta")
            stand_in._tensor._optimizer_classes = [optimizer]
        super().estimate([stand_in], sharder_data_map)  # the shards are those of `option`
        data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        if data_parallel and not self._is_inference:
            known = hasattr(option.tensor, "_optimizer_classes")  # then TorchRec charges its state
            state = 0 if known else state_bytes(option.tensor.shape, optimizer)
            for shard in option.shards:
                shard.storage += self._in_main_memory(_weight_bytes(option.tensor) + state)

    def _in_main_memory(self, num_bytes: int) -> Storage:
        on_host = self._topology.compute_device == "cpu"
        return Storage(hbm=0 if on_host else num_bytes, ddr=num_bytes if on_host else 0)


def _with_distinct_shards(option: ShardingOption) -> ShardingOption:
    """What to ask TorchRec about: equal shards take equal time, and each takes it a while to tell.

    Hundreds of tables on hundreds of ranks have too many shards otherwise.
    """
    if isinstance(option, TTShardingOption):
        return option.dense_stand_in()
    distinct = copy.copy(option)
    distinct.shards = [
        Shard(list(size), [0, 0]) for size in dict.fromkeys(tuple(s.size) for s in option.shards)
    ]
    return distinct


def optimizer_class(
    option: ShardingOption, fused_params: Mapping[str, Any]
) -> type[torch.optim.Optimizer] | None:
    """The optimizer of a table, as far as model and sharder tell; None when they do not.

    `apply_optimizer_in_backward` marks the weight; else `fused_params` name an optimizer. A frozen
    table counts as one of SGD: neither has a state.
    """
    return optimizer_of(option.name, option.tensor, fused_params)


def optimizer_of(
    table: str, weight: torch.Tensor, fused_params: Mapping[str, Any]
) -> type[torch.optim.Optimizer] | None:
    """As `optimizer_class`, of a table that has no option yet."""
    marks = getattr(weight, "_optimizer_classes", None)
    if marks:
        return marks[0] or torch.optim.SGD
    try:
        spec = OptimizerSpec.from_fused_params(table, fused_params)
    except ValueError:  # one that only FBGEMM knows
        return torch.optim.Adam
    return None if spec is None else spec.cls or torch.optim.SGD


def _tt_state_bytes(option: TTShardingOption, fused_params: Mapping[str, Any]) -> int:
    optimizer = optimizer_class(option, fused_params)
    return sum(state_bytes(_as_rows(shape), optimizer) for shape in option.tt.core_shapes)


def _as_rows(core_shape: tuple[int, ...]) -> tuple[int, int]:
    return core_shape[0], math.prod(core_shape[1:])


def state_bytes(shape: tuple[int, ...], optimizer: type[torch.optim.Optimizer] | None) -> int:
    """What an optimizer keeps for a weight of (rows, columns); as Adam where it is not known."""
    rows, columns = shape
    if optimizer in (torch.optim.SGD, torchrec_optim.SGD):
        return 0
    if optimizer is torchrec_optim.RowWiseAdagrad:
        return _STATE_BYTES * rows
    if optimizer in (torch.optim.Adagrad, torchrec_optim.Adagrad):
        return _STATE_BYTES * rows * columns
    return 2 * _STATE_BYTES * rows * columns


def _weight_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
