"""What sharded collections with TT and tiered tables share, pooled and sequence."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    KJTList,
    ShardedEmbeddingModule,
)
from torchrec.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.dist import GroupedKJTListSplitsAwaitable
from ecorec_torchrec.lookup import (
    CoreSlice,
    FusedTTKernel,
    TableCores,
    TieredKernel,
    TTKernel,
    mark_in_backward,
)
from ecorec_torchrec.modules import (
    TTCollection,
    check_features,
    check_ids,
    draw_seed,
    init_table_cores_,
    without_weights,
)
from ecorec_torchrec.tt import TTSpec

from .output_types import check_codecs, settle_output_type
from .shardings import TTSharding, TTTwPooledEmbeddingSharding, TTTwSequenceEmbeddingSharding
from .state import CoreState, add_whole_cores, core_states, take_local_cores
from .tables import check_ranks, describe_tables, limits_of_ids, resolve_tt_tables
from .tiered_rows import TieredRows
from .tiered_tables import resolve_tiered_tables

KernelT = TypeVar("KernelT", bound=BaseEmbedding)


class ShardedTTCollection(ShardedEmbeddingModule):
    """A sharded collection with TT or tiered tables among others; comes before TorchRec's class.

    It holds the cores: registers them under the names that they have unsharded, gives them start
    values, saves and loads them, and stops what TT and tiered tables cannot do.

    Args:
        module: the collection. Cores of one of our collections are kept if they have values; others
            are drawn.
        table_name_to_parameter_sharding: the plan of this collection.
        env: the ranks.
        fused_params: TorchRec's, with `workspace_bytes`, `backend` and `num_dist_groups` on top.
        args, kwargs: as TorchRec's class.

    Raises:
        ValueError: see `resolve_tt_tables` and `resolve_tiered_tables`; an optimizer or setting
            that is not supported.
        NotImplementedError: TT or tiered tables under 2D parallelism.
    """

    _tables_name: str
    """The attribute that holds the tables, by which parameter names begin."""
    _configs_name: str
    """The attribute that holds the table configs."""
    _is_weighted = False

    def __init__(
        self,
        module: nn.Module,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        tt_specs = resolve_tt_tables(module, table_name_to_parameter_sharding)
        tier_specs = resolve_tiered_tables(module, table_name_to_parameter_sharding)
        self._own_tables = [*tt_specs, *tier_specs]
        self._described = describe_tables(tt_specs, tier_specs)
        if self._own_tables and isinstance(env, ShardingEnv2D):
            raise NotImplementedError(
                f"{self._described}: 2D parallelism (DMPCollection) is not supported; use "
                "DistributedModelParallel over all ranks"
            )
        check_ranks(table_name_to_parameter_sharding, tt_specs, env.world_size)
        if tier_specs and module.device.type != "meta":
            warnings.warn(
                f"tiered tables {list(tier_specs)} are held whole by their collection, whose "
                'values are not taken over: make it on device="meta"',
                stacklevel=2,
            )
        self._tt_specs = tt_specs
        self._input_keys: list[str] | None = None
        # Seeds come before TorchRec's own initialisation, which draws numbers for the tables of
        # this rank only: so they do not depend on the placement.
        self._seeds = None if has_cores(module) else {name: draw_seed() for name in tt_specs}
        self.tiered_rows = TieredRows(tier_specs, table_name_to_parameter_sharding, env)
        stock = self._as_stock(module)
        super().__init__(
            stock, table_name_to_parameter_sharding, env, fused_params, *args, **kwargs
        )
        self._settle_output_types()
        self._id_limits = limits_of_ids(
            getattr(self, self._configs_name),
            table_name_to_parameter_sharding,
            self._own_tables,
            fused_params or {},
        )
        self._untrainable = self._tables_without_optimizer()
        if has_cores(module):
            self._copy_cores(module)

    def _as_stock(self, module: nn.Module) -> nn.Module:
        """The collection as TorchRec's constructor is given it."""
        return module

    def _shardings(self) -> Iterable[EmbeddingSharding]:
        """TorchRec's shardings, in the order of the lookups."""
        raise NotImplementedError

    def _embeddings(self, output: Any) -> Iterable[Tensor]:
        """The tensors of an output that carry gradients."""
        raise NotImplementedError

    # Cores and their start values

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        local_cores = self._local_cores()
        tables = getattr(self, self._tables_name)
        self._core_states: list[CoreState] = []
        for name, spec in self._tt_specs.items():
            cores = local_cores.get(name)
            dtype = data_type_to_dtype(self._table_name_to_config[name].data_type)
            tables[name].tt_cores = TableCores(cores or _placeholders(spec, dtype))
            self._core_states += core_states(
                f"{self._tables_name}.{name}",
                spec,
                dtype,
                cores,
                self.module_sharding_plan[name],
                self._env,
            )
        if self._own_tables and not skip_registering:
            self._register_state_dict_hook(_add_own_state)
            self._register_load_state_dict_pre_hook(_take_own_state, with_module=True)

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
        self.tiered_rows.start(list(self._kernels(TieredKernel)), self._file_prefix())

    def _file_prefix(self) -> str:
        """Tables of one name in two collections have files of different names."""
        return f"{self._module_fqn}." if self._module_fqn else ""

    @contextmanager
    def _dense_tables_only(self) -> Iterator[None]:
        """TorchRec's `reset_parameters` expects a `weight` of every table it knows."""
        configs = getattr(self, self._configs_name)
        setattr(self, self._configs_name, [c for c in configs if c.name not in self._own_tables])
        try:
            yield
        finally:
            setattr(self, self._configs_name, configs)

    @torch.no_grad()
    def _copy_cores(self, module: TTCollection) -> None:
        tables = getattr(module, self._tables_name)
        for name, cores in self._local_cores().items():
            if name not in module.tt_specs:  # dense in the collection, TT by the plan
                continue
            for core, source in zip(cores, tables[name].tt_cores, strict=True):
                core.copy_(source)
        self._broadcast_data_parallel()

    def _broadcast_data_parallel(self) -> None:
        group = self._env.process_group
        if group is None:
            return
        for kernel in self._kernels(TTKernel):
            if not isinstance(kernel, FusedTTKernel):
                for flat in kernel.emb_module.flat:
                    dist.broadcast(flat.detach(), dist.get_global_rank(group, 0), group)

    def _kernels(self, kind: type[KernelT]) -> Iterator[KernelT]:
        for lookup in self._lookups:
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            for kernel in lookup._emb_modules:
                if isinstance(kernel, kind):
                    yield kernel

    def _local_cores(self) -> dict[str, list[CoreSlice]]:
        return {
            name: cores
            for kernel in self._kernels(TTKernel)
            for name, cores in kernel.emb_module.tables.items()
        }

    def _settle_output_types(self) -> None:
        """Those of the all-to-alls, which ranks must agree on; where all is dense, TorchRec's."""
        if not self._own_tables:
            return
        for sharding, lookup in zip(self._shardings(), self._lookups, strict=True):
            settle_output_type(sharding, lookup, self._device)
            if isinstance(sharding, TTTwPooledEmbeddingSharding | TTTwSequenceEmbeddingSharding):
                check_codecs(sharding, self._device)

    # Input, and what stops a backward pass

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """As TorchRec's, but the lookup of a dist group waits for the ids of that group only.

        The input is checked first: what is wrong with it would else fail in or after a collective.

        Raises:
            TypeError, ValueError: the input is broken, see `check_features`; an id on the CPU has
                no row; or the features come in another order than in the first batch.
            NotImplementedError: variable batch sizes per feature with TT or tiered tables.
        """
        if not isinstance(features, TensorDict):  # which TorchRec makes a KeyedJaggedTensor
            features = self._checked(features)
        stock = super().input_dist(ctx, features)
        return GroupedKJTListSplitsAwaitable(stock, self._device or torch.device("cpu"))

    def prefetch_rows(self, ids: KJTList) -> None:
        """Starts to bring in the rows of tiered tables of a batch, and waits for its ids only.

        Args:
            ids: as the input dist gives them, which are to be looked up later.
        """
        for group, lookup in enumerate(self._lookups):
            if getattr(lookup, "has_tiered_tables", False):
                lookup.prefetch_rows(ids[group])

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        names = [name for c in getattr(self, self._configs_name) for name in c.feature_names]
        features = check_features(features, names, self._is_weighted)
        if self._own_tables and features.variable_stride_per_key():
            raise NotImplementedError(
                f"{self._described}: variable batch sizes per feature are not "
                "supported; give all features one batch size"
            )
        if self._own_tables and not self._is_weighted:
            features = without_weights(features)
        check_ids(features, self._id_limits)
        if self._input_keys is None:
            self._input_keys = list(features.keys())
        elif self._input_keys != features.keys():
            raise ValueError(
                f"features must come in the order of the first batch, {self._input_keys}, got "
                f"{features.keys()}"
            )
        return features

    def _tables_without_optimizer(self) -> list[str]:
        """Of all ranks, since all of them must stop together."""
        found = {
            table.name
            for sharding in self._shardings()
            if isinstance(sharding, TTSharding)
            and not isinstance(sharding, BaseDpEmbeddingSharding)
            for table in sharding.embedding_tables()
            if table.compute_kernel is EmbeddingComputeKernel.CUSTOMIZED_KERNEL
            and table.fused_params["optimizer"] is None
        }
        return [name for name in self._own_tables if name in found]

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        return self._watched(ctx, super().compute_and_output_dist(ctx, input))

    def output_dist(self, ctx: Any, output: list[Tensor]) -> LazyAwaitable[Any]:
        return self._watched(ctx, super().output_dist(ctx, output))

    def _watched(self, ctx: Any, awaitable: LazyAwaitable[Any]) -> LazyAwaitable[Any]:
        """Without an optimizer evaluation works; a backward pass stops at once, on every rank."""
        if torch.is_grad_enabled():
            self.tiered_rows.count_update()
        if self._untrainable:
            awaitable.callbacks.append(self._refuse_backward)
        return awaitable

    def _refuse_backward(self, output: Any) -> Any:
        untrainable = describe_tables(
            [name for name in self._untrainable if name in self._tt_specs],
            [name for name in self._untrainable if name in self.tiered_rows.specs],
        )

        def refuse(_: Tensor) -> None:
            raise ValueError(
                f"{untrainable} have no optimizer, so training would leave them as "
                'they are: give fused_params={"optimizer": .., "learning_rate": ..} to the '
                "sharder, or use apply_optimizer_in_backward"
            )

        for embeddings in self._embeddings(output):
            if embeddings.requires_grad:
                embeddings.register_hook(refuse)
        return output


