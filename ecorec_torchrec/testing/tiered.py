"""A small model with tiered tables, and its twin whose tables FBGEMM holds whole, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import ParameterShardingGenerator, row_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.lookup import TieredKernel
from ecorec_torchrec.pipeline import EcoRecTrainPipeline
from ecorec_torchrec.plan import tiered_row_wise, tiered_table_wise
from ecorec_torchrec.testing import toy
from ecorec_torchrec.tiers import TieredTable, TierSpec, save_hot_ids

ROWS = {"users": 1500, "ads": 1000}
FEATURES = {"users": ["clicked_by", "bought_by"], "ads": ["seen"]}


@dataclass(frozen=True)
class Case:
    """How the tables are trained; 10 % of their rows, or about two batches, are in slots.

    Args:
        row_wise: cut both tables over all ranks; else "users" lies on the last one, "ads" on the
            first.
        prefetch_batches: how many batches ahead `EcoRecTrainPipeline` brings rows in.
        memory_rows: of the second level; 0 for none.
        owners: table -> rank, in place of those above.
        sequence: tables of an `EmbeddingCollection`.
        hot_ids_file: with the hottest rows, as `write_hot_ids` makes it.
        pinned_rows: of these rows stay in their slots.
    """

    sequence: bool = False
    row_wise: bool = False
    optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    cache_rows: int = 150
    memory_rows: int = 0
    prefetch_batches: int = 0
    owners: tuple[tuple[str, int], ...] = ()
    hot_ids_file: str | None = None
    pinned_rows: int = 0

    def model(self) -> toy.ToyModel:
        if self.sequence:
            configs = [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=toy.DIM,
                    feature_names=FEATURES[name],
                )
                for name, rows in ROWS.items()
            ]
            return toy.ToyModel(None, ec=EmbeddingCollection(configs, torch.device("meta")))
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=toy.DIM,
                feature_names=FEATURES[name],
                pooling=self.pooling,
            )
            for name, rows in ROWS.items()
        ]
        collection = EmbeddingBagCollection(
            tables, is_weighted=self.is_weighted, device=torch.device("meta")
        )
        return toy.ToyModel(collection, tables)

    def generators(self, folder: str | None) -> dict[str, ParameterShardingGenerator]:
        """Placement of the tables, tiered in `folder`, or dense without one."""
        last = dist.get_world_size() - 1
        owners = {"users": last, "ads": 0} | dict(self.owners)
        if folder is None:
            if self.row_wise:
                return {name: row_wise(compute_kernel="fused") for name in ROWS}
            return {name: table_wise(owners[name], compute_kernel="fused") for name in ROWS}
        tiers = TierSpec(
            self.cache_rows,
            folder,
            memory_rows=self.memory_rows,
            prefetch_batches=self.prefetch_batches,
            hot_ids_file=self.hot_ids_file,
            pinned_rows=self.pinned_rows,
        )
        if self.row_wise:
            return {name: tiered_row_wise(tiers=tiers) for name in ROWS}
        return {name: tiered_table_wise(owners[name], tiers=tiers) for name in ROWS}

    def shard(
        self, folder: str | None = None, **fused_params: Any
    ) -> tuple[DistributedModelParallel, CombinedOptimizer]:
        """The model on all ranks with its optimizers; equal seeds give equal start values."""
        torch.manual_seed(5)
        fused = {"optimizer": self.optimizer, "learning_rate": 0.1} | fused_params
        model = toy.shard(self.model(), self.generators(folder), fused)
        return model, toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.01))

    def batch(self, step: int, rank: int, size: int = 12) -> toy.ToyBatch:
        """`size` examples with bags of 0 to 3 ids, the low ones far more often than the others."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        features = [name for names in FEATURES.values() for name in names]
        limits = [ROWS[table] for table, names in FEATURES.items() for _ in names]
        lengths = torch.randint(0, 4, (len(features), size), generator=generator)
        values = [
            (torch.rand(int(n.sum()), generator=generator) ** 3 * limit).long()
            for n, limit in zip(lengths, limits, strict=True)
        ]
        num_values = int(lengths.sum())
        weights = torch.rand(num_values, generator=generator) if self.is_weighted else None
        ids = KeyedJaggedTensor(features, torch.cat(values), weights, lengths=lengths.flatten())
        return toy.ToyBatch(ids, torch.randn(size, generator=generator))


def write_hot_ids(path: str) -> None:
    """The ids that `Case.batch` draws most often, as `ecorec profile` would write them."""
    save_hot_ids({name: np.arange(rows // 10) for name, rows in ROWS.items()}, path)


def tiered_tables(model: DistributedModelParallel) -> dict[str, TieredTable]:
    """This rank's."""
    kernels = _collection(model)._kernels(TieredKernel)
    return {name: table for kernel in kernels for name, table in kernel.tables.items()}


def _collection(model: DistributedModelParallel) -> Any:
    return model.module.ebc if model.module.ec is None else model.module.ec


def _table(whole: DistributedModelParallel, name: str) -> Any:
    collection = _collection(whole)
    return getattr(collection, collection._tables_name)[name]


def rows_of(table: TieredTable) -> dict[str, Tensor]:
    """All rows: weights and optimizer state."""
    return table.read(torch.arange(table.num_embeddings))


def copy_start(tiered: DistributedModelParallel, whole: DistributedModelParallel) -> None:
    """Gives the twin whose tables are whole the start values of the other one."""
    for name, table in tiered_tables(tiered).items():
        weight = _table(whole, name).weight.data
        weight.view(-1, toy.DIM).copy_(rows_of(table)["weight"])


def differences(tiered: DistributedModelParallel, whole: DistributedModelParallel) -> list[str]:
    """What of this rank's tables, their optimizer state and the dense part is not the same bits."""
    found = []
    states = whole.fused_optimizer.state_dict()["state"]
    for name, table in tiered_tables(tiered).items():
        rows = rows_of(table)
        pairs = {"weight": _table(whole, name).weight.detach()}
        (state,) = [state for key, state in states.items() if f".{name}." in key]
        for value in state.values():
            pairs["sum"] = value.local_shards()[0].tensor
        assert pairs.keys() == rows.keys()
        found += [
            f"{name}.{column}"
            for column, expected in pairs.items()
            if not torch.equal(rows[column].flatten(), expected.flatten())
        ]
    if not torch.equal(tiered.module.linear.weight, whole.module.linear.weight):
        found.append("linear.weight")
    return found


def train(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, batches: Iterable[toy.ToyBatch]
) -> Iterator[Tensor]:
    """Steps without a pipeline; yields the logits."""
    for batch in batches:
        optimizer.zero_grad()
        loss, logits = model(batch)
        loss.sum().backward()
        optimizer.step()
        yield logits


def train_in_pipeline(
    pipeline: EcoRecTrainPipeline, batches: Iterable[toy.ToyBatch]
) -> Iterator[Tensor]:
    """Steps in a pipeline until it is empty; yields the logits."""
    iterator = iter(batches)
    while True:
        try:
            yield pipeline.progress(iterator)
        except StopIteration:
            return
