"""One table whose rows live in several memories, trained exactly.

What makes it exact: the rows of every batch in flight are pinned in their slots; they are unpinned
after the optimizer step, so that their last update comes before they can leave; they leave with
their optimizer state.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from .backing import Backing, MemoryLevel
from .cache import PinnedBatch, RowCache
from .checkpoint import CheckpointReader, checkpoint_path, write_checkpoint
from .counters import Meter
from .direct_file import DirectRowFile
from .directory import Directory
from .header import Header
from .init import RowInit
from .row_file import MappedRowFile
from .row_order import RowOrder
from .slots import make_slots
from .spec import WEIGHT, RowLayout, TierSpec


class Ticket:
    """A batch in flight: from `TieredTable.prefetch` to `TieredTable.release`.

    Attributes:
        number: its place among the batches of the table.
        ids_L: its ids, on the CPU.
        ready: done when its rows are in slots, or cannot be.
        remapped: whether it was handed to the lookup, so that its rows may have changed.
    """

    def __init__(self, number: int, ids_L: Tensor) -> None:
        self.number = number
        self.copied: torch.cuda.Event | None = None
        self.ids_L = ids_L.detach()
        if ids_L.device.type != "cpu":
            self.ids_L = torch.empty(ids_L.shape, dtype=ids_L.dtype, pin_memory=True)
            self.ids_L.copy_(ids_L.detach(), non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(ids_L.device))
        self.ready: Future[PinnedBatch] = Future()
        self.remapped = False

    @property
    def failed(self) -> bool:
        """Whether its rows could not be brought in."""
        return self.ready.done() and self.ready.exception() is not None


class TieredTable:
    """N rows: S of them in the lookup kernel's slots, the others in memory and in a file.

    Each table has a thread of its own that moves its rows: the thread mostly waits for storage,
    and so the tables of a model wait side by side. Methods are called from one other thread;
    `release` from any.

    Args:
        name: the table's name, in errors and file names.
        num_embeddings: N.
        layout: the columns of a row; the weight is as wide as `init.embedding_dim`.
        spec: sizes and folders of the levels.
        init: what rows hold that were never written; optimizer state starts at 0.
        slots: column -> (S, width) tensor of the lookup kernel, whose contents are not kept.
        hot_rows: ids by falling frequency, from a profile: they come first in the file, and the
            first `spec.pinned_rows` of them never leave their slots once they are there.

    Raises:
        ValueError: the slots or `init` do not fit the layout, a hot row is out of range or named
            twice, there are fewer of them than `pinned_rows`, the file cannot be made, or another
            table has it.

    Example::

        weight = torch.empty(1000, 64)
        layout = RowLayout((("weight", 64, torch.float32),))
        spec = TierSpec(cache_rows=1000, folder="/nvme/tables")
        table = TieredTable("ads", 10**9, layout, spec, RowInit(64, seed=0), {"weight": weight})
        ticket = table.prefetch(ids)
        slots = table.remap(ticket)       # weight[slots] are the rows of ids
        ...                               # forward, backward, optimizer step on `weight`
        table.release(ticket, dirty=True)
    """

    def __init__(
        self,
        name: str,
        num_embeddings: int,
        layout: RowLayout,
        spec: TierSpec,
        init: RowInit,
        slots: Mapping[str, Tensor],
        hot_rows: Sequence[int] | np.ndarray | Tensor = (),
    ) -> None:
        self.name, self.num_embeddings = name, num_embeddings
        self.layout, self.spec = layout, spec
        if layout.width(WEIGHT) != init.embedding_dim:
            raise ValueError(
                f"table {name}: rows of {layout.width(WEIGHT)} weights, initial rows of "
                f"{init.embedding_dim}"
            )
        self._meter = Meter()
        self._counters = self._meter.counters
        own_slots = make_slots(name, layout, spec.cache_rows, slots)
        self.device = own_slots.device
        order = RowOrder(name, num_embeddings, np.asarray(hot_rows, np.int64))
        if len(order.hot_ids) < spec.pinned_rows:
            raise ValueError(
                f"table {name}: pinned_rows={spec.pinned_rows}, but only {len(order.hot_ids)} hot "
                "rows are known"
            )
        self._cache = RowCache(
            Directory(spec.cache_rows, spec.policy),
            own_slots,
            self._open_backing(init, order),
            np.sort(order.hot_ids[: spec.pinned_rows]),
            self._counters,
        )
        self._moving = threading.RLock()  # held while rows move, or are read or written
        self._in_flight: dict[int, Ticket] = {}
        self._queue: deque[Ticket] = deque()
        self._num_tickets = 0
        self._failure: BaseException | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"tiers-{name}")

    # Batches

    def prefetch(self, ids_L: Tensor) -> Ticket:
        """Asks for the rows of a batch and returns at once.

        Args:
            ids_L: row ids, of any shape and in any order, which may repeat. They must not be
                changed before `remap`.

        Returns:
            What `remap` and `release` take; each ticket must be released.
        """
        self._check_usable()
        ticket = Ticket(self._num_tickets, ids_L)
        self._num_tickets += 1
        self._in_flight[ticket.number] = ticket
        self._queue.append(ticket)
        self._worker.submit(self._advance)
        return ticket

    def remap(self, ticket: Ticket) -> Tensor:
        """Waits until the rows of a batch are in their slots.

        Returns:
            The slot of every id, int64, in the shape of the ids and on the device of the slots.

        Raises:
            ValueError: an id is out of range, or the batch does not fit into the slots beside the
                batches before it that are not released.
            OSError: storage failed.
        """
        start = time.perf_counter()
        if ticket.number not in self._in_flight and not ticket.failed:
            raise self._released_before()
        if not ticket.ready.done():
            self._worker.submit(self._advance, ticket.number)
        try:
            slots_L = ticket.ready.result().slots_L
        finally:
            self._counters.wait_ms += (time.perf_counter() - start) * 1e3
        ticket.remapped = True
        return torch.from_numpy(slots_L).view(ticket.ids_L.shape).to(self.device)

    def release(self, ticket: Ticket, *, dirty: bool) -> None:
        """Lets the rows of a batch leave their slots again. Returns at once, in any thread.

        Args:
            ticket: of `prefetch`. One that failed may be released, to no effect.
            dirty: True after the optimizer step that changed them, False if nothing did.

        Raises:
            ValueError: the ticket was released before.
        """
        if self._in_flight.pop(ticket.number, None) is None:
            if ticket.failed:
                return  # it holds nothing, and `remap` tells
            raise self._released_before()
        # A batch on its way is let go when it arrives; one that is not is not brought in.
        ticket.ready.add_done_callback(partial(self._unpin, dirty))
        if self._queue:
            self._worker.submit(self._advance)

    def drain(self) -> None:
        """Releases every batch in flight: at the end of an epoch, or after an error in a step.

        Batches that were remapped count as changed, since the step may have come that far.
        """
        for ticket in list(self._in_flight.values()):
            self.release(ticket, dirty=ticket.remapped)

    # Rows

    def peek(self, ids_L: Tensor) -> tuple[Tensor, Tensor]:
        """The weights for an evaluation lookup, which leaves the cache as it is.

        Returns:
            (rows_U, inverse_L): the weights (U, D) of the unique ids on the device of the slots,
            and for each id of `ids_L` which of them is its row.
        """
        ids_U, inverse_L = torch.unique(ids_L.cpu(), return_inverse=True)
        return self.read(ids_U)[WEIGHT].to(self.device), inverse_L.to(self.device)

    def read(self, ids_U: Tensor) -> dict[str, Tensor]:
        """Current rows, wherever they are, which stay there.

        Args:
            ids_U: ids (U,).

        Returns:
            column -> (U, width), on the CPU.

        Raises:
            ValueError: an id is out of range.
        """
        ids = self._checked(ids_U)
        with self._moving:
            self._check_usable()
            return self.layout.tensors(self._cache.read(ids))

    def write(self, ids_U: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Replaces columns of rows, wherever they are; other columns keep their values.

        Args:
            ids_U: ids (U,), each once.
            columns: column -> (U, width).

        Raises:
            ValueError: an id is out of range or occurs twice, or a column is unknown or of another
                shape.
        """
        ids = self._checked(ids_U)
        if len(np.unique(ids)) < len(ids):
            raise ValueError(f"table {self.name}: rows to write are named twice")
        for name, values in columns.items():
            wanted = (len(ids), self.layout.width(name))
            if values.shape != wanted:
                raise ValueError(
                    f"table {self.name}: {name} of {tuple(values.shape)}, {wanted} is needed"
                )
        with self._moving:
            self._check_usable()
            records = self._cache.read(ids)
            for name, values in columns.items():
                self.layout.set_column(records, name, values)
            self._cache.write(ids, records)

    def touched_rows(self) -> Iterator[Tensor]:
        """Ids of all rows that were ever changed, in blocks, by their place in the file.

        Rows that are changed for the first time while this is read may be missing.
        """
        with self._moving:
            self._check_usable()
            self._cache.flush()
            blocks = self._cache.backing.file.written()
        while True:
            with self._moving:
                block = next(blocks, None)
            if block is None:
                return
            yield torch.from_numpy(block[0])

    # Checkpoints

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint of every row that was ever changed to `<folder>/<name>.tier`.

        Call it between steps. Batches in flight stay in flight. An earlier checkpoint there is
        replaced in one moment: whenever the process is killed, one of the two is whole.

        Raises:
            OSError: storage failed; an earlier checkpoint is as it was.
        """
        with self._moving:
            self._check_usable()
            self._cache.flush()
            backing = self._cache.backing
            header = self._header("checkpoint", backing.init)
            write_checkpoint(self._checkpoint(folder), header, backing.file.written())

    def load(self, folder: str | Path) -> None:
        """Goes back to a checkpoint: rows that are not in it have their initial values again.

        Batches in flight are drained. The initial values are those of the checkpoint too.

        Raises:
            ValueError: there is none, it is damaged, or it is of another table shape; nothing is
                changed.
            OSError: storage failed. The table refuses to go on, since its rows are neither these
                nor those: the checkpoint is whole, load it into a new table.
        """
        path = self._checkpoint(folder)
        with CheckpointReader(path, self.layout, self.num_embeddings) as checkpoint:
            checkpoint.check()
            self.drain()
            with self._moving:
                self._check_usable()
                try:
                    self._replace_rows(checkpoint)
                except BaseException as error:
                    self._failure = error
                    raise

    def _replace_rows(self, checkpoint: CheckpointReader) -> None:
        self._cache.clear()
        backing = self._cache.backing
        backing.init = RowInit(**checkpoint.header.init)
        for ids, records in checkpoint.blocks():
            backing.file.write(ids, records.copy())

    def statistics(self) -> dict[str, int | float]:
        """Hit rate, rows and bytes by level, waits: since the last call. See `Counters`."""
        return self._meter.drain()

    @property
    def file_bytes(self) -> int:
        """Bytes that the row file takes on its device, which grow with the rows ever written."""
        return self._cache.backing.file.allocated_bytes()

    def close(self) -> None:
        """Drains, stops the worker and removes the row file. Rows are kept by `save` only."""
        if self._failure is None:
            self.drain()
        self._worker.shutdown()
        if not isinstance(self._failure, _ClosedError):
            self._cache.backing.close()
            self._failure = _ClosedError("it is closed")

    # The worker

    def _advance(self, until: int = -1) -> None:
        """Brings in the batches of the queue while they fit.

        Args:
            until: number of a ticket that is waited for. Nothing is released in the meantime, so
                that what does not fit up to it never will.
        """
        start = time.perf_counter()
        while self._queue:
            ticket = self._queue[0]
            if ticket.number not in self._in_flight:
                self._queue.popleft()
                continue
            try:
                fits = self._bring_in(ticket, final=ticket.number <= until)
            except BaseException as error:
                if not ticket.ready.done():  # a write-back that failed is told to the next caller
                    ticket.ready.set_exception(error)
                    self._in_flight.pop(ticket.number, None)
                fits = True  # what comes after it may
            if not fits:
                self._counters.postponed += 1
                break
            self._queue.popleft()
        self._counters.prefetch_ms += (time.perf_counter() - start) * 1e3

    def _bring_in(self, ticket: Ticket, final: bool) -> bool:
        if ticket.copied is not None:
            ticket.copied.synchronize()
        ids_L = self._checked(ticket.ids_L.reshape(-1))
        with self._moving:
            self._check_usable()
            try:
                batch = self._cache.pin(ids_L, ticket.number)
                if batch is not None:
                    ticket.ready.set_result(batch)
                    self._cache.settle()
                    return True
            except BaseException as error:
                self._failure = error  # rows are between two levels: nothing is certain any more
                raise
        if final:
            raise ValueError(self._too_many(len(np.unique(ids_L))))
        return False

    def _unpin(self, dirty: bool, ready: Future[PinnedBatch]) -> None:
        if ready.exception() is None:
            try:
                self._cache.unpin(ready.result(), dirty)
            except BaseException as error:  # the caller may be a `Future`, which tells nobody
                self._failure = error
                raise

    # Small things

    def _open_backing(self, init: RowInit, order: RowOrder) -> Backing:
        spec, file_name = self.spec, quote(self.name, safe="")
        hot_rows = {"rows": len(order.hot_ids), "crc32": zlib.crc32(order.hot_ids.tobytes())}
        header = self._header("rows", init, order=hot_rows)
        kind = DirectRowFile if spec.direct_reads else MappedRowFile
        path = Path(spec.folder) / f"{file_name}.rows"
        file = kind(path, header, self.layout, order, self._counters)
        memory = None
        if spec.memory_rows:
            at = spec.memory_folder and Path(spec.memory_folder) / f"{file_name}.memory"
            try:
                memory = MemoryLevel(spec.memory_rows, self.layout, spec.policy, at or None)
            except BaseException:
                file.close()
                raise
        return Backing(file, init, memory, self._counters)

    def _header(self, kind: str, init: RowInit, order: dict[str, int] | None = None) -> Header:
        columns = self.layout.describe()
        return Header(kind, self.name, self.num_embeddings, columns, asdict(init), order or {})

    def _checkpoint(self, folder: str | Path) -> Path:
        return checkpoint_path(folder, self.name)

    def _checked(self, ids: Tensor) -> np.ndarray:
        plain = ids.detach().cpu().numpy().astype(np.int64, copy=False)
        if len(plain) and (plain.min() < 0 or plain.max() >= self.num_embeddings):
            wrong = plain[(plain < 0) | (plain >= self.num_embeddings)][0]
            raise ValueError(f"table {self.name}: id {wrong} is not in [0, {self.num_embeddings})")
        return plain

    def _released_before(self) -> ValueError:
        return ValueError(f"table {self.name}: the batch was released or drained before")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"table {self.name} cannot be used any more: {self._failure}"
            ) from self._failure

    def _too_many(self, num_unique: int) -> str:
        return (
            f"table {self.name}: a batch of {num_unique} unique rows does not fit into "
            f"cache_rows={self.spec.cache_rows} with {self._cache.num_pinned} rows pinned: "
            f"{len(self._in_flight) - 1} other batches are in flight and pinned_rows="
            f"{self.spec.pinned_rows}. Raise cache_rows, use smaller batches, or release batches "
            "before the next is waited for"
        )


class _ClosedError(Exception):
    """Why a closed table cannot be used."""
