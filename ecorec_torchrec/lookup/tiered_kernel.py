"""What the compute kernels of tiered tables share: slots in a stock TBE, and whose rows are there.

A group of tables is one FBGEMM table batched embedding (TBE) of S slots per table. The ids of a
batch become slots, and FBGEMM looks up, differentiates and steps the slots as it would the rows of
a whole table: the same operations on the same numbers, in the same order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.tiers import (
    RowInit,
    RowLayout,
    Ticket,
    TieredTable,
    TierSpec,
    load_hot_ids,
)

from .tiered_settings import TieredSettings
from .weightless import WeightlessKernel

Abandoned = deque[tuple[TieredTable, Ticket]]


class TieredKernel(WeightlessKernel, FusedOptimizerModule):
    """Tables of which a TBE holds S rows each; the others lie in memory and in a file.

    Comes before one of TorchRec's two base classes of compute kernels. It has no rows before
    `start`.

    Args:
        config: the group; every table carries `TieredSettings` in its `fused_params`.
        pg: unused, as in TorchRec's dense kernels.
        device: of the slots.
        more: what else TorchRec's base class is given.
    """

    _feature_table_map: list[int]
    _local_rows: list[int]
    _local_cols: list[int]
    _row_offset: list[int]
    _weight_init_mins: list[float]
    _weight_init_maxs: list[float]

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *more: Any,
    ) -> None:
        super().__init__(config, pg, device, *more)
        specs = [TieredSettings.of(t.fused_params).tiers.spec for t in config.embedding_tables]
        self._specs = {t.name: s for t, s in zip(config.embedding_tables, specs, strict=True)}
        settings = TieredSettings.of(config.fused_params)
        on_gpu = device is not None and device.type == "cuda"
        place = (
            (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
            if on_gpu
            else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        )
        self._emb_module = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (spec.cache_rows, columns, *place)
                for spec, columns in zip(specs, self._local_cols, strict=True)
            ],
            feature_table_map=self._feature_table_map,
            pooling_mode=self._pooling_mode,
            device=device,
            table_names=list(self._specs),
            # Without an optimizer the sharded collection stops every backward pass.
            optimizer=settings.optimizer or EmbOptimType.EXACT_SGD,
            bounds_check_mode=BoundsCheckMode.NONE,  # slots are always within
            **dict(settings.arguments),
        )
        self._optim = TieredOptimizer(self._emb_module, list(self._specs))
        self.tables: dict[str, TieredTable] = {}
        self._prefix = ""
        self._prefetched: list[Lease] = []
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._abandoned: Abandoned = deque()

    @property
    def _pooling_mode(self) -> PoolingMode:
        raise NotImplementedError

    @property
    def emb_module(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        return self._emb_module

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim

    def start(self, seeds: Mapping[str, int], prefix: str = "") -> None:
        """Gives the tables start values, which follow from the seed and the row's number only.

        Args:
            seeds: by table.
            prefix: put before a table's name in the names of its files.
        """
        self.close()
        self._prefix = prefix
        for i, name in enumerate(self._specs):
            low, high = self._weight_init_mins[i], self._weight_init_maxs[i]
            self._open(i, name, RowInit(self._local_cols[i], seeds[name], a=low, b=high))

    def restart(self, table: str, init: RowInit) -> TieredTable:
        """Gives one table the start values of `init`, which is of the whole table."""
        self.let_go()
        self.tables.pop(table).close()
        self._open(list(self._specs).index(table), table, init)
        return self.tables[table]

    def first_row(self, table: str) -> int:
        """The row of the whole table that is row 0 here."""
        return self._row_offset[list(self._specs).index(table)]

    def _open(self, i: int, name: str, init: RowInit) -> None:
        rows, first_row = self._local_rows[i], self._row_offset[i]
        if rows == 0:  # cut over more ranks than it has rows
            return
        slots, spec = self._slots[i], self._specs[name]
        hot_rows = _hot_rows(name, self._config.embedding_tables[i].num_embeddings, spec)
        hot_rows = hot_rows[(hot_rows >= first_row) & (hot_rows < first_row + rows)] - first_row
        self.tables[name] = TieredTable(
            shard_name(self._prefix + name, first_row, rows),
            rows,
            RowLayout(tuple((column, t.shape[1], t.dtype) for column, t in slots.items())),
            replace(spec, pinned_rows=min(spec.pinned_rows, len(hot_rows))),
            replace(init, first_row=first_row),
            slots,
            hot_rows,
        )

    def close(self) -> None:
        """Stops moving rows and removes the row files."""
        self.let_go()
        for table in self.tables.values():
            table.close()
        self.tables.clear()

    @cached_property
    def _slots(self) -> list[dict[str, Tensor]]:
        """Per table its weight and optimizer state in the TBE, (S, width) each."""
        weights = self._emb_module.split_embedding_weights()
        # FBGEMM lists no states where an optimizer has none.
        states = self._emb_module.get_optimizer_state() or [{} for _ in weights]
        return [
            {"weight": weight.detach()}
            | {
                name: value.detach().view(len(weight), -1)
                for name, value in state.items()
                if value.numel() >= len(weight)  # and not a counter of the whole table
            }
            for weight, state in zip(weights, states, strict=True)
        ]

    # A batch

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Starts to bring in the rows of a batch that `forward` will be given, and returns."""
        self._let_abandoned_go()
        if features.values().numel():
            self._prefetched.append(self._ask_for(features))

    def forget_prefetched(self) -> None:
        """Lets go of batches that were prefetched and will not be looked up."""
        for lease in self._prefetched:
            lease.release(dirty=False)
        self._prefetched.clear()

    def let_go(self) -> None:
        """Lets go of all batches in flight, whose rows are to be replaced."""
        self.forget_prefetched()
        for lease in list(self._leases):
            lease.release(dirty=False)
        self._let_abandoned_go()

    def _let_abandoned_go(self) -> None:
        """Lets go of the rows of graphs that were dropped without a backward pass."""
        while self._abandoned:
            table, ticket = self._abandoned.popleft()
            table.release(ticket, dirty=False)

    def _take(self, features: KeyedJaggedTensor) -> Lease:
        """The lease of a batch: the oldest that was prefetched for these very ids, or a new one."""
        self._let_abandoned_go()  # a prefetched batch may wait for their slots
        for i, lease in enumerate(self._prefetched):
            if lease.is_for(features.values()):
                return self._prefetched.pop(i)
        return self._ask_for(features)

    def _ask_for(self, features: KeyedJaggedTensor) -> Lease:
        tickets = [
            (self.tables[table], self.tables[table].prefetch(ids_L))
            for table, ids_L in zip(self._specs, self._ids_by_table(features), strict=True)
            if ids_L.numel()
        ]
        lease = Lease(tickets, features.values(), self._abandoned)
        self._leases.add(lease)
        return lease

    def _ids_by_table(self, features: KeyedJaggedTensor) -> Iterator[Tensor]:
        borders, first = features.offset_per_key(), 0
        for table in self._config.embedding_tables:
            after = first + table.num_features()
            yield features.values()[borders[first] : borders[after]]
            first = after

    def _peek(self, table: int, ids_L: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct rows (U, D) of ids, and for each id which of them is its row."""
        if not ids_L.numel():
            return torch.zeros(1, self._local_cols[table], device=ids_L.device), ids_L.long()
        name = self._config.embedding_tables[table].name
        return self.tables[name].peek(ids_L)

    def _look_up(self, features: KeyedJaggedTensor, weights_L: Tensor | None = None) -> Tensor:
        """FBGEMM's lookup of the slots that hold the rows of `features`, pinned till backward."""
        lease = self._take(features)
        output = self._emb_module(
            indices=lease.slots(), offsets=features.offsets().long(), per_sample_weights=weights_L
        )
        # FBGEMM steps the slots within this node, so that its hooks stand around the update. They
        # also hold the lease: a graph that is dropped without a backward pass lets go of the rows.
        output.grad_fn.register_prehook(lambda _: lease.check())
        output.grad_fn.register_hook(lambda *_: lease.release(dirty=True))
        return output

    def statistics(self) -> Iterator[tuple[str, dict[str, int | float]]]:
        """What the tiers of each table have done since they were last asked, see `Counters`."""
        for name, table in self.tables.items():
            yield name, table.statistics()


class Lease:
    """The rows of one batch, which stay in their slots until its update is done.

    Args:
        tickets: of the tables that have ids in the batch, in table order.
        ids_L: the ids of all of them, which are kept in memory.
        abandoned: takes the tickets of a lease that ends without having been released.
    """

    def __init__(
        self,
        tickets: Sequence[tuple[TieredTable, Ticket]],
        ids_L: Tensor,
        abandoned: Abandoned,
    ) -> None:
        self._tickets: Sequence[tuple[TieredTable, Ticket]] | None = tickets
        self._ids_L = ids_L
        self._abandoned = abandoned

    def is_for(self, ids_L: Tensor) -> bool:
        """Whether these are the ids, which tells batches apart while both are in memory."""
        return ids_L.data_ptr() == self._ids_L.data_ptr() and ids_L.shape == self._ids_L.shape

    def slots(self) -> Tensor:
        """The slot of every id, int64 (L,); waits for rows that are on their way.

        Raises:
            ValueError: an id has no row, or the slots do not suffice for the batches in flight.
        """
        assert self._tickets is not None
        slots = [table.remap(ticket) for table, ticket in self._tickets]
        return torch.cat(slots) if slots else self._ids_L.long()

    def check(self) -> None:
        """Raises RuntimeError if the rows may have left their slots."""
        if self._tickets is None:
            raise RuntimeError(
                "the rows of this lookup of tiered tables have been let go, as by an earlier "
                "backward pass, which updated them, or by a checkpoint that was loaded since: add "
                "the losses and go backward once"
            )

    def release(self, *, dirty: bool) -> None:
        """Lets the rows go; once, further calls do nothing."""
        tickets, self._tickets = self._tickets, None
        for table, ticket in tickets or ():
            table.release(ticket, dirty=dirty)

    def __del__(self) -> None:
        # Garbage is collected in any thread, which may hold a lock of the table: do not wait here.
        self._abandoned.extend(self._tickets or ())


class TieredOptimizer(FusedOptimizer):
    """The settings of a TBE over slots; the state of its optimizer travels with the rows.

    Replaces TorchRec's `EmbeddingFusedOptimizer`.

    Args:
        emb_module: the TBE.
        tables: their names.
    """

    def __init__(
        self, emb_module: SplitTableBatchedEmbeddingBagsCodegen, tables: Sequence[str]
    ) -> None:
        self._emb_module = emb_module
        # What there is to step lies in no parameter; these stand for it by name.
        params = {f"{table}.rows": nn.Parameter(torch.empty(0)) for table in tables}
        group = {"params": list(params.values()), "lr": emb_module.get_learning_rate()}
        super().__init__(params, {}, [group])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._set_learning_rate()

    def step(self, closure: Any = None) -> None:
        """Takes over the learning rate; backward has stepped."""
        self._set_learning_rate()

    def set_optimizer_step(self, step: int) -> None:
        """Sets the step counter that Adam's bias correction reads."""
        self._emb_module.set_optimizer_step(step)

    def _set_learning_rate(self) -> None:
        self._emb_module.set_learning_rate(self.param_groups[0]["lr"])


def _hot_rows(table: str, num_embeddings: int, spec: TierSpec) -> NDArray[np.int64]:
    """The hottest rows of a whole table by falling frequency, as far as its file knows them.

    Raises:
        ValueError: the file is damaged, knows fewer of them than shall be pinned, or is of a table
            with more rows.
        OSError: the file cannot be read.
    """
    known = {} if spec.hot_ids_file is None else load_hot_ids(spec.hot_ids_file, table)
    hot_rows = known.get(table, np.zeros(0, np.int64))
    if len(hot_rows) and not 0 <= hot_rows.min() <= hot_rows.max() < num_embeddings:
        raise ValueError(
            f"table {table}: hot_ids_file={spec.hot_ids_file!r} names rows from {hot_rows.min()} "
            f"to {hot_rows.max()}, the table has {num_embeddings}: it is the profile of another one"
        )
    if len(hot_rows) < spec.pinned_rows:
        raise ValueError(
            f"table {table}: pinned_rows={spec.pinned_rows}, but hot_ids_file="
            f"{spec.hot_ids_file!r} knows {len(hot_rows)} hot rows of it: lower pinned_rows, or "
            "run `ecorec profile` with more --hot-rows"
        )
    return hot_rows


def shard_name(table: str, first_row: int, num_rows: int) -> str:
    """How the rows of a table from `first_row` on are called in files and errors."""
    return f"{table}.rows-{first_row}-{first_row + num_rows}"
