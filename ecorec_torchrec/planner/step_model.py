"""The predicted step of a whole model: tables, dense part, and what a step takes beside them.

A step is a chain of phases, each over when its slowest rank is done:

    input dist        ids and bag lengths travel                      Perf.input_dist_comms
    forward lookup    sums over the shards of a rank, and one call    Perf.fwd_compute
                      per group of tables that share a kernel
    output dist       one all-to-all per sharding type                Perf.fwd_comms
    dense part        FLOPs over the rate of large products, an all-reduce of its gradients
    backward          the same in reverse, with the updates           Perf.bwd_comms, bwd_compute
    framework         what remains, as calibrated: `step` of a `Calibration`
    fetching rows     of tiered tables                                Perf.prefetch_compute; with
                      prefetching only as far as it exceeds all the other phases

Nothing else overlaps: that is what a train loop without a pipeline does, and the upper end of what
one with a pipeline does. Takes the place of TorchRec's `NoopCriticalPathEstimator`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import Perf, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from .calibration import Calibration
from .options import TTShardingOption, main_memory_bytes

_FLOAT_BYTES = 4
_UPDATE_PASSES = 5
_NO_TIME = Perf(fwd_compute=0, fwd_comms=0, bwd_compute=0, bwd_comms=0)


@dataclass(frozen=True)
class DenseWork:
    """What a model does beside its tables, all of it on every rank.

    Args:
        flops_per_sample: of forward and backward, a multiply-add counted as two.
        parameters: that data-parallel ranks reduce and update.
    """

    flops_per_sample: float
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> DenseWork:
        """Of the `nn.Linear` layers of a model; what else it computes has no parameters to count.

        A product of a layer is made three times: for outputs, for the gradients of inputs and for
        those of weights.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        return cls(
            flops_per_sample=3 * 2.0 * sum(layer.weight.numel() for layer in layers),
            parameters=sum(p.numel() for layer in layers for p in layer.parameters(recurse=False)),
        )


@dataclass(frozen=True)
class StepPrediction:
    """A training step.

    Args:
        parts_ms: phase -> time of its slowest rank.
        bytes_W: per rank the most memory in use at a time: tables, optimizer state, buffers of the
            step, dense part.
    """

    parts_ms: Mapping[str, float]
    bytes_W: tuple[int, ...]

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms.values())

    @property
    def bottleneck(self) -> str:
        """The phase that takes longest."""
        return max(self.parts_ms, key=self.parts_ms.__getitem__)


def predict_step(
    options: Sequence[ShardingOption],
    topology: Topology,
    calibration: Calibration,
    dense: DenseWork,
    local_batch_size: int,
    lookups_per_sample: float,
) -> StepPrediction:
    """Predicts a step of tables whose shards have ranks and estimates from `calibration`.

    Args:
        options: of a plan, one per table.
        topology: the ranks.
        calibration: with measured costs.
        dense: the rest of the model.
        local_batch_size: samples per rank.
        lookups_per_sample: of all tables.
    """
    perfs = [_NO_TIME] * topology.world_size
    for option in options:
        for shard in option.shards:
            perfs[shard.rank] += shard.perf
    calls = _Calls.of(options, topology.world_size)

    def slowest(phase: str, calls_W: Sequence[float] = ()) -> float:
        times = [getattr(perf, phase) for perf in perfs]
        extra = calls_W or [0.0] * len(times)
        return max(time + more for time, more in zip(times, extra, strict=True))

    exchange_ms = calls.exchanges * _call_ms(calibration, "all_to_all")
    bag_bytes = sum(
        local_batch_size * option.num_inputs * option.tensor.shape[1] * _FLOAT_BYTES
        for option in options
    )
    work = step_work(
        features=sum(option.num_inputs for option in options),
        samples=local_batch_size,
        lookups=local_batch_size * lookups_per_sample,
        bag_bytes=bag_bytes,
        tt_groups=max(calls.tt_W),
    )
    parts_ms = {
        "input distribution": slowest("input_dist_comms"),
        "forward lookup": slowest("fwd_compute", calls.lookup_ms(calibration, "forward")),
        "forward communication": exchange_ms + slowest("fwd_comms"),
        "dense part": _dense_ms(dense, local_batch_size, topology, calibration),
        "backward communication": exchange_ms + slowest("bwd_comms"),
        "backward lookup": slowest("bwd_compute", calls.lookup_ms(calibration, "backward")),
    }
    if "step" in calibration:
        parts_ms["framework"] = calibration.time_ms("step", **work)
    if any(perf.prefetch_compute for perf in perfs):
        parts_ms["fetching rows"] = _fetch_ms(options, topology, sum(parts_ms.values()))
    dense_bytes = 2 * dense.parameters * _FLOAT_BYTES
    step_bytes = calibration.step_memory_bytes(**work)
    bytes_W = [dense_bytes + step_bytes] * topology.world_size
    for option in options:
        for shard in option.shards:
            bytes_W[shard.rank] += main_memory_bytes(shard.storage, topology)
    return StepPrediction(parts_ms, tuple(bytes_W))


