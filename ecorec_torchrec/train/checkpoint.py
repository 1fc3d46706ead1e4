"""Checkpoints of a run: torch.distributed.checkpoint, whole or not there at all.

A checkpoint is a folder `step-00000123`. It is written under another name and renamed when it is
complete, so that a crash never leaves half of one. Hosts share the file system.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from ecorec_torchrec.lookup import TieredOptimizer
from ecorec_torchrec.sharding import load_tiers, save_tiers

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_PROGRESS_FILE = "progress.pt"
_TABLES_FILE = "tables.json"
_TIERS_FOLDER = "tiers"


@dataclass(kw_only=True)
class Progress:
    """How far a run has come.

    Attributes:
        epoch: epoch that comes next or is under way, from 0.
        batches: global batches of that epoch that are done.
        steps: optimizer steps done.
        history: rows of `metrics.csv` so far.
        best: what is known of the best epoch so far.
        rank_states: of every rank its random state (dropout goes on where it stopped) and what it
            has summed up since the last line of `metrics.csv`.
    """

    epoch: int = 0
    batches: int = 0
    steps: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    rank_states: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: `<run folder>/checkpoints`.
        keep: newest ones kept; 0 writes none.
        table_rows: rows of every table, which the cores of a TT table do not tell.
    """

    def __init__(
        self, folder: Path, keep: int, table_rows: Mapping[str, int] | None = None
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._table_rows = dict(table_rows or {})
        self._steps_on_disk: int | None = None

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self._complete()
        return found[-1] if found else None

    def load_newest(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer
    ) -> tuple[Path, Progress] | None:
        """Reads the newest checkpoint, as `load_checkpoint`; None where there is none."""
        path = self.newest()
        if path is None:
            return None
        progress = load_checkpoint(path, model, optimizer)
        self._steps_on_disk = progress.steps
        return path, progress

    def save(
        self,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        progress: Progress,
        rank_state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Writes a checkpoint; all ranks call it together.

        `rank_state` is what this rank wants to find in `Progress.rank_states`.
        """
        if not self._keep:
            return
        progress.rank_states = _gather({**_rng_state(), **(rank_state or {})})
        final = self._folder / f"step-{progress.steps:08d}"
        if progress.steps == self._steps_on_disk:
            # The weights are there. Were the folder replaced, a crash might leave none.
            if _is_first_rank():
                _write_progress(final, progress)
            dist.barrier()
            return
        partial = final.with_name(final.name + _PARTIAL)
        if _is_first_rank():
            self._remove_partial()
            partial.mkdir(parents=True)
        dist.barrier()
        save_tiers(model, partial / _TIERS_FOLDER)
        dcp.save(_state_dict(model, optimizer), checkpoint_id=partial)
        if _is_first_rank():
            _write_progress(partial, progress)
            write_table_rows(partial, self._table_rows)
            if final.exists():
                _remove(final)
            partial.rename(final)
            for old in self._complete()[: -self._keep]:
                _remove(old)
        self._steps_on_disk = progress.steps
        dist.barrier()

    def _complete(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        found = (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _remove_partial(self) -> None:
        """What a crash in the middle of saving or removing has left behind."""
        if self._folder.is_dir():
            for path in self._folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(path)


def load_checkpoint(
    path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer
) -> Progress:
    """Reads a checkpoint into the model and its optimizer, whatever their placement.

    Every rank's random state is restored too, where the number of ranks is that of the checkpoint.

    Raises:
        ValueError: a file is missing or damaged, or the checkpoint is of another model.
    """
    state = _state_dict(model, optimizer)
    with readable(path):
        progress = read_progress(path)
        load_tiers(model, path / _TIERS_FOLDER)
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    _set_fbgemm_steps(model.fused_optimizer, progress.steps)
    if len(progress.rank_states) == dist.get_world_size():
        _set_rng_state(progress.rank_states[dist.get_rank()])
    return progress


def read_progress(path: Path) -> Progress:
    """How far the run of a checkpoint had come."""
    with readable(path):
        return Progress(**torch.load(path / _PROGRESS_FILE, weights_only=True))


def read_table_rows(path: Path) -> dict[str, int]:
    """Rows of every table of a checkpoint; empty for one that another program has written."""
    file = path / _TABLES_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_table_rows(path: Path, table_rows: Mapping[str, int]) -> None:
    (path / _TABLES_FILE).write_text(json.dumps(dict(table_rows), indent=2), encoding="utf-8")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what torch says of a damaged or foreign checkpoint into one ValueError."""
    try:
        yield
    except CheckpointException as error:
        # Every rank's failure is in it, each with its traceback; the first says it all.
        cause: BaseException = next(iter(error.failures.values()))[0]
        raise _unreadable(path, cause) from error
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, cause: BaseException) -> ValueError:
    # What torch says of a file that is no pickle is a page of advice.
    said = "" if isinstance(cause, pickle.UnpicklingError) else f": {cause}"
    is_of_run = _NAME.fullmatch(path.name) is not None
    cure = "; remove that folder to go on from the one before it" if is_of_run else ""
    return ValueError(f"the checkpoint {path} cannot be read ({type(cause).__name__}{said}){cure}")


def _state_dict(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not state["optimizer"]["state"]:
        # Plain SGD of this rank's tables keeps none, and DCP would ask for the name of what is
        # empty here, under which the other ranks have saved their tables' state.
        del state["optimizer"]
    return state


def _write_progress(folder: Path, progress: Progress) -> None:
    partial = folder / f"{_PROGRESS_FILE}{_PARTIAL}"
    torch.save(vars(progress), partial)
    os.replace(partial, folder / _PROGRESS_FILE)


def _remove(path: Path) -> None:
    """Removes a checkpoint so that no half of it is ever taken for a whole one."""
    partial = path.with_name(path.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    path.rename(partial)
    shutil.rmtree(partial)


def _set_fbgemm_steps(optimizer: KeyedOptimizer, steps: int) -> None:
    """FBGEMM's tables count steps for Adam's bias correction, and leave it out of their state."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, member in optimizer.optimizers:
            _set_fbgemm_steps(member, steps)
    elif isinstance(optimizer, EmbeddingFusedOptimizer | TieredOptimizer):
        optimizer.set_optimizer_step(steps)


def _is_first_rank() -> bool:
    return dist.get_rank() == 0


def _gather(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return gathered


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
