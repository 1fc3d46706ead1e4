"""Models that are a list of tables, to be planned without data: one line of a CSV file each."""

from __future__ import annotations

import csv
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.planner import EcoRecConstraints
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.optimizers import attach_table_optimizers

_COLUMNS = ("table", "num_embeddings", "pooling_factor")
_UNIQUE = "unique_"


@dataclass(frozen=True)
class ListedTable:
    """One table.

    Args:
        name: of the table and of its feature.
        num_embeddings: N.
        pooling_factor: mean lookups per sample.
        unique_ids: batch size -> distinct ids in a batch of so many samples, where they are known.
    """

    name: str
    num_embeddings: int
    pooling_factor: float
    unique_ids: Mapping[int, float]

    def unique_in(self, batch_size: int) -> float:
        """Distinct ids of the largest listed batch of at most `batch_size` samples.

        Without one, that of uniform ids, which repeat least.
        """
        listed = [size for size in self.unique_ids if size <= batch_size]
        if listed:
            return self.unique_ids[max(listed)]
        if self.num_embeddings == 1:
            return 1.0
        lookups = self.pooling_factor * batch_size
        return -self.num_embeddings * math.expm1(lookups * math.log1p(-1 / self.num_embeddings))


def read_tables(path: str) -> list[ListedTable]:
    """The tables of a CSV file with the columns `table`, `num_embeddings`, `pooling_factor`.

    Columns `unique_<batch size>` may give distinct ids per batch; others are not read.

    Args:
        path: the file.

    Raises:
        ValueError: no such file, a missing column, a repeated table, or a value that is no number
            of at least 1 row or more than 0 lookups; with file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"data.path={path!r}: no such file")
    reader = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path}:1: no column {', '.join(missing)}")
    tables: dict[str, ListedTable] = {}
    for row in reader:
        try:
            table = _table(row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from error
        if table.name in tables:
            raise ValueError(f"{path}:{reader.line_num}: table {table.name!r} is listed twice")
        tables[table.name] = table
    if not tables:
        raise ValueError(f"{path}: no tables")
    return list(tables.values())


def _table(row: Mapping[str, str]) -> ListedTable:
    rows, pooling = int(row["num_embeddings"]), float(row["pooling_factor"])
    if rows < 1:
        raise ValueError(f"num_embeddings={rows} must be at least 1")
    if not 0 < pooling < math.inf:
        raise ValueError(f"pooling_factor={pooling} must be > 0")
    unique = {
        int(column.removeprefix(_UNIQUE)): float(value)
        for column, value in row.items()
        if column is not None and column.startswith(_UNIQUE)
    }
    return ListedTable(row["table"], rows, pooling, unique)


def collection_of(tables: Sequence[ListedTable], config: TrainConfig) -> nn.Module:
    """The tables as one collection on the meta device, with their optimizer attached."""
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=config.model.embedding_dim,
                feature_names=[table.name],
                pooling=PoolingType[config.model.pooling.upper()],
            )
            for table in tables
        ],
        device=torch.device("meta"),
    )
    attach_table_optimizers(collection, {}, config.optim)
    return nn.ModuleDict({"embedding_bag_collection": collection})


def constraints_of(
    tables: Sequence[ListedTable], config: TrainConfig
) -> dict[str, EcoRecConstraints]:
    """Pooling factors, which tables may (`tt.choice: auto`) or must be TT, and whether others
    may be tiered.

    Raises:
        ValueError: a name or pattern in `tt.tables` that no table has.
    """
    names = [table.name for table in tables]
    chosen: set[str] = set()
    for pattern in config.tt.tables:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise ValueError(f"tt.tables: no table {pattern!r} among the {len(names)} to plan")
        chosen.update(found)
    return {
        table.name: EcoRecConstraints(
            pooling_factors=[table.pooling_factor],
            tt=config.tt.choice if table.name in chosen else "never",
            tt_ranks=(config.tt.rank,) if table.name in chosen else (),
            tier_folder=None
            if table.name in chosen and config.tt.choice == "always"
            else config.plan.tier_folder,
        )
        for table in tables
    }
