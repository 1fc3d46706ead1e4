"""Sharded pooled collections with TT tables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
    replace_placement_with_meta_device,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ecorec_torchrec.plan import TT_COMPUTE_KERNEL

from .infos import check_fbgemm_optimizers, settle_infos
from .shardings import (
    TieredRwPooledEmbeddingSharding,
    TTDpPooledEmbeddingSharding,
    TTSharding,
    TTTwPooledEmbeddingSharding,
)
from .tables import TablesView, resolve_tt_tables
from .tiered_tables import resolve_tiered_tables
from .tt_collection import ShardedTTCollection

_ROW_CUT = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class ShardedTTEmbeddingBagCollection(ShardedTTCollection, ShardedEmbeddingBagCollection):
    """A `ShardedEmbeddingBagCollection` some of whose tables are TT, table-wise or data-parallel.

    Dense tables keep every sharding TorchRec has and share its all-to-alls with the TT ones. The
    cores of a TT table are `embedding_bags.<table>.tt_cores.<k>`, as in the unsharded
    `TTEmbeddingBagCollection`: table-wise ones on their owner, stepped in the backward pass by the
    optimizer of `fused_params`; data-parallel ones on every rank, for the user's own optimizer.
    A stock `EmbeddingBagCollection` is best on the meta device. For arguments and errors see
    `ShardedTTCollection`.
    """

    _tables_name = "embedding_bags"
    _configs_name = "_embedding_bag_configs"
    _embedding_bag_configs: list[EmbeddingBagConfig]

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: nn.Module,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        plan = table_name_to_parameter_sharding
        specs = resolve_tt_tables(module, plan)
        view = TablesView(module, plan)
        infos = super().create_grouped_sharding_infos(view, plan, prefix, fused_params, suffix)
        return settle_infos(infos, specs, resolve_tiered_tables(module, plan))

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding:
        check_fbgemm_optimizers(sharding_infos, device)
        entries = [info.param_sharding for info in sharding_infos]
        if TT_COMPUTE_KERNEL not in [entry.compute_kernel for entry in entries]:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            replace_placement_with_meta_device(sharding_infos)
        if entries[0].sharding_type == ShardingType.DATA_PARALLEL.value:
            return TTDpPooledEmbeddingSharding(sharding_infos, env, device)
        by_type: dict[str, type[TTSharding]] = {
            ShardingType.TABLE_WISE.value: TTTwPooledEmbeddingSharding,
            ShardingType.ROW_WISE.value: TieredRwPooledEmbeddingSharding,
        }
        return by_type[entries[0].sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def _shardings(self) -> Iterable[EmbeddingSharding]:
        return self._embedding_shardings

    def _embeddings(self, output: KeyedTensor) -> Iterable[Tensor]:
        return [output.values()]

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        awaitable = super().input_dist(ctx, features)
        if ctx.divisor is not None:
            ctx.divisor = torch.where(self._late_mean_columns, ctx.divisor, 1.0)
        return awaitable

    @cached_property
    def _late_mean_columns(self) -> Tensor:
        """Columns of the output that are sums of row-wise shards still to be made means.

        TorchRec divides all columns as soon as one table is row-wise with mean pooling; those of
        other tables are means or sums already.
        """
        late = {
            name
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
            if info.param_sharding.sharding_type in _ROW_CUT
            and info.embedding_config.pooling is PoolingType.MEAN
            for name in info.embedding_config.embedding_names
        }
        columns = zip(self._embedding_names, self._embedding_dims, strict=True)
        marks = [name in late for name, dim in columns for _ in range(dim)]
        return torch.tensor(marks, device=self._device)

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        if self._own_tables:
            raise NotImplementedError(
                f"{self._described}: resharding while training is not supported; "
                "save a checkpoint and load it into a model with the new plan"
            )
        super().update_shards(changed_sharding_params, env, device)
