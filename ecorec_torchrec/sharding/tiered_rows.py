"""The rows of the tiered tables of one sharded collection: start values, checkpoints, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from ecorec_torchrec.lookup import TieredKernel, shard_name
from ecorec_torchrec.modules import draw_seed
from ecorec_torchrec.tiers import RowInit, TieredTable, TierSpec
from ecorec_torchrec.tiers.checkpoint import CheckpointReader, checkpoint_path


@dataclass(frozen=True)
class SavedTable:
    """A tiered table in a checkpoint.

    Args:
        num_embeddings: N.
        shards: (first row, number of rows) of every part it was saved in.
    """

    num_embeddings: int
    shards: tuple[tuple[int, int], ...]


class TieredRows:
    """The rows of a collection's tiered tables, which no tensor holds whole.

    The rows of a checkpoint are files beside the state dict. Lest a state dict be loaded without
    them, it has a `row_version` of every tiered table: a number drawn when the rows were saved or
    loaded last, and how many batches have been trained on since.

    Args:
        specs: the memories of every tiered table.
        plan: the plan of the collection.
        env: the ranks.
    """

    def __init__(
        self,
        specs: Mapping[str, TierSpec],
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
    ) -> None:
        self.specs = dict(specs)
        self._shards = {table: _shards_of(plan[table]) for table in specs}
        self._env = env
        self._kernels: list[TieredKernel] = []
        self._prefix = ""
        # Drawn now, since other start values of this rank only may use the generator later.
        self._seeds: dict[str, int] | None = self._draw_seeds()
        self._saved_as = self._num_updates = 0

    def _draw_seeds(self) -> dict[str, int]:
        """One per table, those of the first rank: all shards of a table follow from one."""
        seeds = {table: draw_seed() for table in self.specs}
        group = self._env.process_group
        if not seeds or group is None:
            return seeds
        of_first_rank = [seeds]
        dist.broadcast_object_list(of_first_rank, dist.get_global_rank(group, 0), group)
        return of_first_rank[0]

    def start(self, kernels: Sequence[TieredKernel], prefix: str) -> None:
        """Gives all rows start values.

        Args:
            kernels: of this rank.
            prefix: path of the collection, as it begins the names of its tables' files.
        """
        seeds, self._seeds = self._seeds or self._draw_seeds(), None
        self._kernels, self._prefix = list(kernels), prefix
        self._saved_as = self._num_updates = 0
        for kernel in self._kernels:
            kernel.start(seeds, prefix)

    @property
    def prefetch_batches(self) -> int:
        """How many batches ahead the rows of some table are to be fetched."""
        return max((spec.prefetch_batches for spec in self.specs.values()), default=0)

    def forget_prefetched(self) -> None:
        """Lets go of batches that were prefetched and will not be looked up."""
        for kernel in self._kernels:
            kernel.forget_prefetched()

    def close(self) -> None:
        """Stops moving rows and removes the row files; the tables are of no more use."""
        for kernel in self._kernels:
            kernel.close()

    def statistics(self) -> dict[str, dict[str, int | float]]:
        """What the tiers of every table of this rank have done since they were last asked."""
        return {
            self._prefix + name: counts
            for kernel in self._kernels
            for name, counts in kernel.statistics()
        }

    def memory_bytes(self) -> dict[str, int]:
        """What this rank's part of every table takes in slots and in the second level."""
        return {
            name: (table.spec.cache_rows + table.spec.memory_rows) * table.layout.record_bytes
            for _, name, table in self._local()
        }

    # Versions

    def count_update(self) -> None:
        """Notes that a batch is trained on; ranks without a shard note it too."""
        self._num_updates += 1

    def version(self) -> torch.Tensor:
        """(2,) int64, the same on every rank."""
        return torch.tensor([self._saved_as, self._num_updates])

    def check_version(self, table: str, found: Any) -> None:
        """Raises ValueError unless a state dict belongs to the rows that are here."""
        if found.tolist() != self.version().tolist():
            raise ValueError(
                f"the rows of the tiered table {table!r} are not those that the state dict was "
                "saved with: they lie in files beside it, which save_tiers(model, folder) writes "
                "and load_tiers(model, folder) must read before load_state_dict"
            )

    # Checkpoints

    def _local(self) -> Iterator[tuple[TieredKernel, str, TieredTable]]:
        for kernel in self._kernels:
            for name, table in list(kernel.tables.items()):
                yield kernel, name, table

    def save(self, folder: Path, save_id: int) -> dict[str, SavedTable]:
        """Writes this rank's rows into `folder`; returns what all ranks write together."""
        for _, _, table in self._local():
            table.save(folder)
        self._saved_as, self._num_updates = save_id, 0
        return {
            self._prefix + table: SavedTable(sum(count for _, count in shards), tuple(shards))
            for table, shards in self._shards.items()
        }

    def check_saved(self, saved: Mapping[str, SavedTable]) -> None:
        """Raises ValueError unless a checkpoint holds all tables, with as many rows."""
        for table, shards in self._shards.items():
            name, rows = self._prefix + table, sum(count for _, count in shards)
            if name not in saved:
                raise ValueError(
                    f"the checkpoint has no rows of the tiered table {name!r}, only of "
                    f"{sorted(saved)}"
                )
            if saved[name].num_embeddings != rows:
                raise ValueError(
                    f"the checkpoint has {saved[name].num_embeddings} rows of the tiered table "
                    f"{name!r}, the model has {rows}"
                )

    def load(self, folder: Path, saved: Mapping[str, SavedTable], save_id: int) -> None:
        """Takes this rank's rows from `folder`, however they were cut when they were saved."""
        for kernel in self._kernels:
            kernel.let_go()
        for kernel, name, table in self._local():
            first_row, key = kernel.first_row(name), self._prefix + name
            if (first_row, table.num_embeddings) in saved[key].shards:
                table.load(folder)
            else:
                _gather(kernel, name, folder, key, saved[key])
        self._saved_as, self._num_updates = save_id, 0


def _shards_of(entry: ParameterSharding) -> list[tuple[int, int]]:
    return [
        (shard.shard_offsets[0], shard.shard_sizes[0])
        for shard in entry.sharding_spec.shards
        if shard.shard_sizes[0]
    ]


def _gather(kernel: TieredKernel, name: str, folder: Path, key: str, saved: SavedTable) -> None:
    """Fills this rank's part of a table from parts that were cut elsewhere."""
    table, first_row = kernel.tables[name], kernel.first_row(name)
    end_row = first_row + table.num_embeddings
    with ExitStack() as stack:
        parts = {
            first: stack.enter_context(
                CheckpointReader(
                    checkpoint_path(folder, shard_name(key, first, count)), table.layout, count
                )
            )
            for first, count in saved.shards
            if first < end_row and first + count > first_row
        }
        for part in parts.values():  # every checksum, before anything is changed
            for _ in part.blocks():
                pass
        init = RowInit(**next(iter(parts.values())).header.init)
        table = kernel.restart(name, init)
        for first, part in parts.items():
            for ids, records in part.blocks():
                own = ids + (first - first_row)
                here = (own >= 0) & (own < table.num_embeddings)
                columns = table.layout.tensors(records[here])
                table.write(torch.from_numpy(own[here]), columns)