def step_work(
    *, features: float, samples: float, lookups: float, bag_bytes: float, tt_groups: float
) -> dict[str, float]:
    """The work that `step` costs are of."""
    return {
        "calls": 1.0,
        "features": features,
        "bags": features * samples,
        "lookups": lookups,
        "bag_bytes": bag_bytes,
        "tt_groups": tt_groups,
    }


@dataclass(frozen=True)
class _Calls:
    """How often what is called in a step: per rank, or by all together.

    Args:
        dense_W, tt_W: kernels of dense and of TT tables, one per group that shares one.
        exchanges: all-to-alls of pooled rows, one per sharding type.
    """

    dense_W: list[int]
    tt_W: list[int]
    exchanges: int

    @classmethod
    def of(cls, options: Sequence[ShardingOption], world_size: int) -> _Calls:
        dense: dict[int, set[object]] = defaultdict(set)
        tt: dict[int, set[object]] = defaultdict(set)
        exchanged = set()
        for option in options:
            if option.sharding_type != ShardingType.DATA_PARALLEL.value:
                exchanged.add((option.path, option.sharding_type))
            key: tuple[object, ...] = (option.path, option.sharding_type, option.compute_kernel)
            groups = dense
            if isinstance(option, TTShardingOption):
                groups = tt
                key += (option.tt.col_factors, option.tt.ranks, option.dtype)
            for shard in option.shards:
                groups[shard.rank].add(key)
        return cls(
            [len(dense[rank]) for rank in range(world_size)],
            [len(tt[rank]) for rank in range(world_size)],
            len(exchanged),
        )

    def lookup_ms(self, calibration: Calibration, way: str) -> list[float]:
        """Time of the calls alone, per rank."""
        dense_ms = _call_ms(calibration, f"dense_{way}")
        tt_ms = _call_ms(calibration, f"tt_{way}")
        pairs = zip(self.dense_W, self.tt_W, strict=True)
        return [dense * dense_ms + tt * tt_ms for dense, tt in pairs]


def _fetch_ms(options: Sequence[ShardingOption], topology: Topology, other_ms: float) -> float:
    """What fetching rows adds, on the slowest rank, to a step of `other_ms`."""
    awaited_W, hidden_W = [0.0] * topology.world_size, [0.0] * topology.world_size
    for option in options:
        ms_W = hidden_W if getattr(option, "fetch_is_hidden", False) else awaited_W
        for shard in option.shards:
            ms_W[shard.rank] += shard.perf.prefetch_compute
    awaited_ms = max(awaited_W)
    return awaited_ms + max(0.0, max(hidden_W) - other_ms - awaited_ms)


def _call_ms(calibration: Calibration, operation: str) -> float:
    return calibration.time_ms(operation, calls=1) if operation in calibration else 0.0


def _dense_ms(
    dense: DenseWork, local_batch_size: int, topology: Topology, calibration: Calibration
) -> float:
    num_bytes = dense.parameters * _FLOAT_BYTES
    time_ms = calibration.time_ms("gemm", flops=dense.flops_per_sample * local_batch_size)
    time_ms += calibration.time_ms("copy", bytes=_UPDATE_PASSES * num_bytes)
    if "all_reduce" in calibration and topology.world_size > 1:
        time_ms += calibration.time_ms("all_reduce", calls=1, bytes=num_bytes)
    return time_ms
