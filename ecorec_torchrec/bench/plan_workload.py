"""Models and batches to measure plans with; ids repeat as Zipf's law has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.bench.measure import zipf_ids
from ecorec_torchrec.planner import DistinctCurve, Profile, TableProfile
from ecorec_torchrec.train.data import RankBatch

_FLOAT_BYTES = 4
_PROFILED_BATCHES = 2


@dataclass(frozen=True)
class WorkloadTable:
    """One table, read by one feature.

    Args:
        num_embeddings: N.
        pooling_factor: mean ids of a bag; bag lengths are Poisson's.
        exponent: of the Zipf distribution of its ids, which are scattered over the table.
    """

    num_embeddings: int
    pooling_factor: float
    exponent: float


@dataclass(frozen=True)
class Workload:
    """A model, and batches for it.

    Args:
        tables: of the model.
        embedding_dim: D of all.
        local_batch_size: samples per rank.
        hidden: width of the layer over all pooled rows.
        seed: of ids and bag lengths.
    """

    tables: Sequence[WorkloadTable]
    embedding_dim: int
    local_batch_size: int
    hidden: int = 64
    seed: int = 0

    def names(self) -> list[str]:
        return [f"t{i}" for i in range(len(self.tables))]

    def model(self) -> WorkloadModel:
        """With stock tables on the meta device."""
        collection = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=table.num_embeddings,
                    embedding_dim=self.embedding_dim,
                    feature_names=[name],
                )
                for name, table in zip(self.names(), self.tables, strict=True)
            ],
            device=torch.device("meta"),
        )
        return WorkloadModel(collection, self.names(), self.embedding_dim, self.hidden)

    def bag_bytes(self) -> int:
        """Of a rank's pooled rows."""
        return len(self.tables) * self.local_batch_size * self.embedding_dim * _FLOAT_BYTES

    def batches(self, rank: int, count: int) -> list[RankBatch]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        lengths_TB, ids_T = [], []
        for number, table in enumerate(self.tables):
            lengths_B, ids_L = self._ids(number, table, rank, count)
            lengths_TB.append(lengths_B.view(count, -1))
            ids_T.append(ids_L.split(lengths_TB[-1].sum(1).tolist()))
        return [
            RankBatch(
                dense_features=torch.empty(self.local_batch_size, 0),
                sparse_features=KeyedJaggedTensor(
                    self.names(),
                    torch.cat([ids[batch] for ids in ids_T]),
                    lengths=torch.cat([lengths[batch] for lengths in lengths_TB]),
                ),
                labels=torch.randn(self.local_batch_size, generator=generator),
                loss_scale=torch.ones(()),
            )
            for batch in range(count)
        ]

    def profile(self, world_size: int) -> Profile:
        """Of batches that no rank trains on."""
        tables = {}
        for number, (name, table) in enumerate(zip(self.names(), self.tables, strict=True)):
            lengths_B, ids_L = self._ids(number, table, world_size, _PROFILED_BATCHES * world_size)
            sizes = sorted({self.local_batch_size, self.local_batch_size * world_size})
            tables[name] = TableProfile(
                name=name,
                num_embeddings=table.num_embeddings,
                features=(name,),
                lookups_per_sample=(table.pooling_factor,),
                by_id=_distinct_curve(table.num_embeddings, lengths_B, ids_L, sizes),
            )
        samples = _PROFILED_BATCHES * world_size * self.local_batch_size
        return Profile(tables, samples, source="drawn")

    def _ids(
        self, number: int, table: WorkloadTable, rank: int, batches: int
    ) -> tuple[Tensor, Tensor]:
        """Lengths of the bags of some batches, and their ids: equal hot rows on all ranks."""
        seed = 1000 * self.seed + number
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        mean_B = torch.full((batches * self.local_batch_size,), table.pooling_factor)
        lengths_B = torch.poisson(mean_B, generator=generator).int()
        ids_L = zipf_ids(
            int(lengths_B.sum()),
            table.num_embeddings,
            id_order="frequency",
            exponent=table.exponent,
            seed=1000 * seed + rank,
        )
        scattered = torch.Generator().manual_seed(seed)
        return lengths_B, torch.randperm(table.num_embeddings, generator=scattered)[ids_L]


class WorkloadModel(nn.Module):
    """Pooled rows, one hidden layer, squared error."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        names: Sequence[str],
        embedding_dim: int,
        hidden: int,
    ) -> None:
        super().__init__()
        self.ebc = collection
        self._names = names
        self.dense = nn.Sequential(
            nn.Linear(len(names) * embedding_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, batch: RankBatch) -> Tensor:
        pooled = self.ebc(batch.sparse_features).to_dict()
        # By name, since the order of the columns follows the placement.
        logits = self.dense(torch.cat([pooled[name] for name in self._names], 1)).squeeze(1)
        return (logits - batch.labels).square().mean()


def _distinct_curve(
    num_embeddings: int, lengths_B: Tensor, ids_L: Tensor, batch_sizes: Sequence[int]
) -> DistinctCurve:
    """Distinct `id >> k` by batch size and k."""
    starts = torch.cat([lengths_B.new_zeros(1).long(), lengths_B.cumsum(0)]).tolist()
    blocks = range(max(1, math.ceil(math.log2(num_embeddings))) + 1)
    counts = []
    for size in batch_sizes:
        ends = starts[::size]
        chunks = [ids_L[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        counts.append(
            tuple(
                max(sum((ids >> k).unique().numel() for ids in chunks) / len(chunks), 1e-6)
                for k in blocks
            )
        )
    return DistinctCurve(tuple(batch_sizes), tuple(counts))
