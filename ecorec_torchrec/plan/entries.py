"""Plan entries: how one table-wise or data-parallel TT table is written in a TorchRec plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType

from ecorec_torchrec.tt import TTSpec

TT_COMPUTE_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
TT_SHARDING_TYPES = (ShardingType.TABLE_WISE.value, ShardingType.DATA_PARALLEL.value)
WHY_TT_IS_NOT_CUT = (
    "a TT table is table_wise or data_parallel: cutting it by rows or columns would slice one core "
    "and replicate the others, whose gradients row- and column-wise sharding do not add up"
)


@dataclass
class GroupedParameterSharding(ParameterSharding):
    """Plan entry that may say in which dist group the ids and outputs of its table travel.

    Args:
        dist_group: the group, from 0, in the order in which groups are looked up; None leaves it
            to the sharder's `num_dist_groups`. See `in_dist_group`.

    Raises:
        TypeError: `dist_group` is not an integer.
        ValueError: `dist_group` is negative.
    """

    dist_group: int | None = None

    def __post_init__(self) -> None:
        check_dist_group(self.dist_group)


def check_dist_group(dist_group: int | None) -> None:
    """Raises TypeError or ValueError if it is neither None nor an integer from 0 on."""
    if dist_group is None:
        return
    if type(dist_group) is not int:
        raise TypeError(f"dist_group must be an integer, got {dist_group!r}")
    if dist_group < 0:
        raise ValueError(f"dist_group={dist_group} must be at least 0")


@dataclass
class TTParameterSharding(GroupedParameterSharding):
    """Plan entry of a TT table: a `ParameterSharding` that carries the shape of the cores.

    Args:
        dist_group: see `GroupedParameterSharding`.
        tt: shape of the table; None leaves it to the table's config (`TTEmbeddingBagConfig.tt`,
            `TTEmbeddingConfig.tt`) or to the `tt=` argument of its collection.

    Example::

        spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (16, 16))
        entry = TTParameterSharding(
            "data_parallel", TT_COMPUTE_KERNEL, ranks=[0, 1], tt=spec
        )
        ShardingPlan({"ebc": EmbeddingModuleShardingPlan({"users": entry})})
    """

    tt: TTSpec | None = None

    def get_additional_fused_params(self) -> dict[str, Any]:
        """What TorchRec hands on to the compute kernel beside the sharder's `fused_params`."""
        return {} if self.tt is None else {"tt": self.tt}


def tt_table_wise(
    rank: int, *, tt: TTSpec | None = None, device: str | None = None
) -> ParameterShardingGenerator:
    """A TT table whose cores live on one rank, for `construct_module_sharding_plan`.

    The TT counterpart of `torchrec.distributed.sharding_plan.table_wise`.

    Args:
        rank: the owner.
        tt: shape of the table; None leaves it to the table's config.
        device: device type of the placement, as for `table_wise`.

    Raises:
        ValueError: (by the generator) `rank` is outside the world, `tt` has another number of rows
            or columns than the table, or the sharder is not of an embedding (bag) collection.

    Example::

        plan = construct_module_sharding_plan(
            ebc, {"users": tt_table_wise(1, tt=spec), "genders": data_parallel()}
        )
    """
    stock = table_wise(rank, device=device, compute_kernel=TT_COMPUTE_KERNEL)
    return _tt_generator(stock, tt, owner=rank)


def tt_data_parallel(*, tt: TTSpec | None = None) -> ParameterShardingGenerator:
    """A TT table whose cores are replicated on every rank, for `construct_module_sharding_plan`.

    The TT counterpart of `torchrec.distributed.sharding_plan.data_parallel`; the gradients of the
    cores are averaged over ranks by `DistributedDataParallel`.

    Args:
        tt: shape of the table; None leaves it to the table's config.

    Raises:
        ValueError: (by the generator) `tt` has another number of rows or columns than the table, or
            the sharder is not of an embedding (bag) collection.

    Example::

        plan = construct_module_sharding_plan(ebc, {"users": tt_data_parallel(tt=spec)})
    """
    return _tt_generator(data_parallel(), tt)


def in_dist_group(
    dist_group: int, generator: ParameterShardingGenerator
) -> ParameterShardingGenerator:
    """The table of `generator`, dense or TT, in a dist group of its plan's choice.

    The groups of a sharding type are looked up in the order of their numbers, and each travels
    while the next is looked up. Groups need not have tables on every rank.

    Args:
        dist_group: from 0.
        generator: places the table, such as `table_wise(0)` or `tt_table_wise(1, tt=spec)`.

    Raises:
        TypeError, ValueError: (by the generator) see `GroupedParameterSharding`.

    Example::

        construct_module_sharding_plan(
            ebc,
            {
                "genders": in_dist_group(0, table_wise(rank=1, compute_kernel="fused")),
                "users": in_dist_group(1, tt_table_wise(1, tt=spec)),
            },
        )
    """

    def grouped(*args: Any, **kwargs: Any) -> ParameterSharding:
        return with_dist_group(generator(*args, **kwargs), dist_group)

    return grouped


def with_dist_group(entry: ParameterSharding, dist_group: int) -> GroupedParameterSharding:
    """The entry with its table in that group."""
    if isinstance(entry, GroupedParameterSharding):
        return replace(entry, dist_group=dist_group)
    return GroupedParameterSharding(**vars(entry), dist_group=dist_group)


def _tt_generator(
    stock: ParameterShardingGenerator, tt: TTSpec | None, owner: int = 0
) -> ParameterShardingGenerator:
    """`stock`, whose entries become those of a TT table."""

    def generator(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[nn.Module],
    ) -> ParameterSharding:
        if not isinstance(sharder, EmbeddingBagCollectionSharder | EmbeddingCollectionSharder):
            raise ValueError(
                f"{type(sharder).__name__} cannot shard TT tables: give them an embedding (bag) "
                "collection of their own in the model"
            )
        if not 0 <= owner < world_size:
            raise ValueError(f"tt_table_wise: rank={owner} is not within 0..{world_size - 1}")
        if tt is not None and tuple(param.shape) != (tt.num_embeddings, tt.embedding_dim):
            raise ValueError(
                f"the TT shape is of {tt.num_embeddings} rows x {tt.embedding_dim} columns, "
                f"the table is of {param.shape[0]} x {param.shape[1]}"
            )
        entry = stock(param, local_size, world_size, device_type, sharder)
        return TTParameterSharding(**{**vars(entry), "compute_kernel": TT_COMPUTE_KERNEL}, tt=tt)

    return generator
