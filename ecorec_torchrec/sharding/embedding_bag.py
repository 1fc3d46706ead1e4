"""Sharded pooled collections with TT tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    PoolingType,
    data_type_to_dtype,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ecorec_torchrec.lookup import (
    TT_ONLY_SETTINGS,
    BatchedFusedTTEmbeddingBag,
    BatchedTTEmbeddingBag,
    CoreSlice,
    TableCores,
    TTSettings,
    mark_in_backward,
)
from ecorec_torchrec.modules import (
    TTEmbeddingBagCollection,
    check_features,
    draw_seed,
    init_table_cores_,
)
from ecorec_torchrec.plan import TT_COMPUTE_KERNEL
from ecorec_torchrec.tt import TTSpec

from .dist_groups import NUM_DIST_GROUPS, split_dist_groups
from .pooled import TTDpPooledEmbeddingSharding, TTTwPooledEmbeddingSharding
from .state import CoreState, add_whole_cores, core_states, take_local_cores
from .tables import (
    TablesView,
    check_data_parallel,
    check_output_types,
    check_ranks,
    resolve_tt_tables,
    warn_of_frozen,
)

_ROW_CUT = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class ShardedTTEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A `ShardedEmbeddingBagCollection` some of whose tables are TT, table-wise or data-parallel.

    Dense tables keep every sharding TorchRec has and share its all-to-alls with the TT ones. The
    cores of a TT table are `embedding_bags.<table>.tt_cores.<k>`, as in the unsharded
    `TTEmbeddingBagCollection`: table-wise ones on their owner, stepped in the backward pass by the
    optimizer of `fused_params`; data-parallel ones on every rank, for the user's own optimizer.

    Args:
        module: the collection; a stock `EmbeddingBagCollection` is best on the meta device. Cores
            of a `TTEmbeddingBagCollection` are kept if they have values; others are drawn.
        table_name_to_parameter_sharding: the plan of this collection.
        env: the ranks.
        fused_params: TorchRec's, with `workspace_bytes`, `backend` and `num_dist_groups` on top.
        device: of the parameters.
        qcomm_codecs_registry: quantised communication, as in TorchRec.
        module_fqn: name of the collection, used in events.
        sharded_module_order_overwrite: as in TorchRec.

    Raises:
        ValueError: see `resolve_tt_tables`; an optimizer or setting that is not supported.
        NotImplementedError: TT tables under 2D parallelism.
    """

    _embedding_bag_configs: list[EmbeddingBagConfig]

    def __init__(
        self,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
    ) -> None:
        tt_specs = resolve_tt_tables(module, table_name_to_parameter_sharding)
        if tt_specs and isinstance(env, ShardingEnv2D):
            raise NotImplementedError(
                f"TT tables {list(tt_specs)}: 2D parallelism is not supported"
            )
        check_ranks(table_name_to_parameter_sharding, tt_specs, env.world_size)
        self._tt_specs = tt_specs
        self._input_keys: list[str] | None = None
        # Seeds come before TorchRec's own initialisation, which draws numbers for the tables of
        # this rank only: so they do not depend on the placement.
        self._seeds = None if _has_cores(module) else {name: draw_seed() for name in tt_specs}
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
            module_fqn,
            sharded_module_order_overwrite,
        )
        self._untrainable = self._tables_without_optimizer()
        self._late_mean_D = self._columns_averaged_late()
        if _has_cores(module):
            self._copy_cores(module)

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        specs = resolve_tt_tables(module, table_name_to_parameter_sharding)
        fused_params = dict(fused_params or {})
        num_dist_groups = fused_params.pop(NUM_DIST_GROUPS, 1)
        infos_by_type = super().create_grouped_sharding_infos(
            TablesView(module, table_name_to_parameter_sharding),
            table_name_to_parameter_sharding,
            prefix,
            fused_params,
            suffix,
        )
        for sharding_type, infos in infos_by_type.items():
            data_parallel = sharding_type == ShardingType.DATA_PARALLEL.value
            for info in infos:
                table = info.embedding_config.name
                if table in specs:
                    if data_parallel:
                        check_data_parallel(table, info.param)
                    info.fused_params = TTSettings.from_fused_params(
                        table, specs[table], info.fused_params, data_parallel
                    ).as_fused_params()
                else:
                    warn_of_frozen(info)
                    info.fused_params = {
                        name: value
                        for name, value in info.fused_params.items()
                        if name not in TT_ONLY_SETTINGS
                    }
        check_output_types(infos_by_type, specs.keys())
        return split_dist_groups(infos_by_type, num_dist_groups)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding:
        entries = [info.param_sharding for info in sharding_infos]
        if all(entry.compute_kernel != TT_COMPUTE_KERNEL for entry in entries):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if entries[0].sharding_type == ShardingType.DATA_PARALLEL.value:
            return TTDpPooledEmbeddingSharding(sharding_infos, env, device)
        assert entries[0].sharding_type == ShardingType.TABLE_WISE.value
        return TTTwPooledEmbeddingSharding(
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        local_cores = self._local_cores()
        self._core_states: list[CoreState] = []
        for name, spec in self._tt_specs.items():
            cores = local_cores.get(name)
            dtype = data_type_to_dtype(self._table_name_to_config[name].data_type)
            self.embedding_bags[name].tt_cores = TableCores(cores or _placeholders(spec, dtype))
            self._core_states += core_states(
                f"embedding_bags.{name}",
                spec,
                dtype,
                cores,
                self.module_sharding_plan[name],
                self._env,
            )
        if self._tt_specs and not skip_registering:
            self._register_state_dict_hook(_add_whole_cores)
            self._register_load_state_dict_pre_hook(_take_local_cores, with_module=True)

    def reset_parameters(self) -> None:
        """Draws start values as the table configs ask; equal random state gives equal cores."""
        seeds = self._seeds or {name: draw_seed() for name in self._tt_specs}
        self._seeds = None
        with self._dense_tables_only():
            super().reset_parameters()
        if self._device is not None and self._device.type == "meta":
            return
        for name, cores in self._local_cores().items():
            config = self._table_name_to_config[name]
            init_table_cores_(cores, self._tt_specs[name], config, seeds[name])
        self._broadcast_data_parallel()

    @contextmanager
    def _dense_tables_only(self) -> Iterator[None]:
        """TorchRec's `reset_parameters` expects a `weight` of every table it knows."""
        configs = self._embedding_bag_configs
        self._embedding_bag_configs = [c for c in configs if c.name not in self._tt_specs]
        try:
            yield
        finally:
            self._embedding_bag_configs = configs

    @torch.no_grad()
    def _copy_cores(self, module: TTEmbeddingBagCollection) -> None:
        for name, cores in self._local_cores().items():
            if name not in module.tt_specs:  # dense in the collection, TT by the plan
                continue
            for core, source in zip(cores, module.embedding_bags[name].tt_cores, strict=True):
                core.copy_(source)
        self._broadcast_data_parallel()

    def _broadcast_data_parallel(self) -> None:
        group = self._env.process_group
        if group is None:
            return
        for kernel in self._tt_kernels():
            if not isinstance(kernel, BatchedFusedTTEmbeddingBag):
                for flat in kernel.emb_module.flat:
                    dist.broadcast(flat.detach(), dist.get_global_rank(group, 0), group)

    def _tt_kernels(self) -> Iterator[BatchedTTEmbeddingBag]:
        for lookup in self._lookups:
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            for kernel in lookup._emb_modules:
                if isinstance(kernel, BatchedTTEmbeddingBag):
                    yield kernel

    def _local_cores(self) -> dict[str, list[CoreSlice]]:
        return {
            name: cores
            for kernel in self._tt_kernels()
            for name, cores in kernel.emb_module.tables.items()
        }

    def _tables_without_optimizer(self) -> list[str]:
        return [
            info.embedding_config.name
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
            if info.embedding_config.name in self._tt_specs
            and info.param_sharding.sharding_type == ShardingType.TABLE_WISE.value
            and info.fused_params["optimizer"] is None
        ]

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """As TorchRec's, after checks that would else fail within or after a collective.

        Raises:
            TypeError, ValueError: the input is broken, see `check_features`; or its features come
                in another order than in the first batch.
            NotImplementedError: variable batch sizes per feature with TT tables.
        """
        if not isinstance(features, TensorDict):  # which TorchRec makes a KeyedJaggedTensor
            features = self._checked(features)
        awaitable = super().input_dist(ctx, features)
        if ctx.divisor is not None:
            ctx.divisor = torch.where(self._late_mean_D, ctx.divisor, 1.0)
        return awaitable

    def _columns_averaged_late(self) -> Tensor:
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

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        names = [name for c in self._embedding_bag_configs for name in c.feature_names]
        features = check_features(features, names, self._is_weighted)
        if self._tt_specs and features.variable_stride_per_key():
            raise NotImplementedError(
                f"TT tables {list(self._tt_specs)}: variable batch sizes per feature are not "
                "supported"
            )
        if self._input_keys is None:
            self._input_keys = list(features.keys())
        elif self._input_keys != features.keys():
            raise ValueError(
                f"features must come in the order of the first batch, {self._input_keys}, got "
                f"{features.keys()}"
            )
        return features

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        return self._guarded(super().compute_and_output_dist(ctx, input))

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        return self._guarded(super().output_dist(ctx, output))

    def _guarded(self, awaitable: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        """Without an optimizer evaluation works; a backward pass stops at once, on every rank."""
        if self._untrainable:
            awaitable.callbacks.append(self._refuse_backward)
        return awaitable

    def _refuse_backward(self, pooled: KeyedTensor) -> KeyedTensor:
        def refuse(_: Tensor) -> None:
            raise ValueError(
                f"TT tables {self._untrainable} have no optimizer, so training would leave them as "
                'they are: give fused_params={"optimizer": .., "learning_rate": ..} to the '
                "sharder, or use apply_optimizer_in_backward"
            )

        if pooled.values().requires_grad:
            pooled.values().register_hook(refuse)
        return pooled

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        if self._tt_specs:
            raise NotImplementedError(
                f"TT tables {list(self._tt_specs)}: resharding while training is not supported; "
                "save a checkpoint and load it into a model with the new plan"
            )
        super().update_shards(changed_sharding_params, env, device)


def _placeholders(spec: TTSpec, dtype: torch.dtype) -> list[nn.Parameter]:
    """What a rank shows of another rank's table, as TorchRec does: names must not differ."""
    placeholders = [nn.Parameter(torch.empty(0, dtype=dtype)) for _ in spec.core_shapes]
    mark_in_backward(placeholders, EmptyFusedOptimizer())
    return placeholders


def _has_cores(module: EmbeddingBagCollectionInterface) -> bool:
    return isinstance(module, TTEmbeddingBagCollection) and module.device.type != "meta"


def _add_whole_cores(
    module: ShardedTTEmbeddingBagCollection,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    add_whole_cores(module._core_states, destination, prefix)


def _take_local_cores(
    module: ShardedTTEmbeddingBagCollection, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    take_local_cores(module._core_states, state_dict, prefix)
