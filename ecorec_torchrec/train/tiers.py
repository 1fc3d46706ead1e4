"""Tiered tables of a run: their memories, where the planner puts them, what they report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from ecorec_torchrec.plan import (
    RecordedPlan,
    in_dist_group,
    tiered_row_wise,
    tiered_table_wise,
)
from ecorec_torchrec.planner import EcoRecConstraints
from ecorec_torchrec.sharding import (
    TTEmbeddingBagCollectionSharder,
    tier_statistics,
    tiered_rows,
)
from ecorec_torchrec.tiers import TierSpec
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.data import Schema

# The planner sees a dense table of as many rows as there are slots, and says on which rank it is.
SLOTS_ONLY = EcoRecConstraints(
    tt="never",
    tiers="never",
    sharding_types=[ShardingType.TABLE_WISE.value],
    compute_kernels=["fused"],
)


def tier_specs(config: TrainConfig, schema: Schema) -> dict[str, TierSpec]:
    """The memories of every table that `tiers.tables` names.

    Raises:
        ValueError: a table that the data set does not have, or values that do not fit together.
    """
    options = config.tiers
    known = [feature.name for feature in schema.sparse]
    for table in options.tables:
        if table not in known:
            raise ValueError(f"tiers.tables: no table {table!r}; there are {', '.join(known)}")
    run_folder = Path(config.output.folder) / config.name
    try:
        spec = TierSpec(
            cache_rows=options.cache_rows,
            folder=options.folder or str(run_folder / "tiers"),
            memory_rows=options.memory_rows,
            memory_folder=options.memory_folder,
            prefetch_batches=options.prefetch_batches,
            policy=options.policy,
            direct_reads=options.direct_reads,
            hot_ids_file=options.hot_ids_file,
            pinned_rows=options.pinned_rows,
        )
    except ValueError as error:
        raise ValueError(f"tiers: {error}") from error
    return dict.fromkeys(options.tables, spec)


def place_tiers(
    plan: ShardingPlan,
    model: nn.Module,
    specs: Mapping[str, TierSpec],
    sharding: str,
    world_size: int,
    local_world_size: int,
) -> RecordedPlan:
    """The plan of a model with slots in place of tables, as that of the model with whole tables.

    Args:
        plan: in which every tiered table is table-wise, with as many rows as it has slots.
        model: the whole one, on the meta device.
        specs: the memories of the tiered tables.
        sharding: "table_wise", where the plan puts the slots, or "row_wise", on all ranks.
        world_size, local_world_size: ranks, and ranks of one host.
    """
    sharder = TTEmbeddingBagCollectionSharder()
    found = RecordedPlan(dict(plan.plan), world_size=world_size)
    for path, entries in plan.plan.items():
        weights = sharder.shardable_parameters(model.get_submodule(path))
        for table in specs.keys() & weights.keys():
            tiers, entry = specs[table], entries[table]
            generator = (
                tiered_row_wise(tiers=tiers)
                if sharding == ShardingType.ROW_WISE.value
                else tiered_table_wise(_owner(entry), tiers=tiers)
            )
            dist_group = getattr(entry, "dist_group", None)
            if dist_group is not None:
                generator = in_dist_group(dist_group, generator)
            entries[table] = generator(
                weights[table], local_world_size, world_size, _device_type(entry), sharder
            )
    return found


def tier_figures(model: nn.Module, num_steps: int, device: torch.device) -> dict[str, float]:
    """What the tiers have done since they were last asked; all ranks call it together.

    Returns:
        Nothing without tiered tables. Else `tier_hit_rate`, the share of a batch's distinct rows
        that were in their slots; `tier_wait_ms`, the wait for rows in a step on the mean rank; and
        per step, of all ranks together, `tier_memory_bytes` that moved in and out of the second
        level, `tier_file_read_bytes` and `tier_file_written_bytes`.
    """
    if not any(True for _ in tiered_rows(model)):
        return {}
    names = (
        ("slot_hits",),
        ("rows",),
        ("wait_ms",),
        ("memory_bytes_read", "memory_bytes_written"),
        ("file_bytes_read",),
        ("file_bytes_written",),
    )
    tables = tier_statistics(model).values()
    sums = torch.tensor(
        [sum(counts[name] for counts in tables for name in group) for group in names],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(sums)
    hits, rows, wait_ms, memory_bytes, read_bytes, written_bytes = sums.tolist()
    return {
        "tier_hit_rate": hits / max(rows, 1),
        "tier_wait_ms": wait_ms / num_steps / dist.get_world_size(),
        "tier_memory_bytes": memory_bytes / num_steps,
        "tier_file_read_bytes": read_bytes / num_steps,
        "tier_file_written_bytes": written_bytes / num_steps,
    }


def _owner(entry: ParameterSharding) -> int:
    assert entry.ranks is not None and len(entry.ranks) == 1
    return entry.ranks[0]


def _device_type(entry: ParameterSharding) -> str:
    placement = entry.sharding_spec.shards[0].placement
    return torch.device(placement.device()).type
