"""Plan files: a TorchRec sharding plan as YAML that can be read, written by hand and kept.

TorchRec has no file format for a `ShardingPlan`; this one adds the TT shapes. The README of the
format is the docstring of `load_plan`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)

from .file_entries import (
    ENTRY_KEYS,
    World,
    device_type,
    entry_from_section,
    entry_to_mapping,
    table_shape,
)
from .tables import model_tables
from .yaml_text import Section, read_mapping, write_mapping

SCHEMA_VERSION = 1
_FILE_KEYS = ("schema_version", "world_size", "device", "local_world_size", "modules")


@dataclass
class RecordedPlan(ShardingPlan):
    """A `ShardingPlan` that knows the world and the tables that it was made for.

    `EcoRecPlanner` and `load_plan` return it; `save_plan` writes down what it knows.

    Args:
        world_size: number of ranks.
        table_shapes: module path -> table -> (num_embeddings, embedding_dim).
    """

    world_size: int = 0
    table_shapes: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)


def save_plan(
    plan: ShardingPlan, path: str | os.PathLike[str], *, world_size: int | None = None
) -> None:
    """Writes a plan as YAML, atomically; equal plans give equal bytes.

    Args:
        plan: any TorchRec plan over embedding modules.
        path: the file; an old one is replaced.
        world_size: ranks that the plan is for. Known to the plans of `EcoRecPlanner` and
            `load_plan`; else taken from the process group, else from a table that lies on all
            ranks.

    Raises:
        ValueError: the number of ranks is not known, or an entry has something that the format
            does not hold (`key_value_params`, cache statistics); the message names the table.

    Example::

        plan = EcoRecPlanner(topology).collective_plan(model, get_ecorec_sharders())
        save_plan(plan, "plan.yaml")
    """
    world_size = world_size or _world_size_of(plan)
    shapes = plan.table_shapes if isinstance(plan, RecordedPlan) else {}
    world = World.of(_entries(plan), world_size)
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "world_size": world_size}
    if world.device is not None:
        content["device"] = world.device
    if world.local_world_size is not None:
        content["local_world_size"] = world.local_world_size
    content["modules"] = {
        module_path: {
            table: entry_to_mapping(
                f"table {table!r} of module {module_path!r}",
                entry,
                table_shape(entry) or shapes.get(module_path, {}).get(table),
                world,
            )
            for table, entry in module_plan.items()
        }
        for module_path, module_plan in plan.plan.items()
    }
    write_mapping(content, path)


def load_plan(path: str | os.PathLike[str], module: nn.Module, world_size: int) -> RecordedPlan:
    """Reads a plan file for a model, and refuses one that was made for something else.

    What a file may leave out is computed with TorchRec's own helpers. Per table:

    ==================  ===========================================================================
    `kernel`            `tt`, `tiered`, or a TorchRec compute kernel: `dense`, `fused`, ..
    `sharding`          `table_wise`, `data_parallel`, and for dense tables `row_wise`,
                        `column_wise`, `table_row_wise`, `table_column_wise`, `grid_shard`
    `ranks`             one rank per shard; may be left out where all ranks take part
                        (`data_parallel`, `row_wise`)
    `tt`                `rank: 16` for a suggested shape, or `row_factors`, `col_factors` and
                        `ranks`; may be left out where the model fixes the shape
    `tiers`             of a tiered table: `cache_rows`, `folder`, and what else `TierSpec` has
    `num_embeddings`,   compared with the model when given
    `embedding_dim`
    `device`            `cpu`, `cuda`; default: of the file, else of this machine
    `shards`            `[{offset: [row, column], size: [rows, columns]}, ..]` for uneven cuts
    ==================  ===========================================================================

    and TorchRec's `enforce_hbm`, `stochastic_rounding`, `bounds_check_mode`, `output_dtype`,
    `cache_params`.

    Args:
        path: the file.
        module: the model, as it will be given to `DistributedModelParallel`.
        world_size: ranks that it will run on.

    Returns:
        The plan, for `DistributedModelParallel(plan=..)`.

    Raises:
        ValueError: YAML that does not parse (with the line), an unknown key (with the nearest
            one), a plan for another number of ranks, a table of the model that is missing, one
            that the model does not have, or one of another size (with both values).

    Example, a whole hand-written file for a model whose collection is `model.ebc`::

        schema_version: 1
        world_size: 2
        modules:
          ebc:
            users: {kernel: tt, sharding: table_wise, ranks: [1], tt: {rank: 16}}
            genders: {kernel: dense, sharding: data_parallel}
    """
    document = Section(read_mapping(path), str(path), _FILE_KEYS)
    version = document.integer("schema_version")
    if version != SCHEMA_VERSION:
        raise document.error(f"schema_version is {version}, this version reads {SCHEMA_VERSION}")
    if document.integer("world_size") != world_size:
        raise document.error(
            f"the plan is for world_size={document.integer('world_size')}, this run has "
            f"world_size={world_size}: make a new plan"
        )
    world = World(
        world_size,
        device_type(document),
        _local_world_size(document, world_size),
    )
    tables = model_tables(module)
    modules = Section(document.raw("modules"), f"{path}: modules", tables, "module")
    plan = RecordedPlan({}, world_size=world_size)
    for module_path, known in tables.items():
        if not modules.has(module_path):
            raise modules.error(f"the model's module {module_path!r} is missing")
        where = f"{path}: module {module_path!r}"
        content = Section(modules.raw(module_path), where, known, "table")
        missing = [name for name in known if not content.has(name)]
        if missing:
            raise content.error(f"the model's tables {', '.join(missing)} are missing")
        module_plan = EmbeddingModuleShardingPlan()
        for name in content.names():
            section = Section(content.raw(name), f"{where}, table {name!r}", ENTRY_KEYS)
            module_plan[name] = entry_from_section(section, known[name], world)
        plan.plan[module_path] = module_plan
        plan.table_shapes[module_path] = _declared_shapes(content)
    return plan


def _local_world_size(document: Section, world_size: int) -> int | None:
    if not document.has("local_world_size"):
        return None
    local = document.integer("local_world_size")
    if local < 1 or world_size % local:
        raise document.error(
            f"local_world_size={local} ranks per host do not divide world_size={world_size}"
        )
    return local


def _declared_shapes(module_content: Section) -> dict[str, tuple[int, int]]:
    """The sizes that the file states: saving the plan again states no more and no less."""
    shapes = {}
    for name in module_content.names():
        table = module_content.raw(name)
        if "num_embeddings" in table and "embedding_dim" in table:
            shapes[name] = (table["num_embeddings"], table["embedding_dim"])
    return shapes


def _world_size_of(plan: ShardingPlan) -> int:
    if isinstance(plan, RecordedPlan) and plan.world_size:
        return plan.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    for entry in _entries(plan):
        everywhere = (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)
        if entry.sharding_type in everywhere and entry.ranks:
            return len(entry.ranks)
    raise ValueError(
        "how many ranks is this plan for? There is no process group and no table on all ranks: "
        "save_plan(plan, path, world_size=..)"
    )


def _entries(plan: ShardingPlan) -> list[ParameterSharding]:
    return [entry for module_plan in plan.plan.values() for entry in module_plan.values()]
