"""What dense hot rows do for a TT table's quality: crosses of MovieLens-100K features."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ecorec_torchrec.bench.tt_hot_table import HotTTBag, TableShape
from ecorec_torchrec.train.data import SPLITS, InMemoryDataset, Split, load_dataset
from ecorec_torchrec.train.data.batch import EMPTY_SLOT
from ecorec_torchrec.train.data.hashing import hash_ids
from ecorec_torchrec.train.data_config import DataConfig
from ecorec_torchrec.train.metrics import BinaryQuality

CROSSES = (("user_id", "genres"), ("item_id", "occupation"))
"""Pairs of features. Users and films themselves have no table: the crosses hold what is known of
them."""

_OPEN_ID_SPACE = 1 << 40  # so that users and films keep ids of their own
_BATCH_SIZE = 1024
_HIDDEN = 64
_DROPOUT = 0.2
_CORE_RATE, _ROW_RATE, _DENSE_RATE = 0.004, 0.05, 0.001


@dataclass
class CrossedData:
    """Ratings with crossed features.

    Attributes:
        num_rows: of the table of each cross.
        plain_sizes: rows of the tables of the other features, all small.
        splits: by split, for every rating: dense features, labels, the padded ids of each plain
            feature and of each cross.
    """

    num_rows: list[int]
    plain_sizes: list[int]
    splits: dict[Split, _Columns] = field(default_factory=dict)

    def cross_ids(self, split: Split, cross: int) -> Tensor:
        """All lookups of a split."""
        ids_RW = self.splits[split].crosses[cross]
        return ids_RW[ids_RW != EMPTY_SLOT]


@dataclass
class _Columns:
    dense: Tensor
    labels: Tensor
    plain: list[Tensor]
    crosses: list[Tensor]


def crossed_movielens(path: str | None, seed: int, hashed_rows: int | None) -> CrossedData:
    """Reads MovieLens-100K and crosses its features.

    Args:
        path: folder of the user's own copy.
        seed: of the split.
        hashed_rows: rows into which the crosses are hashed; None for ids that keep both halves,
            first * (size of the second) + second, which a TT table can factorise.
    """
    sizes = dict.fromkeys(("user_id", "item_id"), _OPEN_ID_SPACE)
    dataset = load_dataset(DataConfig(name="movielens-100k", path=path, num_embeddings=sizes), seed)
    assert isinstance(dataset, InMemoryDataset)
    features, starts = dataset.schema.sparse, [0]
    for feature in features:
        starts.append(starts[-1] + feature.width)
    columns = {feature.name: slice(starts[k], starts[k + 1]) for k, feature in enumerate(features)}
    rows = {split: dataset.split_rows(split) for split in SPLITS}
    counts = {feature.name: feature.num_embeddings for feature in features}
    ids = {split: rows[split].ids.numpy().copy() for split in SPLITS}
    for name in sizes:
        known = np.unique(np.concatenate([ids[split][:, columns[name]] for split in SPLITS]))
        counts[name] = len(known)
        for split in SPLITS:
            ids[split][:, columns[name]] = np.searchsorted(known, ids[split][:, columns[name]])
    plain = [feature.name for feature in features if feature.name not in sizes]
    data = CrossedData(
        [hashed_rows or counts[a] * counts[b] for a, b in CROSSES], [counts[n] for n in plain]
    )
    for split in SPLITS:
        crosses = []
        for first, second in CROSSES:
            a, b = ids[split][:, columns[first]], ids[split][:, columns[second]]
            crossed = a * counts[second] + b
            crossed = crossed if hashed_rows is None else hash_ids(crossed, hashed_rows)
            crosses.append(torch.from_numpy(np.where(b == EMPTY_SLOT, EMPTY_SLOT, crossed)))
        data.splits[split] = _Columns(
            rows[split].dense,
            rows[split].labels,
            [torch.from_numpy(ids[split][:, columns[name]]) for name in plain],
            crosses,
        )
    return data


class CrossModel(nn.Module):
    """Pairwise dot products of pooled features and an MLP, as DLRM."""

    def __init__(self, data: CrossedData, shapes: list[TableShape], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        dim = shapes[0].embedding_dim
        self.crosses = [
            HotTTBag(shape, data.cross_ids("train", cross), generator)
            for cross, shape in enumerate(shapes)
        ]
        # The last row stands for empty slots.
        self.plain = [
            nn.EmbeddingBag(size + 1, dim, mode="mean", padding_idx=size)
            for size in data.plain_sizes
        ]
        self.tables = nn.ModuleList([*self.crosses, *self.plain])
        self.dense = nn.Linear(data.splits["train"].dense.shape[1], dim)
        num_vectors = len(shapes) + len(data.plain_sizes) + 1
        self._pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.over = nn.Sequential(
            nn.Linear(dim + self._pairs.shape[1], _HIDDEN),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(_HIDDEN, 1),
        )

    def forward(self, columns: _Columns, which_B: Tensor) -> Tensor:
        dense = functional.relu(self.dense(columns.dense[which_B]))
        vectors = [dense]
        for bag, ids_RW in zip(self.plain, columns.plain, strict=True):
            ids_BW = ids_RW[which_B]
            vectors.append(bag(ids_BW.where(ids_BW != EMPTY_SLOT, bag.num_embeddings - 1)))
        for table, ids_RW in zip(self.crosses, columns.crosses, strict=True):
            ids_BW = ids_RW[which_B]
            filled_BW = ids_BW != EMPTY_SLOT
            lengths_B = filled_BW.sum(1)
            sums = table(ids_BW[filled_BW], functional.pad(lengths_B.cumsum(0), (1, 0)))
            vectors.append(sums / lengths_B.clamp(min=1).unsqueeze(1))
        stacked = torch.stack(vectors, dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self.over(torch.cat([dense, dots], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Trained:
    """Validation and test AUC at the best epoch by validation, and what was hot in the test."""

    auc_val: float
    auc_test: float
    best_epoch: int
    hit_rate: float


def train(
    data: CrossedData, shapes: list[TableShape], seed: int, factor: float, epochs: int
) -> Trained:
    """Trains one model.

    Args:
        data: whose splits are trained and evaluated.
        shapes: of the tables of the crosses.
        seed: of initial values, dropout and shuffling.
        factor: of the learning rates of the crosses' tables.
        epochs: passes over the training split.
    """
    torch.manual_seed(seed)
    model = CrossModel(data, shapes, seed)
    optimizers = _optimizers(model, factor)
    columns = data.splits["train"]
    best: tuple[float, int, dict[str, Any]] = 0.0, 0, model.state_dict()
    for epoch in range(1, epochs + 1):
        model.train()
        for which_B in torch.randperm(len(columns.labels)).split(_BATCH_SIZE):
            logits_B = model(columns, which_B)
            functional.binary_cross_entropy_with_logits(
                logits_B, columns.labels[which_B]
            ).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        auc = _auc(model, data.splits["val"])
        if auc > best[0]:
            best = auc, epoch, copy.deepcopy(model.state_dict())
    model.load_state_dict(best[2])
    return Trained(best[0], _auc(model, data.splits["test"]), best[1], _hit_rate(model, data))


def _optimizers(model: CrossModel, factor: float) -> list[torch.optim.Optimizer]:
    cores = [core for table in model.crosses for core in table.cores]
    rows = [table.rows for table in model.crosses if table.rows.numel()]
    own = {id(parameter) for parameter in (*cores, *(table.rows for table in model.crosses))}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(others, lr=_DENSE_RATE)]
    if cores:
        optimizers.append(torch.optim.Adam(cores, lr=_CORE_RATE * factor))
    if rows:
        optimizers.append(torch.optim.Adagrad(rows, lr=_ROW_RATE * factor))
    return optimizers


@torch.no_grad()
def _auc(model: CrossModel, columns: _Columns) -> float:
    model.eval()
    quality = BinaryQuality(torch.device("cpu"))
    for which_B in torch.arange(len(columns.labels)).split(4 * _BATCH_SIZE):
        quality.update(model(columns, which_B), columns.labels[which_B])
    return quality.compute().auc


def _hit_rate(model: CrossModel, data: CrossedData) -> float:
    """Share of the test split's lookups in crosses that go to hot rows."""
    lookups, hits = 0, 0
    for cross, table in enumerate(model.crosses):
        ids_L = data.cross_ids("test", cross)
        lookups += len(ids_L)
        if len(table.hot_ids_H):
            hits += int(table.hot_slots(ids_L)[1].sum())
    return hits / lookups
