"""One table whose rows live in several memories, trained exactly.

The rules that make it exact: the rows of every batch in flight are pinned in their slots; a row is
unpinned after the optimizer step, so that its last update comes before it can leave; it leaves with
its optimizer state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from .backing import Backing, MemoryLevel, Rows
from .checkpoint import CheckpointReader, checkpoint_path, write_checkpoint
from .counters import Counters
from .directory import Directory
from .header import Header
from .init import RowInit
from .row_file import RowFile
from .row_order import RowOrder
from .slots import Slots
from .spec import WEIGHT, RowLayout, TierSpec

_COPY_ROWS = 1 << 14


class Ticket:
    """A batch in flight: from `TieredTable.prefetch` to `TieredTable.release`."""

    def __init__(self, number: int, ids_L: Tensor) -> None:
        self.number = number
        self.ids_L = ids_L
        self.slots_U = np.empty(0, np.int64)
        self.ready: Future[np.ndarray] = Future()
        self.remapped = False


class TieredTable:
    """N rows: S of them in the lookup kernel's slots, the others in memory and in a file.

    A thread of its own for each table moves its rows: it mostly waits for storage, and tables
    wait side by side.

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
        ValueError: the slots do not fit the layout, a hot row is out of range or twice, the file
            cannot be made, or another table has it.

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
        self._counters = Counters()
        self._slots = Slots(name, layout, spec.cache_rows, slots)
        self._cache = Directory(spec.cache_rows, spec.policy)
        order = RowOrder(num_embeddings, np.asarray(hot_rows, np.int64))
        self._pinned_ids = np.sort(order.hot_ids[: spec.pinned_rows])
        self._backing = self._open_backing(init, order)
        self._rows_lock = threading.RLock()  # held while rows move, or are read or written
        self._pins_lock = threading.Lock()  # held for moments: pins, dirty marks, the queue
        self._queue: deque[Ticket] = deque()
        self._in_flight: dict[int, Ticket] = {}
        self._num_tickets = 0
        self._broken: BaseException | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"tiers-{name}")

    def _open_backing(self, init: RowInit, order: RowOrder) -> Backing:
        spec, file_name = self.spec, quote(self.name, safe="")
        header = self._header("rows", init)
        file = RowFile(Path(spec.folder) / f"{file_name}.rows", header, self.layout, order)
        memory = None
        if spec.memory_rows:
            path = spec.memory_folder and Path(spec.memory_folder) / f"{file_name}.memory"
            memory = MemoryLevel(spec.memory_rows, self.layout, spec.policy, path or None)
        return Backing(file, init, memory, self._counters)

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
        with self._pins_lock:
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
            ValueError: an id is out of range, or the batches in flight need more slots than there
                are.
            OSError: storage failed.
        """
        start = time.perf_counter()
        if not ticket.ready.done():
            self._worker.submit(self._advance, ticket.number)
        try:
            slots_L = ticket.ready.result()
        finally:
            self._counters.wait_ms += (time.perf_counter() - start) * 1e3
        if ticket.number not in self._in_flight:
            raise ValueError(f"table {self.name}: the batch was released or drained before")
        ticket.remapped = True
        return torch.from_numpy(slots_L).view(ticket.ids_L.shape).to(self._slots.device)

    def release(self, ticket: Ticket, *, dirty: bool) -> None:
        """Lets the rows of a batch leave their slots again.

        Args:
            ticket: of `prefetch`.
            dirty: True after the optimizer step that changed them, False if nothing did.

        Raises:
            ValueError: the ticket was released before.
        """
        if not ticket.ready.done():
            self._worker.submit(self._advance, ticket.number)
        failed = ticket.ready.exception() is not None
        with self._pins_lock:
            if self._in_flight.pop(ticket.number, None) is None and not failed:
                raise ValueError(f"table {self.name}: the batch was released or drained before")
            self._cache.pins[ticket.slots_U] -= 1
            if dirty:
                self._cache.dirty[ticket.slots_U] = True
            waiting = bool(self._queue)
        if waiting:
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
        device = self._slots.device
        return self.read(ids_U)[WEIGHT].to(device), inverse_L.to(device)

    def read(self, ids_U: Tensor) -> dict[str, Tensor]:
        """Current rows, wherever they are, which stay there.

        Args:
            ids_U: unique ids (U,).

        Returns:
            column -> (U, width), on the CPU.

        Raises:
            ValueError: an id is out of range.
        """
        self._check_usable()
        ids = self._checked(ids_U)
        with self._rows_lock:
            return self.layout.tensors(self._read(ids))

    def write(self, ids_U: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Replaces columns of rows, wherever they are; other columns keep their values.

        Args:
            ids_U: unique ids (U,).
            columns: column -> (U, width).

        Raises:
            ValueError: an id is out of range, or a column is unknown.
        """
        self._check_usable()
        ids = self._checked(ids_U)
        unknown = set(columns) - {name for name, _, _ in self.layout.columns}
        if unknown:
            raise ValueError(f"table {self.name} has no columns {sorted(unknown)}")
        with self._rows_lock:
            records = self._read(ids)
            for name, values in columns.items():
                self.layout.set_column(records, name, values)
            slots = self._cache.map.find(ids)
            here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
            self._slots.write(slots[here], records[here])
            with self._pins_lock:
                self._cache.dirty[slots[here]] = True
            self._backing.write(ids[below], records[below])

    def touched_rows(self) -> Iterator[Tensor]:
        """Ids of all rows that were ever changed, in blocks, by their place in the file."""
        with self._rows_lock:
            self._flush()
            for ids, _ in self._backing.file.written():
                yield torch.from_numpy(ids)

    # Checkpoints

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint of every row that was ever changed to `<folder>/<name>.tier`.

        Call it between steps. Batches in flight stay in flight. An earlier checkpoint there is
        replaced in one moment: whenever the process is killed, one of the two is whole.
        """
        self._check_usable()
        with self._rows_lock:
            self._flush()
            header = self._header("checkpoint", self._backing.init)
            write_checkpoint(self._checkpoint(folder), header, self._backing.file.written())

    def load(self, folder: str | Path) -> None:
        """Goes back to a checkpoint: rows that are not in it have their initial values again.

        Batches in flight are drained. Nothing is changed if the checkpoint is refused.

        Raises:
            ValueError: there is none, it is damaged, or it is of another table.
        """
        self._check_usable()
        self.drain()
        with (
            self._rows_lock,
            CheckpointReader(
                self._checkpoint(folder), self.layout, self.num_embeddings
            ) as checkpoint,
        ):
            for _ in checkpoint.blocks():  # every checksum, before anything is changed
                pass
            self._cache.clear()
            self._backing.clear()
            self._backing.init = RowInit(**checkpoint.header.init)
            for ids, records in checkpoint.blocks():
                self._backing.file.write(ids, records.copy())

    def statistics(self) -> dict[str, int | float]:
        """Hit rate, rows and bytes by level, waits: since the last call. See `Counters`."""
        return self._counters.drain()

    def close(self) -> None:
        """Drains, stops the worker and removes the row file. Rows are kept by `save` only."""
        if self._broken is None:
            self.drain()
        self._worker.shutdown()
        self._backing.close()
        self._broken = self._broken or ValueError(f"table {self.name} is closed")

    # The worker

    def _advance(self, until: int = -1) -> None:
        """Brings in the batches of the queue while they fit.

        Args:
            until: number of a ticket that is waited for: nothing will be released before it is
                there, so what does not fit up to it will never fit.
        """
        start = time.perf_counter()
        while self._queue:
            ticket = self._queue[0]
            try:
                slots_L = self._bring_in(ticket, final=ticket.number <= until)
            except BaseException as error:
                self._queue.popleft()
                self._in_flight.pop(ticket.number, None)
                ticket.ready.set_exception(error)
                continue
            if slots_L is None:
                self._counters.postponed += 1
                break
            self._queue.popleft()
            ticket.ready.set_result(slots_L)
        self._counters.prefetch_ms += (time.perf_counter() - start) * 1e3

    def _bring_in(self, ticket: Ticket, final: bool) -> np.ndarray | None:
        """Pins the rows of a batch in slots; None, and nothing is changed, if they do not fit."""
        self._check_usable()
        ids_L = self._checked(ticket.ids_L.reshape(-1))
        with self._rows_lock:
            slots_L = self._cache.map.find(ids_L)
            missing_U = np.unique(ids_L[slots_L < 0])
            hit_U = np.unique(slots_L[slots_L >= 0])
            with self._pins_lock:
                self._cache.pins[hit_U] += 1
                victims = self._cache.victims(len(missing_U))
                if victims is None:
                    self._cache.pins[hit_U] -= 1
                    if not final:
                        return None
                    raise ValueError(self._too_many(len(hit_U) + len(missing_U)))
            try:
                self._exchange(victims, missing_U)
            except BaseException as error:
                self._broken = error
                raise
            slots_L[slots_L < 0] = self._cache.map.find(ids_L[slots_L < 0])
            ticket.slots_U = np.concatenate([hit_U, victims])
            with self._pins_lock:
                self._cache.pins[victims] += 1
            self._cache.pins[victims[np.isin(missing_U, self._pinned_ids)]] += 1
            used = self._cache.used(self._cache.scores[ticket.slots_U], ticket.number)
            self._cache.scores[ticket.slots_U] = used
            self._counters.batches += 1
            self._counters.rows += len(ticket.slots_U)
            self._counters.slot_hits += len(hit_U)
        return slots_L

    def _exchange(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Puts rows `ids` into `slots`, and the rows that were there one level down."""
        cache = self._cache
        filled = slots[cache.ids[slots] >= 0]
        leaving = Rows(
            cache.ids[filled], self._slots.read(filled), cache.dirty[filled], cache.scores[filled]
        )
        cache.empty(slots)
        rows = self._backing.fetch(ids)
        self._slots.write(slots, rows.records)
        cache.place(ids, slots)
        cache.dirty[slots] = rows.dirty
        cache.scores[slots] = rows.scores
        self._backing.store(leaving)

    def _read(self, ids: np.ndarray) -> np.ndarray:
        slots = self._cache.map.find(ids)
        here, below = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        records = self.layout.new_records(len(ids))
        records[here] = self._slots.read(slots[here])
        records[below] = self._backing.read(ids[below])
        return records

    def _flush(self) -> None:
        """Writes every changed row to the file."""
        dirty = np.flatnonzero(self._cache.dirty)
        for start in range(0, len(dirty), _COPY_ROWS):
            slots = dirty[start : start + _COPY_ROWS]
            self._backing.file.write(self._cache.ids[slots], self._slots.read(slots))
            with self._pins_lock:
                self._cache.dirty[slots] = False
        self._backing.flush()

    # Small things

    def _checked(self, ids: Tensor) -> np.ndarray:
        plain = ids.detach().cpu().numpy().astype(np.int64, copy=False)
        outside = (plain < 0) | (plain >= self.num_embeddings)
        if outside.any():
            raise ValueError(
                f"table {self.name}: id {plain[outside][0]} is not in [0, {self.num_embeddings})"
            )
        return plain

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RuntimeError(
                f"table {self.name} cannot be used any more: {self._broken}"
            ) from self._broken

    def _too_many(self, rows: int) -> str:
        pinned = int(np.count_nonzero(self._cache.pins))
        return (
            f"table {self.name}: a batch of {rows} unique rows does not fit into "
            f"cache_rows={len(self._cache)} beside the {pinned} rows that are pinned "
            f"({len(self._in_flight) - 1} other batches in flight, {len(self._pinned_ids)} rows "
            "by profile): raise cache_rows, or use smaller batches or prefetch_batches"
        )

    def _header(self, kind: str, init: RowInit) -> Header:
        columns = self.layout.describe()
        return Header(kind, self.name, self.num_embeddings, columns, asdict(init))

    def _checkpoint(self, folder: str | Path) -> Path:
        return checkpoint_path(folder, self.name)
