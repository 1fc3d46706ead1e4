"""Dense weights of one table of a checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ecorec_torchrec.train.checkpoint import read_table_rows
from ecorec_torchrec.train.optimizers import table_of
from ecorec_torchrec.tt import TTSpec, to_dense


def export_table(checkpoint: Path, table: str, out: Path) -> tuple[int, int]:
    """Writes the `(N, D)` weights of a table as `.npy` or `.pt`; needs no process group.

    Args:
        checkpoint: a folder that `Checkpoints.save` has written, on any number of ranks.
        table: its name.
        out: the file; `.npy` files are written piece by piece through a memory map.

    Returns:
        The shape.

    Raises:
        ValueError: the checkpoint holds no such table.
    """
    tables = read_table_rows(checkpoint)
    if table not in tables:
        raise ValueError(f"table {table!r} is not in the checkpoint, which has {', '.join(tables)}")
    weights = _read_weights(checkpoint, table)
    if len(weights) == 1:
        shape = (weights[0].shape[0], weights[0].shape[1])
    else:
        spec = spec_of_cores(weights, tables[table])
        shape = (spec.num_embeddings, spec.embedding_dim)
    dense, memory_map = _allocate(shape, out)
    if len(weights) == 1:
        dense.copy_(weights[0])
    else:
        to_dense(weights, spec, out=dense)
    if memory_map is None:
        torch.save(dense, out)
    else:
        memory_map.flush()
    return shape


def spec_of_cores(cores: list[Tensor], num_embeddings: int) -> TTSpec:
    """The shape of a table from its cores `(p_k, r_{k-1}, q_k, r_k)`."""
    return TTSpec(
        num_embeddings,
        row_factors=tuple(core.shape[0] for core in cores),
        col_factors=tuple(core.shape[2] for core in cores),
        ranks=tuple(core.shape[3] for core in cores[:-1]),
    )


def _read_weights(checkpoint: Path, table: str) -> list[Tensor]:
    """The weight of a dense table, or the cores of a TT table in order."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if name.startswith("model.")
        and table_of(name) == table
        and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(weights, checkpoint_id=checkpoint)
    return list(weights.values())


def _allocate(shape: tuple[int, int], out: Path) -> tuple[Tensor, np.memmap | None]:
    if out.suffix == ".pt":
        return torch.empty(shape), None
    memory_map = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)
    return torch.from_numpy(memory_map), memory_map