def has_cores(module: nn.Module) -> TypeGuard[TTCollection]:
    """Whether a collection holds TT cores with values."""
    return isinstance(module, TTCollection) and module._device.type != "meta"


def _placeholders(spec: TTSpec, dtype: torch.dtype) -> list[nn.Parameter]:
    """What a rank shows of another rank's table, as TorchRec does: names must not differ."""
    placeholders = [nn.Parameter(torch.empty(0, dtype=dtype)) for _ in spec.core_shapes]
    mark_in_backward(placeholders, EmptyFusedOptimizer())
    return placeholders


def _add_own_state(
    module: ShardedTTCollection,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    add_whole_cores(module._core_states, destination, prefix)
    for table in module.tiered_rows.specs:
        destination[_version_key(module, prefix, table)] = module.tiered_rows.version()


def _take_own_state(
    module: ShardedTTCollection,
    state_dict: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    for table in module.tiered_rows.specs:
        key = _version_key(module, prefix, table)
        if key in state_dict:
            module.tiered_rows.check_version(table, state_dict.pop(key))
        elif strict:
            missing_keys.append(key)
    take_local_cores(module._core_states, state_dict, prefix)


def _version_key(module: ShardedTTCollection, prefix: str, table: str) -> str:
    return f"{prefix}{module._tables_name}.{table}.row_version"
