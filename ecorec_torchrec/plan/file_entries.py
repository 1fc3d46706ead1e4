"""One table of a plan file: from a TorchRec plan entry to YAML and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets, placement
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
    ShardMetadata,
)
from torchrec.distributed.utils import get_device_type
from torchrec.modules.embedding_configs import DataType

from ecorec_torchrec.tt import TTSpec

from .entries import (
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    WHY_TT_IS_NOT_CUT,
    GroupedParameterSharding,
    TTParameterSharding,
    with_dist_group,
)
from .tables import ModelTable
from .tiered import (
    TIERED_SHARDING_TYPES,
    WHY_TIERED_IS_NOT_CUT,
    TieredParameterSharding,
    tiers_from_section,
    tiers_of,
    tiers_to_mapping,
)
from .yaml_text import Section

ENTRY_KEYS = (
    "num_embeddings",
    "embedding_dim",
    "kernel",
    "sharding",
    "ranks",
    "device",
    "tt",
    "tiers",
    "dist_group",
    "shards",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "cache_params",
)
TT_KERNEL = "tt"
TIERED_KERNEL = "tiered"
_STOCK_KERNELS = [k.value for k in EmbeddingComputeKernel if k.value != TT_COMPUTE_KERNEL]
_KERNELS = (*_STOCK_KERNELS, TT_KERNEL, TIERED_KERNEL)
_SHARDING_TYPES = tuple(sharding_type.value for sharding_type in ShardingType)
_ON_ALL_RANKS = (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)
_CUT_BY_COLUMNS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
# The axes (0 rows, 1 columns) along which a shard is as long as its table.
_UNCUT_AXES = {
    ShardingType.TABLE_WISE.value: (0, 1),
    ShardingType.ROW_WISE.value: (1,),
    ShardingType.TABLE_ROW_WISE.value: (1,),
    ShardingType.COLUMN_WISE.value: (0,),
    ShardingType.TABLE_COLUMN_WISE.value: (0,),
}

Shape = tuple[int, int]
Shards = list[tuple[list[int], list[int]]]  # (offset, size) per shard


@dataclass(frozen=True)
class World:
    """Where shards can lie: what turns a rank into a placement such as `rank:9/cuda:1`."""

    size: int
    device: str | None = None
    local_world_size: int | None = None

    @classmethod
    def of(cls, entries: Sequence[ParameterSharding], world_size: int) -> World:
        """The world that the placements of a plan speak of."""
        placements = [shard.placement for entry in entries for shard in _shards(entry)]
        if not placements:
            return cls(world_size)
        numbered = [p for p in placements if p.device().index is not None]
        fitting = (
            local
            for local in range(world_size, 0, -1)
            if world_size % local == 0
            and all(p.device().index == p.rank() % local for p in numbered)
        )
        local_world_size = next(fitting, None) if numbered else None
        return cls(world_size, placements[0].device().type, local_world_size)

    @cached_property
    def ranks_per_host(self) -> int:
        return self.local_world_size or get_local_size(self.size)

    def placement(self, device: str, rank: int) -> str:
        return placement(device, rank, 1 if device == "cpu" else self.ranks_per_host)


def table_shape(entry: ParameterSharding) -> Shape | None:
    """(num_embeddings, embedding_dim) as far as the entry tells."""
    if isinstance(entry, TTParameterSharding) and entry.tt is not None:
        return entry.tt.num_embeddings, entry.tt.embedding_dim
    ends = [
        [o + s for o, s in zip(shard.shard_offsets, shard.shard_sizes, strict=True)]
        for shard in _shards(entry)
    ]
    return (max(e[0] for e in ends), max(e[1] for e in ends)) if ends else None


def entry_to_mapping(
    where: str, entry: ParameterSharding, shape: Shape | None, world: World
) -> dict[str, Any]:
    """What a plan file says about one table.

    Raises:
        ValueError: the entry has something that the format does not hold.
    """
    mapping: dict[str, Any] = {}
    if shape is not None:
        mapping |= {"num_embeddings": shape[0], "embedding_dim": shape[1]}
    mapping |= {
        "kernel": _kernel_name(entry),
        "sharding": entry.sharding_type,
    }
    ranks = list(entry.ranks or range(world.size))
    if entry.sharding_type not in _ON_ALL_RANKS or ranks != list(range(world.size)):
        mapping["ranks"] = ranks
    if isinstance(entry, TTParameterSharding) and entry.tt is not None:
        mapping["tt"] = {
            "row_factors": list(entry.tt.row_factors),
            "col_factors": list(entry.tt.col_factors),
            "ranks": list(entry.tt.ranks),
        }
    tiers = tiers_of(entry)
    if tiers is not None:
        mapping["tiers"] = tiers_to_mapping(tiers)
    if isinstance(entry, GroupedParameterSharding) and entry.dist_group is not None:
        mapping["dist_group"] = entry.dist_group
    mapping |= _shards_to_mapping(where, entry, ranks, shape, world)
    return mapping | _options_to_mapping(where, entry)


def entry_from_section(section: Section, table: ModelTable, world: World) -> ParameterSharding:
    """The plan entry of one table of a file.

    Raises:
        ValueError: the entry does not fit the table or the world.
    """
    entry = _ungrouped_entry(section, table, world)
    if not section.has("dist_group"):
        return entry
    dist_group = section.integer("dist_group")
    if dist_group < 0:
        raise section.error(f"`dist_group`: {dist_group} must be at least 0")
    return with_dist_group(entry, dist_group)


def _ungrouped_entry(section: Section, table: ModelTable, world: World) -> ParameterSharding:
    for key in ("num_embeddings", "embedding_dim"):
        if section.has(key) and section.integer(key) != getattr(table, key):
            raise section.error(
                f"the plan is for {key}={section.integer(key)}, "
                f"the model has {key}={getattr(table, key)}"
            )
    kernel = section.choice("kernel", _KERNELS)
    sharding_type = section.choice("sharding", _SHARDING_TYPES)
    _check_kernel(section, kernel, sharding_type)
    ranks = _ranks(section, sharding_type, world)
    shape = (table.num_embeddings, table.embedding_dim)
    fields = {
        "sharding_type": sharding_type,
        "compute_kernel": kernel if kernel in _STOCK_KERNELS else TT_COMPUTE_KERNEL,
        "ranks": ranks,
        "sharding_spec": _sharding_spec(section, sharding_type, ranks, shape, world),
        **_options(section),
    }
    for key in (TT_KERNEL, "tiers"):
        needed = TT_KERNEL if key == TT_KERNEL else TIERED_KERNEL
        if section.has(key) and kernel != needed:
            raise section.error(f"`{key}` needs `kernel: {needed}`, found `kernel: {kernel}`")
    if kernel == TT_KERNEL:
        return TTParameterSharding(**fields, tt=_tt_spec(section, table))
    if table.has_cores:
        raise section.error(
            f"the model holds this table as TT cores, so it cannot be planned `kernel: {kernel}`"
        )
    if kernel == TIERED_KERNEL:
        return TieredParameterSharding(**fields, tiers=tiers_from_section(section))
    return ParameterSharding(**fields)


def _kernel_name(entry: ParameterSharding) -> str:
    if entry.compute_kernel != TT_COMPUTE_KERNEL:
        return entry.compute_kernel
    return TT_KERNEL if tiers_of(entry) is None else TIERED_KERNEL


def device_type(section: Section) -> str | None:
    """The `device` of a section, None where it has none."""
    if not section.has("device"):
        return None
    name = section.text("device")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise section.error(
            f"`device`: {name!r} is no type of device such as cpu or cuda"
        ) from error
    if device.index is not None:
        raise section.error(f"`device`: give the type, {device.type!r}, found {name!r}")
    return device.type


def _check_kernel(section: Section, kernel: str, sharding_type: str) -> None:
    if kernel == TT_KERNEL and sharding_type not in TT_SHARDING_TYPES:
        raise section.error(f"`sharding` is {sharding_type}, but {WHY_TT_IS_NOT_CUT}")
    if kernel == TIERED_KERNEL and sharding_type not in TIERED_SHARDING_TYPES:
        raise section.error(f"`sharding` is {sharding_type}, but {WHY_TIERED_IS_NOT_CUT}")
    if sharding_type == ShardingType.DATA_PARALLEL.value and kernel not in (
        EmbeddingComputeKernel.DENSE.value,
        TT_KERNEL,
    ):
        raise section.error(
            f"`kernel: {kernel}` steps a table where it lies, so that data_parallel replicas would "
            "part: use `kernel: dense`"
        )


def _ranks(section: Section, sharding_type: str, world: World) -> list[int]:
    if not section.has("ranks"):
        if sharding_type not in _ON_ALL_RANKS:
            raise section.error(f"`ranks` is missing: {sharding_type} needs one rank per shard")
        return list(range(world.size))
    ranks = section.integers("ranks")
    wrong = [rank for rank in ranks if not 0 <= rank < world.size]
    if wrong:
        raise section.error(f"rank {wrong[0]} is not within 0..{world.size - 1}")
    if sharding_type in _ON_ALL_RANKS and ranks != tuple(range(world.size)):
        raise section.error(
            f"{sharding_type} is on all {world.size} ranks, in their order, found {list(ranks)}"
        )
    return list(ranks)


def _tt_spec(section: Section, table: ModelTable) -> TTSpec | None:
    if not section.has("tt"):
        if table.tt is None:
            raise section.error("`tt` is missing: give a rank (`tt: {rank: 16}`) or the factors")
        return None
    explicit = ("row_factors", "col_factors", "ranks")
    tt = Section(section.raw("tt"), f"{section.where}, tt", ("rank", *explicit))
    if tt.has("rank") and any(tt.has(key) for key in explicit):
        raise tt.error("give either `rank` or `row_factors`, `col_factors` and `ranks`")
    try:
        if tt.has("rank"):
            spec = TTSpec.suggest(
                table.num_embeddings, table.embedding_dim, rank=tt.integer("rank")
            )
        else:
            spec = TTSpec(table.num_embeddings, *(tt.integers(key) for key in explicit))
    except ValueError as error:
        message = str(error).removeprefix(f"{tt.where}: ")
        raise tt.error(message) from error
    if spec.embedding_dim != table.embedding_dim:
        raise tt.error(
            f"col_factors={spec.col_factors} are of embedding_dim={spec.embedding_dim}, "
            f"the model has embedding_dim={table.embedding_dim}"
        )
    if table.tt is not None and spec != table.tt:
        raise tt.error(f"the plan gives the shape {spec}, the model {table.tt}")
    return spec


def _sharding_spec(
    section: Section, sharding_type: str, ranks: list[int], shape: Shape, world: World
) -> EnumerableShardingSpec | None:
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        if section.has("shards"):
            raise section.error("data_parallel has no `shards`")
        return None
    if section.has("shards"):
        shards = _explicit_shards(section, sharding_type, ranks, shape)
    else:
        try:
            shards = _computed_shards(sharding_type, ranks, shape, world)
        except ValueError as error:
            raise section.error(str(error)) from error
    default_device = world.device or get_device_type()
    device = device_type(section) or default_device
    metadata = [
        ShardMetadata(
            shard_offsets=offset, shard_sizes=size, placement=world.placement(device, rank)
        )
        for (offset, size), rank in zip(shards, ranks, strict=True)
    ]
    try:
        return EnumerableShardingSpec(metadata)
    except ValueError as error:  # overlapping shards
        raise section.error(str(error)) from error


def _explicit_shards(
    section: Section, sharding_type: str, ranks: list[int], shape: Shape
) -> Shards:
    shards: Shards = []
    for number, item in enumerate(section.mappings("shards")):
        shard = Section(item, f"{section.where}, shard {number}", ("offset", "size"))
        offset, size = list(shard.integers("offset")), list(shard.integers("size"))
        fits = len(offset) == len(size) == 2 and all(
            o >= 0 and s >= 0 and o + s <= end
            for o, s, end in zip(offset, size, shape, strict=True)
        )
        if not fits:
            raise shard.error(f"offset {offset} and size {size} do not lie in a table of {shape}")
        if any(size[axis] != shape[axis] for axis in _UNCUT_AXES.get(sharding_type, ())):
            raise shard.error(f"size {size} is not how {sharding_type} cuts a table of {shape}")
        shards.append((offset, size))
    if len(shards) != len(ranks):
        raise section.error(f"{len(shards)} shards on {len(ranks)} ranks")
    if sharding_type == ShardingType.TABLE_WISE.value and len(shards) != 1:
        raise section.error(f"a table_wise table has one shard, found {len(shards)}")
    covered = sum(size[0] * size[1] for _, size in shards)
    if covered != shape[0] * shape[1]:
        raise section.error(
            f"the shards hold {covered} elements, the table has {shape[0] * shape[1]}"
        )
    return shards


def _computed_shards(sharding_type: str, ranks: list[int], shape: Shape, world: World) -> Shards:
    """How TorchRec cuts the table over these ranks.

    Raises:
        ValueError: these ranks do not fit the sharding type and the table.
    """
    columns_blocks, ranks_per_host = 1, world.size
    if sharding_type in _CUT_BY_COLUMNS:
        columns_blocks = len(ranks)
    elif sharding_type == ShardingType.TABLE_ROW_WISE.value:
        ranks_per_host = len(ranks)
    elif sharding_type == ShardingType.GRID_SHARD.value:
        ranks_per_host = world.ranks_per_host
        columns_blocks = max(1, len(ranks) // ranks_per_host)
    if not ranks or shape[1] % columns_blocks:
        raise ValueError(f"{shape[1]} columns cannot be cut for {sharding_type} on ranks {ranks}")
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(shape, device="meta"),
        world_size=world.size,
        local_world_size=ranks_per_host,
        sharding_type=sharding_type,
        col_wise_shard_dim=shape[1] // columns_blocks,
    )
    if len(sizes) != len(ranks):
        raise ValueError(
            f"{sharding_type} cuts a table of {shape[0]} x {shape[1]} into {len(sizes)} shards, "
            f"ranks {ranks} are {len(ranks)}"
        )
    return [(list(offset), list(size)) for offset, size in zip(offsets, sizes, strict=True)]


def _shards_to_mapping(
    where: str, entry: ParameterSharding, ranks: list[int], shape: Shape | None, world: World
) -> dict[str, Any]:
    """`device` and `shards`, as far as they are not what a reader of the file would compute."""
    shards = _shards(entry)
    if not shards:
        return {}
    assert shape is not None
    mapping: dict[str, Any] = {}
    device = shards[0].placement.device().type
    if device != world.device:
        mapping["device"] = device
    for shard, rank in zip(shards, ranks, strict=True):
        if str(shard.placement) != world.placement(device, rank):
            raise ValueError(
                f"{where}: the shard of rank {rank} is placed on {shard.placement}, a plan file "
                f"can say {world.placement(device, rank)} only"
            )
    actual = [(list(shard.shard_offsets), list(shard.shard_sizes)) for shard in shards]
    try:
        computed = _computed_shards(entry.sharding_type, ranks, shape, world)
    except ValueError:
        computed = None
    # A grid is cut by the ranks of a host, which a reader on another machine may not know.
    of_unknown_hosts = (
        entry.sharding_type == ShardingType.GRID_SHARD.value and world.local_world_size is None
    )
    if actual != computed or of_unknown_hosts:
        mapping["shards"] = [{"offset": offset, "size": size} for offset, size in actual]
    return mapping


def _options_to_mapping(where: str, entry: ParameterSharding) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    if entry.key_value_params is not None:
        raise ValueError(f"{where}: a plan file does not hold key_value_params")
    for key in ("enforce_hbm", "stochastic_rounding"):
        if getattr(entry, key) is not None:
            mapping[key] = getattr(entry, key)
    if entry.bounds_check_mode is not None:
        mapping["bounds_check_mode"] = entry.bounds_check_mode.name.lower()
    if entry.output_dtype is not None:
        mapping["output_dtype"] = entry.output_dtype.value
    cache = entry.cache_params
    if cache is not None:
        if cache.stats is not None or cache.multipass_prefetch_config is not None:
            raise ValueError(
                f"{where}: a plan file does not hold cache_params.stats or "
                "cache_params.multipass_prefetch_config"
            )
        values = {
            "algorithm": cache.algorithm and cache.algorithm.name.lower(),
            "load_factor": cache.load_factor,
            "reserved_memory": cache.reserved_memory,
            "precision": cache.precision and cache.precision.value,
            "prefetch_pipeline": cache.prefetch_pipeline,
        }
        mapping["cache_params"] = {k: v for k, v in values.items() if v is not None}
    return mapping


def _options(section: Section) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key in ("enforce_hbm", "stochastic_rounding"):
        if section.has(key):
            options[key] = section.flag(key)
    if section.has("bounds_check_mode"):
        modes = {mode.name.lower(): mode for mode in BoundsCheckMode}
        options["bounds_check_mode"] = modes[section.choice("bounds_check_mode", modes)]
    if section.has("output_dtype"):
        options["output_dtype"] = _dtype(section, "output_dtype")
    if section.has("cache_params"):
        keys = ("algorithm", "load_factor", "reserved_memory", "precision", "prefetch_pipeline")
        cache = Section(section.raw("cache_params"), f"{section.where}, cache_params", keys)
        algorithms = {algorithm.name.lower(): algorithm for algorithm in CacheAlgorithm}
        options["cache_params"] = CacheParams(
            algorithm=(
                algorithms[cache.choice("algorithm", algorithms)]
                if cache.has("algorithm")
                else None
            ),
            load_factor=cache.number("load_factor") if cache.has("load_factor") else None,
            reserved_memory=(
                cache.number("reserved_memory") if cache.has("reserved_memory") else None
            ),
            precision=_dtype(cache, "precision") if cache.has("precision") else None,
            prefetch_pipeline=(
                cache.flag("prefetch_pipeline") if cache.has("prefetch_pipeline") else None
            ),
        )
    return options


def _dtype(section: Section, key: str) -> DataType:
    return DataType(section.choice(key, [dtype.value for dtype in DataType]))


def _shards(entry: ParameterSharding) -> list[ShardMetadata]:
    spec = entry.sharding_spec
    return list(spec.shards) if isinstance(spec, EnumerableShardingSpec) else []
