"""Predicted against measured steps and memory, on configurations drawn by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torchrec.distributed.types import ShardingType

from ecorec_torchrec.bench.plan import PlanBenchOptions, Row
from ecorec_torchrec.bench.plan_steps import measure_step, planner_of, sharders, warm_up
from ecorec_torchrec.bench.plan_workload import Workload, WorkloadTable
from ecorec_torchrec.planner import Calibration, DenseWork, EcoRecConstraints
from ecorec_torchrec.train.hardware import load_hardware
from ecorec_torchrec.train.launch import process_group

_BATCH_SIZES = (128, 256, 512, 1024, 2048)
_DIMS = (32, 64, 128)
_RANKS = (8, 16, 32)
_TT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NUM_TABLES = (8, 24)
_ROWS = (1_000, 400_000)
_POOLING = (1.0, 10.0)
_EXPONENTS = (0.75, 1.25)
_NO_LIMIT = 1 << 40
_MIB = 1 << 20
_ROUNDS = 2  # so that a slow moment of the machine does not fall on one configuration


@dataclass(frozen=True)
class Configuration:
    """A model to predict and to measure.

    Args:
        workload: tables and batches.
        rank: of the TT tables.
        tt_tables: their names.
    """

    workload: Workload
    rank: int
    tt_tables: tuple[str, ...]

    def constraints(self) -> dict[str, EcoRecConstraints]:
        """TT tables table-wise; dense ones as the planner likes."""
        table_wise = [ShardingType.TABLE_WISE.value]
        tt = EcoRecConstraints(tt="always", tt_ranks=(self.rank,), sharding_types=table_wise)
        dense = EcoRecConstraints(tt="never")
        return {name: tt if name in self.tt_tables else dense for name in self.workload.names()}


def draw_configuration(seed: int, number: int) -> Configuration:
    """The `number`-th configuration of a seed."""
    random = np.random.default_rng([seed, number])
    batch_size, dim, rank = (int(random.choice(c)) for c in (_BATCH_SIZES, _DIMS, _RANKS))
    tables = [
        WorkloadTable(
            int(np.exp(random.uniform(*np.log(_ROWS)))),
            float(np.exp(random.uniform(*np.log(_POOLING)))),
            float(random.uniform(*_EXPONENTS)),
        )
        for _ in range(random.integers(*_NUM_TABLES, endpoint=True))
    ]
    workload = Workload(tables, dim, batch_size, seed=seed + number)
    names = workload.names()
    count = round(float(random.choice(_TT_SHARES)) * len(names))
    chosen = random.choice(names, count, replace=False) if count else ()
    return Configuration(workload, rank, tuple(map(str, chosen)))


def predict_and_measure(options: PlanBenchOptions) -> list[Row]:
    """A row per configuration; on every rank of a new process group."""
    with process_group("cpu"):
        calibration = load_hardware(options.hardware).calibration()
        numbers = range(options.first, options.last + 1)
        warm_up()
        rounds = [
            [_measure(draw_configuration(options.seed, n), calibration, options) for n in numbers]
            for _ in range(_ROUNDS)
        ]
        fastest = [
            min(runs, key=lambda run: float(str(run["measured_ms"])))
            for runs in zip(*rounds, strict=True)
        ]
        return [{"number": n, **row} for n, row in zip(numbers, fastest, strict=True)]


def _measure(
    configuration: Configuration, calibration: Calibration, options: PlanBenchOptions
) -> dict[str, object]:
    workload = configuration.workload
    planner = planner_of(workload, configuration.constraints(), _NO_LIMIT, calibration)
    plan = planner.plan(workload.model(), sharders())
    predicted = planner.predict_step(DenseWork.of(workload.model()))
    measured = measure_step(workload, plan, steps=options.steps)
    return {
        "world_size": dist.get_world_size(),
        "local_batch_size": workload.local_batch_size,
        "embedding_dim": workload.embedding_dim,
        "tables": len(workload.tables),
        "tt_tables": len(configuration.tt_tables),
        "rank": configuration.rank,
        "lookups_per_sample": f"{sum(table.pooling_factor for table in workload.tables):.1f}",
        "predicted_ms": f"{predicted.step_ms:.2f}",
        "measured_ms": f"{measured.step_ms:.2f}",
        "predicted_mib": f"{max(predicted.bytes_W) / _MIB:.1f}",
        "measured_mib": f"{measured.peak_bytes / _MIB:.1f}",
        "bottleneck": predicted.bottleneck,
    }
