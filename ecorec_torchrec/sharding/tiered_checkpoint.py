"""Checkpoints of tiered tables: their rows, in files beside the state dict."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .tiered_rows import SavedTable, TieredRows
from .tt_collection import ShardedTTCollection

_MANIFEST_FILE = "tiers.json"


def save_tiers(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes the rows of all tiered tables of a sharded model; all ranks call it together.

    They do not fit into a state dict, which only notes which rows belong to it. Save them first,
    then the state dict. What is written is rows that were ever changed. Hosts share the folder.

    Args:
        model: with tiered tables; without any, nothing is written.
        folder: is made; if it holds such rows already, they are replaced, and a crash may leave
            neither: write every checkpoint into a folder of its own.

    Example::

        save_tiers(model, "checkpoint/tiers")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    """
    folder = Path(folder)
    collections = list(tiered_rows(model))
    if not collections:
        return
    if _is_first_rank():
        (folder / _MANIFEST_FILE).unlink(missing_ok=True)
    save_id = _of_first_rank(int(torch.randint(1, 2**62, (), generator=_own_generator())))
    saved: dict[str, SavedTable] = {}
    for rows in collections:
        saved |= rows.save(folder, save_id)
    _barrier()
    if _is_first_rank():
        _write_manifest(folder, save_id, saved)
    _barrier()


def load_tiers(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Reads the rows of all tiered tables of a sharded model; all ranks call it together.

    The tables may be cut otherwise, and lie on other ranks or on another number of them, than when
    they were saved. Load the rows first, then the state dict.

    Args:
        model: with tiered tables; without any, nothing is read.
        folder: of `save_tiers`.

    Raises:
        ValueError: there are no rows, some are missing or damaged, or they are of other tables.
    """
    folder = Path(folder)
    collections = list(tiered_rows(model))
    if not collections:
        return
    save_id, saved = _read_manifest(folder)
    for rows in collections:
        rows.check_saved(saved)
    for rows in collections:
        rows.load(folder, saved, save_id)
    _barrier()


def tier_statistics(model: nn.Module) -> dict[str, dict[str, int | float]]:
    """What the tiers of this rank's tables have done since they were last asked.

    Returns:
        table -> what `ecorec_torchrec.tiers.counters.Counters` has.
    """
    return {
        table: counts for rows in tiered_rows(model) for table, counts in rows.statistics().items()
    }


def tiered_rows(model: nn.Module) -> Iterator[TieredRows]:
    """Those of every collection that has tiered tables, in the order of the model."""
    for module in model.modules():
        if isinstance(module, ShardedTTCollection) and module.tiered_rows.specs:
            yield module.tiered_rows


def _write_manifest(folder: Path, save_id: int, saved: dict[str, SavedTable]) -> None:
    content = {
        "save_id": save_id,
        "tables": {name: asdict(table) for name, table in saved.items()},
    }
    partial = folder / f"{_MANIFEST_FILE}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / _MANIFEST_FILE)


def _read_manifest(folder: Path) -> tuple[int, dict[str, SavedTable]]:
    path = folder / _MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = {
            name: SavedTable(table["num_embeddings"], tuple(map(tuple, table["shards"])))
            for name, table in content["tables"].items()
        }
        return int(content["save_id"]), tables
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no rows of tiered tables: {path} is missing") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _own_generator() -> torch.Generator:
    """Training must not depend on whether it was saved in between."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _of_first_rank(value: Any) -> Any:
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
