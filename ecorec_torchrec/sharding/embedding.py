"""Sharded sequence collections with TT tables."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ecorec_torchrec.dist import sharding_type_of
from ecorec_torchrec.plan import TT_COMPUTE_KERNEL

from .infos import check_fbgemm_optimizers, settle_infos
from .shardings import (
    TieredRwSequenceEmbeddingSharding,
    TTDpSequenceEmbeddingSharding,
    TTSharding,
    TTTwSequenceEmbeddingSharding,
)
from .tables import TablesView, resolve_tt_tables
from .tiered_tables import resolve_tiered_tables
from .tt_collection import ShardedTTCollection


class ShardedTTEmbeddingCollection(ShardedTTCollection, ShardedEmbeddingCollection):
    """A `ShardedEmbeddingCollection` some of whose tables are TT, table-wise or data-parallel.

    The sequence counterpart of `ShardedTTEmbeddingBagCollection`: cores are named
    `embeddings.<table>.tt_cores.<k>`, dense tables keep every sharding TorchRec has, and, as in
    TorchRec, a collection that has values keeps those of its dense tables too. For arguments and
    errors see `ShardedTTCollection`.

    `use_index_dedup` is TorchRec's: the ids of a feature are made unique before they travel, so
    that each row travels once, and so does its gradient. It works on the CPU too.
    """

    _tables_name = "embeddings"
    _configs_name = "_embedding_configs"
    _embedding_configs: list[EmbeddingConfig]
    _use_index_dedup: bool
    _use_gather_select_per_sharding: dict[str, bool] | None

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, *args, **kwargs)
        per_type = self._use_gather_select_per_sharding or {}
        self._use_gather_select_per_sharding = {
            key: per_type[sharding_type_of(key)]
            for key in self._sharding_types
            if sharding_type_of(key) in per_type
        }
        if module.device.type != "meta":
            dense = [
                f"embeddings.{n}.weight" for n in self._table_names if n not in self._own_tables
            ]
            values = module.state_dict()
            self.load_state_dict({name: values[name] for name in dense}, strict=False)

    def _as_stock(self, module: EmbeddingCollection) -> EmbeddingCollection:
        """Without values: TorchRec would load a `weight` of every table, which TT ones lack."""
        shallow = copy.copy(module)
        shallow._device = torch.device("meta")
        return shallow

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: nn.Module,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        fused_params: dict[str, Any] | None,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        plan = table_name_to_parameter_sharding
        specs = resolve_tt_tables(module, plan)
        infos = super().create_grouped_sharding_infos(TablesView(module, plan), plan, fused_params)
        return settle_infos(infos, specs, resolve_tiered_tables(module, plan))

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding:
        check_fbgemm_optimizers(sharding_infos, device)
        sharding_type = sharding_type_of(sharding_type)
        kernels = [info.param_sharding.compute_kernel for info in sharding_infos]
        if TT_COMPUTE_KERNEL not in kernels:
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return TTDpSequenceEmbeddingSharding(sharding_infos, env, device)
        by_type: dict[str, type[TTSharding]] = {
            ShardingType.TABLE_WISE.value: TTTwSequenceEmbeddingSharding,
            ShardingType.ROW_WISE.value: TieredRwSequenceEmbeddingSharding,
        }
        return by_type[sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def _shardings(self) -> Iterable[EmbeddingSharding]:
        return self._sharding_type_to_sharding.values()

    def _embeddings(self, output: dict[str, JaggedTensor]) -> Iterable[Tensor]:
        return [feature.values() for feature in output.values()]

    # TorchRec cannot shape the lengths of a batch without examples, as a rank's last one may be: it
    # is given one example without ids, which is dropped from the output.

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        ctx.without_examples = isinstance(features, KeyedJaggedTensor) and features.stride() == 0
        return super().input_dist(ctx, features)

    def _dedup_indices(
        self, ctx: EmbeddingCollectionContext, input_feature_splits: list[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        """As TorchRec's; FBGEMM has no kernel for it on the CPU."""
        if self._device is None or self._device.type != "cpu":
            return super()._dedup_indices(ctx, input_feature_splits)
        unique = [unique_ids(features) for features in input_feature_splits]
        ctx.input_features += input_feature_splits
        ctx.reverse_indices += [place_of_id_L for _, place_of_id_L in unique]
        return [features for features, _ in unique]

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        features = super()._checked(features)
        if features.stride() > 0:
            return features
        return KeyedJaggedTensor(
            features.keys(),
            features.values(),
            features.weights_or_none(),
            lengths=features.lengths().new_zeros(len(features.keys())),
            stride=1,
        )

    def _watched(
        self, ctx: EmbeddingCollectionContext, awaitable: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        awaitable = super()._watched(ctx, awaitable)
        if ctx.without_examples:
            awaitable.callbacks.append(_without_examples)
        return awaitable

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        return super()._embedding_dim_for_sharding_type(sharding_type_of(sharding_type))


def unique_ids(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """Every id of a feature once, and the place of every id among them.

    Which example the unique ids belong to has no meaning any more: they lie in the first.

    Example::

        features = KeyedJaggedTensor(["f", "g"], tensor([7, 3, 7, 7]), lengths=tensor([1, 2, 0, 1]))
        unique_ids(features)  # ids [3, 7, 7] of lengths [2, 0, 1, 0]; places [1, 0, 1, 2]
    """
    counts, ids, places = [], [], []
    start = 0
    for values_L in features.values().split(features.length_per_key()):
        unique_U, place_of_id_L = values_L.unique(return_inverse=True)
        ids.append(unique_U)
        places.append(place_of_id_L + start)
        counts.append(len(unique_U))
        start += len(unique_U)
    lengths = features.lengths().new_zeros(len(counts), features.stride())
    lengths[:, 0] = torch.tensor(counts)
    unique = KeyedJaggedTensor(features.keys(), torch.cat(ids), lengths=lengths.flatten())
    return unique, torch.cat(places)


def _without_examples(output: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {
        name: JaggedTensor(rows.values(), rows.weights_or_none(), rows.lengths()[:0])
        for name, rows in output.items()
    }
