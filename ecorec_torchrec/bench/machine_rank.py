"""The microbenchmarks of one rank; all ranks of a machine run them at the same time."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torchrec.distributed.types import ShardingType
from torchrec.optim import RowWiseAdagrad

from ecorec_torchrec.bench.cost_fit import Sample, fit_costs
from ecorec_torchrec.bench.machine import MachineBenchOptions
from ecorec_torchrec.bench.measure import clock, zipf_ids
from ecorec_torchrec.bench.plan_steps import measure_step, planner_of, sharders, warm_up
from ecorec_torchrec.bench.plan_workload import Workload, WorkloadTable
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag
from ecorec_torchrec.planner import Calibration, DenseWork, EcoRecConstraints
from ecorec_torchrec.planner.step_model import step_work
from ecorec_torchrec.planner.tt_work import lookup_flops
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.tt import TTSpec

_MIB = 1 << 20
_FLOAT_BYTES = 4
_WARMUP_RUNS = 2
_NO_LIMIT = 1 << 40
_NS_PER_MS = 1e6

Samples = dict[str, list[Sample]]


@dataclass(frozen=True)
class MachineSamples:
    """What was measured.

    Args:
        ms: operation -> timed runs.
        step_bytes: memory of steps; empty where they were not measured.
    """

    ms: Samples
    step_bytes: list[Sample]

    def costs_ns(self) -> dict[str, dict[str, float]]:
        """Operation -> unit of work -> nanoseconds."""
        return {
            operation: {unit: cost * _NS_PER_MS for unit, cost in fit_costs(samples).items()}
            for operation, samples in self.ms.items()
        }


def measure_on_rank(options: MachineBenchOptions) -> MachineSamples:
    """All operations, by the slowest rank; equal on all ranks."""
    with process_group(options.device) as device:
        bench = _MachineBench(device, options)
        rounds = [bench.operations() for _ in range(options.rounds)]
        ms = {name: _least([found[name] for found in rounds]) for name in rounds[0]}
        if device.type == "cuda":
            return MachineSamples(ms, [])
        ms["step"], step_bytes = bench.steps(Calibration(MachineSamples(ms, []).costs_ns()))
        return MachineSamples(ms, step_bytes)


def _least(rounds: list[list[Sample]]) -> list[Sample]:
    """Of every sample the round that took least."""
    runs = zip(*rounds, strict=True)
    return [min(samples, key=lambda sample: sample.total) for samples in runs]


@dataclass(frozen=True)
class LookupCase:
    """Tables of one size, and a batch.

    Args:
        num_tables, num_embeddings, embedding_dim: T, N, D.
        num_bags, bag_length: per table.
        rank: of TT tables.
        exponent: of the ids' Zipf distribution.
    """

    num_tables: int
    num_embeddings: int
    embedding_dim: int
    num_bags: int
    bag_length: int
    rank: int = 0
    exponent: float = 1.05


_DENSE_CASES = (
    LookupCase(1, 200_000, 64, 2048, 1),
    LookupCase(1, 200_000, 64, 2048, 1, exponent=0.0),
    LookupCase(4, 200_000, 32, 2048, 4),
    LookupCase(4, 200_000, 128, 1024, 4, exponent=0.0),
    LookupCase(4, 1_000, 64, 2048, 4),
    LookupCase(16, 20_000, 16, 512, 1),
    LookupCase(16, 20_000, 128, 256, 1),
    LookupCase(32, 1_000, 32, 128, 1),
    LookupCase(2, 200_000, 64, 512, 20),
    LookupCase(2, 200_000, 64, 512, 20, exponent=0.0),
)
_TT_CASES = (
    LookupCase(1, 1_000_000, 64, 2048, 1, 16),
    LookupCase(1, 1_000_000, 64, 2048, 1, 16, exponent=0.0),
    LookupCase(4, 200_000, 32, 2048, 4, 8),
    LookupCase(4, 200_000, 128, 1024, 4, 16, exponent=0.0),
    LookupCase(4, 20_000, 64, 2048, 4, 32),
    LookupCase(16, 20_000, 32, 512, 1, 16),
    LookupCase(8, 1_000_000, 64, 256, 1, 64),
    LookupCase(16, 20_000, 128, 256, 1, 8),
    LookupCase(2, 1_000_000, 64, 512, 20, 32),
    LookupCase(2, 1_000_000, 64, 512, 20, 16, exponent=0.0),
    LookupCase(2, 1_000_000, 128, 512, 10, 64),
    LookupCase(32, 2_000, 64, 64, 1, 16),
)

_STEP_CASES = (
    LookupCase(4, 1_000, 16, 64, 1),
    LookupCase(32, 1_000, 16, 64, 1),
    LookupCase(8, 10_000, 64, 2048, 1),
    LookupCase(32, 10_000, 32, 1024, 1),
    LookupCase(8, 10_000, 32, 512, 20),
    LookupCase(16, 10_000, 128, 512, 2),
    LookupCase(24, 10_000, 64, 2048, 2),
    LookupCase(16, 10_000, 128, 1024, 1),
    LookupCase(4, 1_000, 16, 64, 1, rank=4),
    LookupCase(16, 10_000, 64, 512, 2, rank=16),
    LookupCase(32, 10_000, 32, 256, 1, rank=8),
    LookupCase(16, 100_000, 64, 1024, 2, rank=32),
)


class _MachineBench:
    def __init__(self, device: torch.device, options: MachineBenchOptions) -> None:
        self._device = device
        self._options = options

    def operations(self) -> Samples:
        """All but whole steps."""
        cpu = torch.device("cpu")
        samples = {
            "copy": self.copies(self._device),
            "gemm": [self.large_product()],
            "narrow_gemm": self.rank_sized_products(),
            "gather": self.gathers(),
            **self.files(Path(self._options.folder)),
            **self.dense_lookups(),
            **self.tt_lookups(),
        }
        if dist.get_world_size() > 1:
            samples |= self.collectives()
        if self._device.type == "cuda":
            samples["host_copy"] = self.copies(cpu)
            samples["to_device"] = self.copies(self._device, source=cpu)
        return samples

    def copies(self, device: torch.device, source: torch.device | None = None) -> list[Sample]:
        return [self._copy(self._sized(mib * _MIB), device, source or device) for mib in (16, 64)]

    def _copy(self, num_bytes: int, device: torch.device, source: torch.device) -> Sample:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=source).fill_(1)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(0)
        (ms,) = self._times(lambda: [lambda: out.copy_(data)])
        return Sample({"bytes": num_bytes}, ms)

    def large_product(self) -> Sample:
        return self._product(self._sized(1024), self._sized(1024), self._sized(1024))

    def rank_sized_products(self) -> list[Sample]:
        return [self._product(self._sized(16_384), k, 4 * k) for k in (8, 16, 32, 64)]

    def _product(self, m: int, k: int, n: int) -> Sample:
        """fp32, (m, k) by (k, n)."""
        a, b = torch.rand(m, k, device=self._device), torch.rand(k, n, device=self._device)
        out = torch.empty(m, n, device=self._device)
        (ms,) = self._times(lambda: [lambda: torch.mm(a, b, out=out)])
        return Sample({"flops": 2.0 * m * n * k}, ms)

    def gathers(self) -> list[Sample]:
        return [self._gather(dim) for dim in (16, 64, 128)]

    def _gather(self, dim: int) -> Sample:
        rows, lookups = self._sized(64 * _MIB) // dim // _FLOAT_BYTES + 1, self._sized(65_536)
        table = torch.rand(rows, dim, device=self._device)
        out = torch.empty(lookups, dim, device=self._device)
        ids = torch.randint(rows, (lookups,), device=self._device)
        (ms,) = self._times(lambda: [lambda: torch.index_select(table, 0, ids, out=out)])
        return Sample({"rows": lookups, "bytes": lookups * dim * _FLOAT_BYTES}, ms)

    def files(self, folder: Path) -> Samples:
        data = os.urandom(self._sized(32 * _MIB))
        with tempfile.TemporaryDirectory(dir=folder) as name:
            path = Path(name) / "data"

            def write() -> None:
                with open(path, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

            write_ms, read_ms = self._times(lambda: [write, path.read_bytes])
        work = {"bytes": float(len(data))}
        return {"file_write": [Sample(work, write_ms)], "file_read": [Sample(work, read_ms)]}

    def collectives(self) -> Samples:
        pairs = [self._collectives(kib * 1024) for kib in (1, 32, 256, 1024, 4096, 16_384)]
        to_all, reduce = map(list, zip(*pairs, strict=True))
        return {"all_to_all": to_all, "all_reduce": reduce}

    def _collectives(self, num_bytes: int) -> tuple[Sample, Sample]:
        world_size = dist.get_world_size()
        per_rank = max(1, self._sized(num_bytes) // _FLOAT_BYTES // world_size)
        data = torch.zeros(per_rank * world_size, device=self._device)
        to_all_ms, reduce_ms = self._times(
            lambda: [
                lambda: dist.all_to_all_single(torch.empty_like(data), data),
                lambda: dist.all_reduce(data),
            ]
        )
        sent = per_rank * (world_size - 1) * _FLOAT_BYTES
        return (
            Sample({"calls": 1, "bytes": sent}, to_all_ms),
            Sample({"calls": 1, "bytes": data.nbytes}, reduce_ms),
        )

    def dense_lookups(self) -> Samples:
        """With row-wise Adagrad in backward."""
        pairs = [self._dense_lookup(case) for case in _DENSE_CASES]
        forward, backward = map(list, zip(*pairs, strict=True))
        return {"dense_forward": forward, "dense_backward": backward}

    def _dense_lookup(self, case: LookupCase) -> tuple[Sample, Sample]:
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if self._device.type == "cpu":
            place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        table = (self._sized(case.num_embeddings), case.embedding_dim, *place)
        lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [table] * case.num_tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            device=self._device,
        )
        lookup.init_embedding_weights_uniform(-0.1, 0.1)
        ids_TL, offsets = self._batch(case)
        indices_L = ids_TL.reshape(-1)
        forward_ms, backward_ms = self._step_times(lambda: lookup(indices_L, offsets))
        lookups, unique = indices_L.numel(), sum(ids.unique().numel() for ids in ids_TL)
        row_bytes = case.embedding_dim * _FLOAT_BYTES
        shared = {"calls": 1.0, "lookups": lookups, "bag_bytes": (len(offsets) - 1) * row_bytes}
        read = {"row_bytes": lookups * row_bytes}
        updated = {"unique_rows": unique, "unique_bytes": unique * row_bytes}
        return Sample(shared | read, forward_ms), Sample(shared | updated, backward_ms)

    def tt_lookups(self) -> Samples:
        """With a step of row-wise Adagrad over the cores in backward."""
        pairs = [self._tt_lookup(case) for case in _TT_CASES]
        forward, backward = map(list, zip(*pairs, strict=True))
        return {"tt_forward": forward, "tt_backward": backward}

    def _tt_lookup(self, case: LookupCase) -> tuple[Sample, Sample]:
        tables, rows = case.num_tables, self._sized(case.num_embeddings)
        spec = TTSpec.suggest(rows, case.embedding_dim, rank=case.rank)
        names = tuple(map(str, range(tables)))
        batch = TableBatch(
            names, (rows,) * tables, (spec.row_factors,) * tables, spec.col_factors, spec.ranks,
            names, tuple(range(tables)),
        )  # fmt: skip
        flat = [
            torch.randn(tables * p, math.prod(row), device=self._device).requires_grad_()
            for p, *row in spec.core_shapes
        ]
        ids_TL, offsets = self._batch(case)
        indices_L = ids_TL.reshape(-1)

        def lookup() -> Tensor:
            shapes = (shape[1:] for shape in spec.core_shapes)
            cores = [rows.view(-1, *shape) for rows, shape in zip(flat, shapes, strict=True)]
            return batched_tt_embedding_bag(indices_L, offsets, cores, batch)

        times = self._step_times(lookup, RowWiseAdagrad(flat, lr=0.01))
        bag_bytes = (len(offsets) - 1) * case.embedding_dim * _FLOAT_BYTES
        works = _tt_work(spec, ids_TL, bag_bytes)
        forward, backward = (Sample(work, ms) for work, ms in zip(works, times, strict=True))
        return forward, backward

    def steps(self, calibration: Calibration) -> tuple[list[Sample], list[Sample]]:
        """Time and memory of whole steps of small models; the other costs explain a part."""
        warm_up()
        rounds = [
            [self._step(case, calibration) for case in _STEP_CASES]
            for _ in range(self._options.rounds)
        ]
        ms, num_bytes = (
            _least([[pair[kind] for pair in pairs] for pairs in rounds]) for kind in (0, 1)
        )
        # Less than that is lost among the pages that the process has anyway.
        return ms, [sample for sample in num_bytes if sample.total >= _MIB]

    def _step(self, case: LookupCase, calibration: Calibration) -> tuple[Sample, Sample]:
        table = WorkloadTable(
            self._sized(case.num_embeddings), float(case.bag_length), case.exponent
        )
        workload = Workload(
            [table] * case.num_tables, case.embedding_dim, self._sized(case.num_bags)
        )
        table_wise = [ShardingType.TABLE_WISE.value]
        allowed = EcoRecConstraints(sharding_types=table_wise)
        if case.rank:
            allowed = EcoRecConstraints(
                sharding_types=table_wise, tt="always", tt_ranks=(case.rank,)
            )
        constraints = dict.fromkeys(workload.names(), allowed)
        planner = planner_of(workload, constraints, _NO_LIMIT, calibration)
        plan = planner.plan(workload.model(), sharders())
        known = planner.predict_step(DenseWork.of(workload.model()))
        measured = measure_step(workload, plan, steps=self._options.repeats)
        work = step_work(
            features=case.num_tables,
            samples=workload.local_batch_size,
            lookups=case.num_tables * workload.local_batch_size * case.bag_length,
            bag_bytes=workload.bag_bytes(),
            tt_groups=1 if case.rank else 0,
        )
        return (
            Sample(work, measured.step_ms, known.step_ms),
            Sample(work, measured.peak_bytes, max(known.bytes_W)),
        )

    def _batch(self, case: LookupCase) -> tuple[Tensor, Tensor]:
        """Ids `(T, L)`, offsets of bags of one length."""
        rows, num_bags = self._sized(case.num_embeddings), self._sized(case.num_bags)
        ids = [
            zipf_ids(
                num_bags * case.bag_length,
                rows,
                id_order="hashed",
                exponent=case.exponent,
                seed=table,
            )
            for table in range(case.num_tables)
        ]
        offsets = torch.arange(case.num_tables * num_bags + 1) * case.bag_length
        return torch.stack(ids).to(self._device), offsets.to(self._device)

    def _step_times(
        self, forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[float, float]:
        """Times of forward and of backward with the update."""
        grad = torch.randn_like(forward())

        def step() -> Iterator[Callable[[], object]]:
            out: list[Tensor] = []
            yield lambda: out.append(forward())

            def backward() -> None:
                out.pop().backward(grad)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()

            yield backward

        forward_ms, backward_ms = self._times(step)
        return forward_ms, backward_ms

    def _times(self, parts: Callable[[], Any]) -> list[float]:
        """Milliseconds of every part of a run: medians over repeats, of the slowest rank."""
        runs: list[list[float]] = []
        for _ in range(_WARMUP_RUNS + self._options.repeats):
            times = []
            for part in parts():
                dist.barrier()
                start = clock(self._device)
                part()
                times.append((clock(self._device) - start) * 1e3)
            runs.append(times)
        slowest = torch.tensor(runs[_WARMUP_RUNS:], dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [statistics.median(times) for times in slowest.T.tolist()]

    def _sized(self, count: int) -> int:
        return max(2, int(count * self._options.scale))


def _tt_work(
    spec: TTSpec, ids_TL: Tensor, bag_bytes: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Of a forward and of a backward pass of tables of one shape."""
    unique = sum(ids.unique().numel() for ids in ids_TL)
    prefixes = sum((ids // spec.row_factors[-1]).unique().numel() for ids in ids_TL)
    forward_flops, backward_flops = lookup_flops(spec, unique, prefixes)
    shared = {
        "calls": 1.0,
        "lookups": ids_TL.numel(),
        "unique_rows": unique,
        "bag_bytes": bag_bytes,
    }
    read = {
        "prefixes": prefixes,
        "flops": forward_flops,
        "row_bytes": ids_TL.numel() * spec.embedding_dim * _FLOAT_BYTES,
    }
    updated = {"flops": backward_flops, "parameters": len(ids_TL) * spec.num_parameters}
    return shared | read, shared | updated
