"""Checkpoints of a run: torch.distributed.checkpoint, whole or not there at all.

A checkpoint is a folder `step-00000123`. It is written under another name and renamed when it is
complete, so that a crash never leaves half of one. Hosts share the file system.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

_NAME = re.compile(r"step-(\d{8,})")
_PROGRESS_FILE = "progress.pt"


@dataclass(kw_only=True)
class Progress:
    """How far a run has come.

    Attributes:
        epoch: epoch that comes next or is under way, from 0.
        batches: global batches of that epoch that are done.
        steps: optimizer steps done.
        tables: rows of every table.
        history: rows of `metrics.csv` so far.
        best: what is known of the best epoch so far.
        rng_states: random state of every rank (dropout goes on where it stopped).
    """

    epoch: int = 0
    batches: int = 0
    steps: int = 0
    tables: dict[str, int] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    rng_states: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: `<run folder>/checkpoints`.
        keep: newest ones kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self._complete()
        return found[-1] if found else None

    def save(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer, progress: Progress
    ) -> None:
        """Writes a checkpoint; all ranks call it together."""
        if not self._keep:
            return
        progress.rng_states = _gather_rng_states()
        final = self._folder / f"step-{progress.steps:08d}"
        partial = self._folder / f"{final.name}.partial"
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state_dict(model, optimizer), checkpoint_id=partial)
        if _is_first_rank():
            torch.save(vars(progress), partial / _PROGRESS_FILE)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self._complete()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()

    def _complete(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(
    path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer
) -> Progress:
    """Reads a checkpoint into the model and its optimizer, whatever their placement.

    Every rank's random state is restored too, where the number of ranks is that of the checkpoint.
    """
    state = _state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    progress = read_progress(path)
    if len(progress.rng_states) == dist.get_world_size():
        _set_rng_state(progress.rng_states[dist.get_rank()])
    return progress


def read_progress(path: Path) -> Progress:
    """How far the run of a checkpoint had come."""
    return Progress(**torch.load(path / _PROGRESS_FILE, weights_only=True))


def _state_dict(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _is_first_rank() -> bool:
    return dist.get_rank() == 0


def _gather_rng_states() -> list[dict[str, torch.Tensor]]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, state)
    return gathered


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
