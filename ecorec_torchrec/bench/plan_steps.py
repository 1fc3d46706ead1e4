"""Training steps of a plan, measured and predicted; run by all ranks together."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    Partitioner,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecorec_torchrec.bench.measure import PeakMemory
from ecorec_torchrec.bench.plan_workload import Workload, WorkloadTable
from ecorec_torchrec.planner import Calibration, EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import get_ecorec_sharders

_BATCHES = 4
_ANY_BYTES = 1 << 40
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepMeasurement:
    """Of one plan.

    Args:
        step_ms: median over steps of the slowest rank.
        peak_bytes: of the rank that needs most: what training added to it.
    """

    step_ms: float
    peak_bytes: int


def sharders() -> list[ModuleSharder[nn.Module]]:
    """With row-wise Adagrad, as lookups are calibrated."""
    return get_ecorec_sharders(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    )


def planner_of(
    workload: Workload,
    constraints: Mapping[str, EcoRecConstraints],
    cap_bytes: int,
    calibration: Calibration | None = None,
    partitioner: Partitioner | None = None,
) -> EcoRecPlanner:
    """For the ranks of this process group, each with so many bytes.

    A partitioner of TorchRec's brings the whole search of TorchRec with it.
    """
    world_size = dist.get_world_size()
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size, local_world_size=world_size, ddr_cap_bytes=cap_bytes),
        kernel_config=KernelConfig(compute_device="cpu"),
    )
    return EcoRecPlanner(
        topology,
        batch_size=workload.local_batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=dict(constraints),
        profile=workload.profile(world_size),
        calibration=calibration,
        partitioner=partitioner,
        stats=NoopEmbeddingStats(),
        debug=False,
    )


def warm_up() -> None:
    """One step of small tables: what libraries load and compile at first use is no plan's doing."""
    workload = Workload([WorkloadTable(100, 1.0, 1.0)] * 4, 16, 4)
    allowed = EcoRecConstraints(tt="always", tt_ranks=(4,))
    constraints = dict.fromkeys(workload.names()[:2], allowed)
    planner = planner_of(workload, constraints, _ANY_BYTES)
    measure_step(workload, planner.plan(workload.model(), sharders()), steps=1)


def measure_step(
    workload: Workload, plan: ShardingPlan, *, steps: int, warmup_steps: int = 3
) -> StepMeasurement:
    """Trains some steps without a pipeline: forward, backward, update, one after the other."""
    batches = workload.batches(dist.get_rank(), _BATCHES)
    gc.collect()
    with PeakMemory(_CPU) as memory:
        torch.manual_seed(0)
        model = DistributedModelParallel(
            workload.model(), device=_CPU, plan=plan, sharders=sharders()
        )
        rest = dict(in_backward_optimizer_filter(model.named_parameters()))
        after = KeyedOptimizerWrapper(rest, lambda params: torch.optim.SGD(params, lr=0.01))
        optimizer = CombinedOptimizer([model.fused_optimizer, after])
        step_ms = []
        for step in range(warmup_steps + steps):
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(batches[step % _BATCHES]).backward()
            optimizer.step()
            step_ms.append((time.perf_counter() - start) * 1e3)
    figures = torch.tensor([*step_ms[warmup_steps:], float(memory.peak_bytes or 0)]).double()
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    *times, peak = figures.tolist()
    return StepMeasurement(statistics.median(times), int(peak))
