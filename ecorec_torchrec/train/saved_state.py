"""A state dict on disk, tensor by tensor: nothing is read before it is asked for."""

from __future__ import annotations

import abc
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from ecorec_torchrec.train.checkpoint import Checkpoints, readable, write_table_rows


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SavedState(abc.ABC):
    """A state dict on disk, nested ones with dots between their keys.

    Attributes:
        path: where it is.
        tensors: its tensors, in order.
        other_names: the values that are no tensors.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    other_names: frozenset[str]

    @abc.abstractmethod
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The whole tensors of these names, on the CPU, in the order asked for."""


def open_state(path: Path) -> SavedState:
    """Opens a checkpoint for reading; needs no process group.

    Args:
        path: a folder of torch.distributed.checkpoint, a run folder (for its newest checkpoint),
            or a file that `torch.save` has written.

    Raises:
        ValueError: there is no such thing at `path`, or it cannot be read.
    """
    path = find_checkpoint(path)
    return _DcpState(path) if path.is_dir() else _FileState(path)


def find_checkpoint(path: Path) -> Path:
    """The folder or file that `path` stands for; a run folder stands for its newest checkpoint.

    Raises:
        ValueError: there is no checkpoint.
    """
    if path.is_file() or (path / ".metadata").is_file():
        return path
    newest = Checkpoints(path / "checkpoints", keep=1).newest()
    if newest is None:
        raise ValueError(
            f"no checkpoint in {path}: neither a folder of torch.distributed.checkpoint, nor a run "
            "folder with a checkpoint, nor a file of torch.save"
        )
    return newest


class _DcpState(SavedState):
    def __init__(self, folder: Path) -> None:
        self.path = folder
        with readable(folder):
            entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self.tensors = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for name, entry in sorted(entries.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        self.other_names = frozenset(entries.keys() - self.tensors.keys())

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        infos = {name: self.tensors[name] for name in names}
        tensors = {name: torch.empty(i.shape, dtype=i.dtype) for name, i in infos.items()}
        with warnings.catch_warnings(), readable(self.path):
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, checkpoint_id=self.path, no_dist=True)
        return tensors


class _FileState(SavedState):
    """A file of `torch.save`, memory-mapped."""

    def __init__(self, file: Path) -> None:
        self.path = file
        try:
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = f"holds a {found[1]}" if found else f"cannot be read ({type(error).__name__})"
            raise ValueError(
                f"{file} {what}: it must be a state dict of plain tensors, saved by torch.save "
                "(that of a sharded model goes through torch.distributed.checkpoint)"
            ) from error
        if not isinstance(content, Mapping):
            raise ValueError(f"{file} holds a {type(content).__name__}, not a state dict")
        values = dict(_flatten(content))
        self._values = {name: v for name, v in values.items() if isinstance(v, Tensor)}
        self.tensors = {
            name: TensorInfo(tuple(value.shape), value.dtype)
            for name, value in self._values.items()
        }
        self.other_names = frozenset(values.keys() - self._values.keys())

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._values[name] for name in names}


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write_state(
    folder: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    table_rows: Mapping[str, int],
) -> None:
    """Writes a folder of torch.distributed.checkpoint, one tensor at a time, whole or not at all.

    Args:
        folder: to be made.
        tensors: what it is to hold.
        read: gives the tensor of a name; called once for each, and the tensor is then dropped.
        table_rows: rows of the tables, which the cores of a TT table do not tell.

    Raises:
        ValueError: `folder` exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    state = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta")
        for name, info in tensors.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=partial, planner=_LazySavePlanner(read), no_dist=True)
    write_table_rows(partial, table_rows)
    partial.rename(folder)


class _LazySavePlanner(DefaultSavePlanner):
    """Plans from tensors without values, which it fetches when they are written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._read(write_item.index.fqn)
