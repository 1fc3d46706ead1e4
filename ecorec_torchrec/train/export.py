"""Dense weights of one table of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecorec_torchrec.train.saved_state import open_state
from ecorec_torchrec.train.saved_tables import saved_tables
from ecorec_torchrec.train.table_sizes import TableSize
from ecorec_torchrec.tt import to_dense


@dataclass(frozen=True)
class Export:
    """What an export has read and written.

    Attributes:
        table: as it lies in the checkpoint.
        file_bytes: of the file, which is float32.
    """

    table: TableSize
    file_bytes: int


def export_table(checkpoint: Path, table: str, out: Path) -> Export:
    """Writes the `(N, D)` weights of a table as `.npy` or `.pt`; needs no process group.

    Args:
        checkpoint: as `open_state` takes it, saved on any number of ranks.
        table: its name.
        out: the file; `.npy` files are written piece by piece through a memory map.

    Raises:
        ValueError: the checkpoint holds no such table, or does not tell its rows.
    """
    state = open_state(checkpoint)
    tables = {found.name: found for found in saved_tables(state)}
    if table not in tables:
        raise ValueError(f"table {table!r} is not in the checkpoint, which has {', '.join(tables)}")
    found = tables[table]
    spec = found.spec
    weights = list(state.read(found.tensors).values())
    dense, memory_map = _allocate(found.shape, out)
    if spec is None:
        dense.copy_(weights[0])
    else:
        to_dense(weights, spec, out=dense)
    if memory_map is None:
        torch.save(dense, out)
    else:
        memory_map.flush()
    size = TableSize(table, *found.shape, spec, found.dense_bytes, found.stored_bytes)
    return Export(size, out.stat().st_size)


def _allocate(shape: tuple[int, int], out: Path) -> tuple[Tensor, np.memmap | None]:
    if out.suffix == ".pt":
        return torch.empty(shape), None
    memory_map = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    return torch.from_numpy(memory_map), memory_map
