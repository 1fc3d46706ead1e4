"""What a state on disk holds, tensor by tensor: nothing is read before it is asked for."""

from __future__ import annotations

import abc
import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ecorec_torchrec.train.checkpoint import Checkpoints, readable


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
            raise ValueError(
                f"{file} cannot be read ({error}); it must be a state dict of plain tensors, saved "
                "by torch.save: save that of a sharded model with torch.distributed.checkpoint"
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
