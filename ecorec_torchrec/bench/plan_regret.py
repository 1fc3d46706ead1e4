"""The planner's plan beside those of other rules and of chance, measured on the same batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from ecorec_torchrec.bench.plan import CHOSEN, PlanBenchOptions, Row
from ecorec_torchrec.bench.plan_steps import measure_step, planner_of, sharders, warm_up
from ecorec_torchrec.bench.plan_workload import Workload, WorkloadTable
from ecorec_torchrec.plan import tt_table_wise
from ecorec_torchrec.planner import DenseWork, EcoRecConstraints
from ecorec_torchrec.train.data_config import DrawnTablesConfig
from ecorec_torchrec.train.drawn_tables import draw_tables
from ecorec_torchrec.train.hardware import load_hardware
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.tt import TTSpec

_NUM_TABLES = 40
_DIM, _LOCAL_BATCH_SIZE, _RANK = 64, 256, 16
_MAX_ROWS, _MAX_POOLING = 100_000, 10.0
_EXPONENTS = (0.75, 1.25)
_SHARE_OF_DENSE = 0.6  # of the bytes of all dense tables, that the ranks have together
_RANDOM_PLANS = 5
_ROUNDS = 2  # so that a slow minute of the machine does not fall on one plan


def draw_workload(seed: int) -> Workload:
    """Tables of the list that `meta788` plans for, cut so that one machine holds them."""
    random = np.random.default_rng(seed)
    listed = draw_tables(DrawnTablesConfig())
    tables = [
        WorkloadTable(
            min(listed[i].num_embeddings, _MAX_ROWS),
            min(listed[i].pooling_factor, _MAX_POOLING),
            float(random.uniform(*_EXPONENTS)),
        )
        for i in random.choice(len(listed), _NUM_TABLES, replace=False)
    ]
    return Workload(tables, _DIM, _LOCAL_BATCH_SIZE, seed=seed)


def measure_plans(options: PlanBenchOptions) -> list[Row]:
    """A row per candidate plan; on every rank of a new process group."""
    with process_group("cpu"):
        workload = draw_workload(options.seed)
        calibration = load_hardware(options.hardware).calibration()
        constraints = dict.fromkeys(workload.names(), EcoRecConstraints(tt_ranks=(_RANK,)))
        dense_bytes = sum(table.num_embeddings for table in workload.tables) * _DIM * 4
        cap_bytes = int(_SHARE_OF_DENSE * dense_bytes / dist.get_world_size())
        planner = planner_of(workload, constraints, cap_bytes, calibration)
        model = workload.model()
        plan = planner.plan(model, sharders())
        torchrecs = planner_of(
            workload, constraints, cap_bytes, partitioner=GreedyPerfPartitioner()
        )
        specs = {name: getattr(entry, "tt", None) for name, entry in plan.plan["ebc"].items()}
        plans = {
            CHOSEN: plan,
            "ecorec_greedy": _table_wise(model, specs, _by_unique_ids(workload)),
            "torchrec": torchrecs.plan(workload.model(), sharders()),
        }
        random = np.random.default_rng(options.seed)
        for number in range(_RANDOM_PLANS):
            ranks = random.integers(dist.get_world_size(), size=len(specs)).tolist()
            plans[f"random_{number}"] = _table_wise(model, specs, ranks)
        dense = DenseWork.of(workload.model())
        warm_up()
        ms: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(_ROUNDS):
            for name, candidate in plans.items():
                measured = measure_step(workload, candidate, steps=options.steps)
                ms[name].append(measured.step_ms)
        return [
            {
                "world_size": dist.get_world_size(),
                "local_batch_size": workload.local_batch_size,
                "embedding_dim": workload.embedding_dim,
                "tables": len(workload.tables),
                "tt_tables": sum(spec is not None for spec in specs.values()),
                "plan": name,
                "predicted_ms": f"{planner.predict_step(dense, candidate).step_ms:.2f}",
                "measured_ms": f"{min(ms[name]):.2f}",
            }
            for name, candidate in plans.items()
        ]


def _by_unique_ids(workload: Workload) -> list[int]:
    """EcoRec's placement: most distinct ids first, to the rank that has fewest so far."""
    world_size = dist.get_world_size()
    profile = workload.profile(world_size)
    global_batch = workload.local_batch_size * world_size
    unique = [profile.tables[name].unique_rows(global_batch) for name in workload.names()]
    load = [(0.0, rank) for rank in range(world_size)]
    ranks = [0] * len(unique)
    for table in sorted(range(len(unique)), key=lambda table: -unique[table]):
        ids, ranks[table] = heapq.heappop(load)
        heapq.heappush(load, (ids + unique[table], ranks[table]))
    return ranks


def _table_wise(
    model: nn.Module, specs: dict[str, TTSpec | None], ranks: Sequence[int]
) -> ShardingPlan:
    """Every table in its form, on one rank."""
    fused = partial(table_wise, compute_kernel=EmbeddingComputeKernel.FUSED.value)
    owners = {
        name: fused(rank) if spec is None else tt_table_wise(rank, tt=spec)
        for (name, spec), rank in zip(specs.items(), ranks, strict=True)
    }
    (sharder,) = (s for s in sharders() if s.module_type is type(model.ebc))
    entries = construct_module_sharding_plan(
        model.ebc,
        owners,
        sharder=sharder,
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return ShardingPlan({"ebc": entries})
