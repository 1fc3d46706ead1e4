"""Plan entries of tiered tables: in memory, as generators, and in plan files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType

from ecorec_torchrec.tiers import TierSpec

from .entries import TT_COMPUTE_KERNEL, GroupedParameterSharding
from .yaml_text import Section

TIERED_COMPUTE_KERNEL = TT_COMPUTE_KERNEL
"""TorchRec has one name for all kernels that are not its own; the type of the entry tells more."""
TIERED_SHARDING_TYPES = (ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value)
WHY_TIERED_IS_NOT_CUT = (
    "a tiered table is table_wise or row_wise: replicas would each need a file of their own, and a "
    "row cut by columns would lie in several"
)
_COLUMNS_MULTIPLE = 4  # FBGEMM's
_KEYS = tuple(field.name for field in fields(TierSpec))


@dataclass
class TieredParameterSharding(GroupedParameterSharding):
    """Plan entry of a tiered table: a `ParameterSharding` that carries its memories.

    Args:
        dist_group: see `GroupedParameterSharding`.
        tiers: the memories under every shard of the table; each shard has `cache_rows` slots.

    Raises:
        TypeError: `tiers` is not a `TierSpec`.

    Example::

        tiers = TierSpec(cache_rows=100_000, folder="/nvme/tables")
        entry = TieredParameterSharding(
            "table_wise", TIERED_COMPUTE_KERNEL, ranks=[1], sharding_spec=spec, tiers=tiers
        )
    """

    tiers: TierSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tiers, TierSpec):
            raise TypeError(f"a tiered table needs a TierSpec, got tiers={self.tiers!r}")

    def get_additional_fused_params(self) -> dict[str, Any]:
        """What TorchRec hands on to the compute kernel beside the sharder's `fused_params`."""
        return {"tiers": self.tiers}


def tiers_of(entry: ParameterSharding) -> TierSpec | None:
    """The memories of a tiered table; None for the entry of another one."""
    return entry.tiers if isinstance(entry, TieredParameterSharding) else None


def is_tt(entry: ParameterSharding) -> bool:
    """Whether a plan entry asks for TT cores."""
    return entry.compute_kernel == TT_COMPUTE_KERNEL and tiers_of(entry) is None


def why_rows_are_not_tiered(dtype: torch.dtype, embedding_dim: int) -> str | None:
    """Why rows of this kind cannot be moved exactly; None if they can."""
    if dtype is not torch.float32:
        return (
            f"data_type {str(dtype)[6:]} is not supported: FBGEMM rounds 16-bit weights at random, "
            "by the place they lie in"
        )
    if embedding_dim % _COLUMNS_MULTIPLE:
        return (
            f"embedding_dim={embedding_dim} is not a multiple of {_COLUMNS_MULTIPLE}, which "
            "FBGEMM's tables need"
        )
    return None


def tiered_table_wise(
    rank: int, *, tiers: TierSpec, device: str | None = None
) -> ParameterShardingGenerator:
    """A tiered table that one rank holds, for `construct_module_sharding_plan`.

    The tiered counterpart of `torchrec.distributed.sharding_plan.table_wise`.

    Args:
        rank: the owner.
        tiers: the memories under the table.
        device: device type of the slots, as for `table_wise`.

    Raises:
        ValueError: (by the generator) `rank` is outside the world, or the sharder is not of an
            embedding (bag) collection.

    Example::

        tiers = TierSpec(cache_rows=100_000, folder="/nvme/tables", prefetch_batches=2)
        plan = construct_module_sharding_plan(
            ebc, {"users": tiered_table_wise(1, tiers=tiers), "genders": data_parallel()}
        )
    """

    def stock(world_size: int) -> ParameterShardingGenerator:
        if not 0 <= rank < world_size:
            raise ValueError(f"tiered_table_wise: rank={rank} is not within 0..{world_size - 1}")
        return table_wise(rank, device=device, compute_kernel=TIERED_COMPUTE_KERNEL)

    return _tiered_generator(stock, tiers)


def tiered_row_wise(*, tiers: TierSpec) -> ParameterShardingGenerator:
    """A tiered table cut by rows over all ranks, for `construct_module_sharding_plan`.

    The tiered counterpart of `torchrec.distributed.sharding_plan.row_wise`.

    Args:
        tiers: the memories under the shard of every rank; `folder` is that of the rank's host.

    Raises:
        ValueError: (by the generator) the sharder is not of an embedding (bag) collection.

    Example::

        plan = construct_module_sharding_plan(ebc, {"users": tiered_row_wise(tiers=tiers)})
    """
    return _tiered_generator(lambda _: row_wise(compute_kernel=TIERED_COMPUTE_KERNEL), tiers)


def _tiered_generator(
    stock: Callable[[int], ParameterShardingGenerator], tiers: TierSpec
) -> ParameterShardingGenerator:
    """What `stock` gives for a world of that size, as the entry of a tiered table."""

    def generator(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[nn.Module],
    ) -> ParameterSharding:
        if not isinstance(sharder, EmbeddingBagCollectionSharder | EmbeddingCollectionSharder):
            raise ValueError(
                f"{type(sharder).__name__} cannot shard tiered tables: give them an embedding "
                "(bag) collection of their own in the model"
            )
        entry = stock(world_size)(param, local_size, world_size, device_type, sharder)
        return TieredParameterSharding(**vars(entry), tiers=tiers)

    return generator


def tiers_to_mapping(tiers: TierSpec) -> dict[str, Any]:
    """What a plan file says about the memories: all that is not the default."""
    return {
        field.name: getattr(tiers, field.name)
        for field in fields(TierSpec)
        if getattr(tiers, field.name) != field.default
    }


def tiers_from_section(section: Section) -> TierSpec:
    """The `tiers` of one table of a plan file.

    Raises:
        ValueError: they are missing, or a key or value is wrong.
    """
    tiers = Section(section.raw("tiers"), f"{section.where}, tiers", _KEYS)
    values = {name: tiers.raw(name) for name in tiers.names()}
    for name in ("cache_rows", "folder"):
        tiers.raw(name)  # without them there is no table
    try:
        return TierSpec(**values)
    except (TypeError, ValueError) as error:
        raise tiers.error(str(error)) from error
