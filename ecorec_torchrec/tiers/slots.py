"""The first level: the lookup kernel's own weight and optimizer state, read and written by slot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .spec import RowLayout, bytes_view


class Slots:
    """S rows that the lookup kernel trains, as records.

    Args:
        table: name of the table, for errors.
        layout: the columns.
        num_slots: S.
        tensors: column -> (S, width) tensor of the kernel, on one device; (S,) for width 1 too.

    Raises:
        ValueError: a column is missing, too many, or of another shape, dtype or stride.
    """

    def __init__(
        self, table: str, layout: RowLayout, num_slots: int, tensors: Mapping[str, Tensor]
    ) -> None:
        self.layout = layout
        names = [name for name, _, _ in layout.columns]
        if sorted(tensors) != sorted(names):
            raise ValueError(f"slots of {table} have columns {sorted(tensors)}, not {names}")
        self._tensors: dict[str, Tensor] = {}
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
            self._tensors[name] = tensor
        devices = {tensor.device for tensor in self._tensors.values()}
        if len(devices) > 1:
            raise ValueError(
                f"slots of {table} are on several devices: {sorted(map(str, devices))}"
            )
        self.device = devices.pop()
        self._views = (
            {name: bytes_view(tensor) for name, tensor in self._tensors.items()}
            if self.device.type == "cpu"
            else {}
        )

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Records (U,) of `slots` (U,)."""
        records = self.layout.new_records(len(slots))
        if self._views:
            for name, view in self._views.items():
                records[name] = view[slots]
            return records
        index = torch.from_numpy(slots).to(self.device)
        for name, tensor in self._tensors.items():
            self.layout.set_column(records, name, tensor.index_select(0, index))
        return records

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Puts `records` (U,) into unique `slots` (U,)."""
        if self._views:
            for name, view in self._views.items():
                view[slots] = records[name]
            return
        index = torch.from_numpy(slots).to(self.device)
        columns = self.layout.tensors(records)
        for name, tensor in self._tensors.items():
            tensor.index_copy_(0, index, columns[name].to(self.device))
