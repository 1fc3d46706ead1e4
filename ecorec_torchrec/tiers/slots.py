"""The first level: the lookup kernel's own weight and optimizer state, read and written by slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .spec import RowLayout, bytes_view


class Slots(ABC):
    """S rows that the lookup kernel trains, as records."""

    device: torch.device

    @abstractmethod
    def read(self, slots: np.ndarray) -> np.ndarray:
        """Records (U,) of `slots` (U,)."""

    @abstractmethod
    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Puts `records` (U,) into unique `slots` (U,)."""

    @abstractmethod
    def fence(self) -> None:
        """What the caller's stream was given so far comes before later reads and writes."""


def make_slots(
    table: str, layout: RowLayout, num_slots: int, tensors: Mapping[str, Tensor]
) -> Slots:
    """The slots of `table`, which are tensors of a lookup kernel.

    Args:
        table: name of the table, for errors.
        layout: the columns.
        num_slots: S.
        tensors: column -> (S, width) tensor of the kernel, on one device; (S,) for width 1 too.

    Raises:
        ValueError: a column is missing, too many, or of another shape, dtype or stride.
    """
    names = [name for name, _, _ in layout.columns]
    if sorted(tensors) != sorted(names):
        raise ValueError(f"slots of {table} have columns {sorted(tensors)}, not {sorted(names)}")
    rows: dict[str, Tensor] = {}
    for name, width, dtype in layout.columns:
        tensor = tensors[name].detach()
        if tensor.shape == (num_slots,) and width == 1:
            tensor = tensor.unsqueeze(1)
        if tensor.shape != (num_slots, width) or tensor.dtype != dtype:
            raise ValueError(
                f"slots of {table}: {name} is {tuple(tensor.shape)} of {tensor.dtype}, "
                f"{(num_slots, width)} of {dtype} is needed"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"slots of {table}: {name} is not contiguous")
        rows[name] = tensor
    devices = {tensor.device for tensor in rows.values()}
    if len(devices) > 1:
        raise ValueError(f"slots of {table} lie on {sorted(map(str, devices))}, not on one device")
    kind = HostSlots if devices.pop().type == "cpu" else DeviceSlots
    return kind(layout, rows)


class HostSlots(Slots):
    """Slots in memory that numpy reads and writes in place."""

    def __init__(self, layout: RowLayout, tensors: Mapping[str, Tensor]) -> None:
        self.device = torch.device("cpu")
        self._layout = layout
        self._columns = {name: bytes_view(tensor) for name, tensor in tensors.items()}

    def read(self, slots: np.ndarray) -> np.ndarray:
        records = self._layout.new_records(len(slots))
        for name, column in self._columns.items():
            records[name] = column[slots]
        return records

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        for name, column in self._columns.items():
            column[slots] = records[name]

    def fence(self) -> None:
        """Nothing to do: what the caller did on a CPU is done."""


class DeviceSlots(Slots):
    """Slots on a GPU, copied through pinned memory on a stream of their own.

    A row leaves its slot after the step that changed it: `fence` records where the caller's stream
    stands, and copies wait for that, not for what was given to it later. A call returns when its
    copies are done, so that the caller's stream may use the rows without an event.
    """

    def __init__(self, layout: RowLayout, tensors: Mapping[str, Tensor]) -> None:
        self._layout, self._tensors = layout, dict(tensors)
        self.device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(self.device)
        self.fence()

    def read(self, slots: np.ndarray) -> np.ndarray:
        records = self._layout.new_records(len(slots))
        with torch.cuda.stream(self._stream):
            index = torch.from_numpy(slots).pin_memory().to(self.device, non_blocking=True)
            columns = {}
            for name, tensor in self._tensors.items():
                rows = tensor.index_select(0, index)
                columns[name] = torch.empty_like(rows, device="cpu", pin_memory=True)
                columns[name].copy_(rows, non_blocking=True)
        self._stream.synchronize()
        for name, rows in columns.items():
            self._layout.set_column(records, name, rows)
        return records

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        with torch.cuda.stream(self._stream):
            index = torch.from_numpy(slots).pin_memory().to(self.device, non_blocking=True)
            for name, rows in self._layout.tensors(records).items():
                rows = rows.pin_memory().to(self.device, non_blocking=True)
                self._tensors[name].index_copy_(0, index, rows)
        self._stream.synchronize()

    def fence(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(event)  # waits add up: fences come from several streams
