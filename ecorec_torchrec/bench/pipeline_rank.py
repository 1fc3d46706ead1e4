"""One rank of the pipeline benchmark; started by `ecorec_torchrec.bench.pipeline`."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ecorec_torchrec.bench.pipeline import MEASURED, PipelineBenchOptions
from ecorec_torchrec.bench.pipeline_trace import Span, trace_step
from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.pipeline import EcoRecTrainPipeline, StepTimes
from ecorec_torchrec.plan import tt_table_wise
from ecorec_torchrec.sharding import TTEmbeddingBagCollectionSharder
from ecorec_torchrec.train.data import RankBatch
from ecorec_torchrec.tt import TTSpec

_FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.01}
_CPU = torch.device("cpu")
_TIMEOUT_S = 300


class Model(nn.Module):
    """Embeddings, one hidden layer, squared error."""

    def __init__(self, ebc: EmbeddingBagCollection, num_tables: int, embedding_dim: int) -> None:
        super().__init__()
        self.ebc = ebc
        self.names = [f"f{i}" for i in range(num_tables)]
        self.dense = nn.Sequential(
            nn.Linear(num_tables * embedding_dim, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch: RankBatch) -> tuple[Tensor, Tensor]:
        features = in_order(self.ebc(batch.sparse_features), self.names)
        logits = self.dense(features).squeeze(1)
        return (logits - batch.labels).square().mean().view(1), logits.detach()


@torch.fx.wrap
def in_order(pooled: KeyedTensor, names: Sequence[str]) -> Tensor:
    """The columns by name, since their order follows the placement.

    A slice per name (`pooled[name]`) would spend as long as the lookups on gradients of zeros.
    """
    columns = dict(
        zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), 1), strict=True)
    )
    return torch.cat([columns[name] for name in names], 1)


class _Contender:
    """One variant in training: its pipeline, its batches, its times."""

    def __init__(self, variant: str, options: PipelineBenchOptions) -> None:
        self._options = options
        self._is_tt = variant != "torchrec_dense"
        torch.manual_seed(0)
        model = Model(self._collection(), options.num_tables, options.embedding_dim)
        groups = options.dist_groups if variant == "ecorec" else 1
        sharder: ModuleSharder[nn.Module] = EmbeddingBagCollectionSharder(_FUSED)
        if self._is_tt:
            sharder = TTEmbeddingBagCollectionSharder(
                _FUSED, num_dist_groups=groups, module_type=TTEmbeddingBagCollection
            )
        sharded = DistributedModelParallel(
            model, device=_CPU, plan=self._plan(model, sharder), sharders=[sharder]
        )
        rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda params: torch.optim.SGD(params, lr=0.01))
        optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
        pipeline = EcoRecTrainPipeline if variant == "ecorec" else TrainPipelineSparseDist
        self._pipeline: TrainPipelineSparseDist = pipeline(sharded, optimizer, _CPU)
        self._times = StepTimes(_CPU)
        self._times.watch(sharded.module.ebc)
        self._batches = _batches(options)
        self.step_ms: list[float] = []
        self.exposed_ms: list[float] = []
        self.lookup_ms: list[float] = []
        self.logits = torch.empty(0)

    def _collection(self) -> EmbeddingBagCollection:
        options = self._options
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=options.num_embeddings,
                embedding_dim=options.embedding_dim,
                feature_names=[f"f{i}"],
            )
            for i in range(options.num_tables)
        ]
        meta = torch.device("meta")
        if not self._is_tt:
            return EmbeddingBagCollection(tables, device=meta)
        return TTEmbeddingBagCollection(
            tables, tt={table.name: self._spec() for table in tables}, device=meta
        )

    def _spec(self) -> TTSpec:
        options = self._options
        return TTSpec.suggest(options.num_embeddings, options.embedding_dim, rank=options.rank)

    def _plan(self, model: Model, sharder: ModuleSharder[nn.Module]) -> ShardingPlan:
        world_size = dist.get_world_size()
        if not self._is_tt:
            topology = Topology(world_size, compute_device="cpu")
            planner = EmbeddingShardingPlanner(topology=topology)
            return planner.collective_plan(model, [sharder], dist.group.WORLD)
        owners = {
            f"t{i}": tt_table_wise(i % world_size, tt=self._spec())
            for i in range(self._options.num_tables)
        }
        entries = construct_module_sharding_plan(
            model.ebc, owners, sharder=sharder, world_size=world_size, device_type="cpu"
        )
        return ShardingPlan({"ebc": entries})

    def step(self, is_timed: bool) -> None:
        dist.barrier()
        with _exposed_ms() as exposed, self._times.step(is_training=True):
            start = time.perf_counter()
            self.logits = self._pipeline.progress(self._batches)
            elapsed_ms = (time.perf_counter() - start) * 1e3
        lookup_ms = self._times.take()["lookup_ms"]
        if is_timed:
            self.step_ms.append(elapsed_ms)
            self.exposed_ms.append(sum(exposed))
            self.lookup_ms.append(lookup_ms)

    def trace(self) -> list[list[Span]]:
        """What each rank does in one more step."""
        dist.barrier()
        spans = trace_step(lambda: self._pipeline.progress(self._batches))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, spans)
        return found


def _batches(options: PipelineBenchOptions) -> Iterator[RankBatch]:
    """Uniform ids, one per table and example, drawn by rank and step."""
    rows = options.batch_size // options.world_size
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_ids = options.num_tables * rows
    names = [f"f{i}" for i in range(options.num_tables)]
    while True:
        ids = torch.randint(0, options.num_embeddings, (num_ids,), generator=generator)
        yield RankBatch(
            dense_features=torch.empty(rows, 0),
            sparse_features=KeyedJaggedTensor(names, ids, lengths=torch.ones(num_ids).int()),
            labels=torch.randn(rows, generator=generator),
            loss_scale=torch.ones(()),
        )


@contextmanager
def _exposed_ms() -> Iterator[list[float]]:
    """Collects how long this rank stood waiting for each of its all-to-alls."""
    waits: list[float] = []
    original = dist.all_to_all_single

    class TimedWork(dist.Work):  # TorchRec waits for instances of Work only
        def __init__(self, work: dist.Work) -> None:
            super().__init__()
            self._work = work

        def wait(self, *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return self._work.wait(*args)
            finally:
                waits.append((time.perf_counter() - start) * 1e3)

    def timed(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        return work if work is None else TimedWork(work)

    with mock.patch.object(dist, "all_to_all_single", timed):
        yield waits


def measure(options: PipelineBenchOptions) -> dict[str, Any]:
    """By variant the medians, over the slowest rank of each step, of step, waits and lookups.

    Under "figures"; with `options.plot` also "traces": a step of every TT variant, by rank.

    Raises:
        RuntimeError: groups and pipeline changed the result.
    """
    contenders = {variant: _Contender(variant, options) for variant in options.variants}
    for step in range(options.warmup_steps + options.steps):
        for contender in contenders.values():
            contender.step(is_timed=step >= options.warmup_steps)
    if {"tt_ungrouped", "ecorec"} <= contenders.keys():
        same = torch.equal(contenders["tt_ungrouped"].logits, contenders["ecorec"].logits)
        if not same:
            raise RuntimeError("dist groups changed the result, so there is no figure")
    found: dict[str, Any] = {}
    for variant, contender in contenders.items():
        times = torch.tensor([contender.step_ms, contender.exposed_ms, contender.lookup_ms])
        dist.all_reduce(times, dist.ReduceOp.MAX)
        medians = (statistics.median(row) for row in times.tolist())
        found[variant] = dict(zip(MEASURED, medians, strict=True))
    traces = {
        variant: contender.trace()
        for variant, contender in contenders.items()
        if options.plot and variant != "torchrec_dense"
    }
    return {"figures": found, "traces": traces}


def main() -> None:
    """`python -m ecorec_torchrec.bench.pipeline_rank STORE OPTIONS RANK INTERFACE`."""
    store, text, rank, interface = sys.argv[1:]
    options = PipelineBenchOptions(**json.loads(text))
    os.environ.update(RANK=rank, WORLD_SIZE=str(options.world_size), GLOO_SOCKET_IFNAME=interface)
    os.environ.update(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=str(options.world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, options.world_size),
        rank=int(rank),
        world_size=options.world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    found = measure(options)
    if rank == "0":
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
