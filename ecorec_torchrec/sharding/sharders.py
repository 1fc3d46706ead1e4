"""The sharders to hand to `DistributedModelParallel` and to planners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from ecorec_torchrec.dist import DIST_GROUPS, DistGroups
from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingCollection
from ecorec_torchrec.plan import tiers_of
from ecorec_torchrec.plan.tables import core_specs

from .embedding import ShardedTTEmbeddingCollection
from .embedding_bag import ShardedTTEmbeddingBagCollection
from .tables import TablesView, describe_tables, tt_table_names
from .tt_collection import ShardedTTCollection


class TTCollectionSharder(BaseEmbeddingSharder[nn.Module]):
    """What the sharders of pooled and sequence collections share; comes before TorchRec's class.

    `DistributedModelParallel` looks sharders up by the exact type of a module, so a stock
    collection and ours need an instance each: see `get_ecorec_sharders`.

    Raises:
        TypeError, ValueError: `num_dist_groups` or `dist_group_slope`, see `DistGroups`.
    """

    shards_tt_tables = True
    """Asked by `EcoRecPlanner`. TT is not in `compute_kernels`, where TorchRec's planner, which has
    no cost model for it, would fail on it."""

    def __init__(
        self,
        *args: Any,
        num_dist_groups: int,
        dist_group_slope: float,
        module_type: type[nn.Module],
        **kwargs: Any,
    ) -> None:
        self._dist_groups = DistGroups(num_dist_groups, dist_group_slope)
        super().__init__(*args, **kwargs)
        self._module_type = module_type

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTCollection:
        return self.sharded_module_type(
            module,
            params,
            env,
            fused_params={**(self.fused_params or {}), DIST_GROUPS: self._dist_groups},
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        """Arguments of the sharded collection that only one kind of collection has."""
        return {}

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """One N x D parameter per table, as planners expect; on the meta device for TT tables."""
        return TablesView(module).table_parameters()

    @property
    def module_type(self) -> type[nn.Module]:
        return self._module_type


class TTEmbeddingBagCollectionSharder(TTCollectionSharder, EmbeddingBagCollectionSharder):
    """Shards pooled collections some of whose tables may be TT.

    Replaces `EmbeddingBagCollectionSharder`, for stock collections whose plan asks for TT tables
    and for `TTEmbeddingBagCollection`.

    `torchrec.distributed.shard` lets no parameter change its name, so there only a
    `TTEmbeddingBagCollection`, which has the cores' names already, can have TT tables.

    Args:
        fused_params: TorchRec's, for dense and TT tables alike: `optimizer` (an `EmbOptimType` or,
            where all tables are TT, a `torch.optim` class) and its settings, `bounds_check_mode`,
            `output_dtype`; for TT tables also `workspace_bytes`, `backend`, `step_in_backward` and
            `nonfinite_gradients`.
        qcomm_codecs_registry: quantised communication, as in TorchRec.
        num_dist_groups: slices that the tables of every sharding type are cut into, so that the
            communication of one overlaps the lookup of the next; the numbers stay the same. A plan
            that names the `dist_group` of a table goes before.
            As with every placement in TorchRec, read the `KeyedTensor` by key: the order of its
            columns follows the groups.
        module_type: the type of collection that the planner and `DistributedModelParallel` use
            this sharder for.
        dist_group_slope: 0 for groups of equal size, 1 for sizes that fall to one table, see
            `DistGroups`.

    Raises:
        TypeError, ValueError: see `TTCollectionSharder`.

    Example::

        ebc = TTEmbeddingBagCollection(tables, tt={"users": spec}, device="meta")
        sharder = TTEmbeddingBagCollectionSharder(
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
        )
        plan = {"users": tt_table_wise(0), "genders": data_parallel()}
        sharded = torchrec.distributed.shard.shard(ebc, plan, sharder=sharder)
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        num_dist_groups: int = 1,
        module_type: type[EmbeddingBagCollection] = EmbeddingBagCollection,
        dist_group_slope: float = 0.0,
    ) -> None:
        super().__init__(
            fused_params,
            qcomm_codecs_registry,
            num_dist_groups=num_dist_groups,
            dist_group_slope=dist_group_slope,
            module_type=module_type,
        )

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingBagCollection]:
        return ShardedTTEmbeddingBagCollection


class TTEmbeddingCollectionSharder(TTCollectionSharder, EmbeddingCollectionSharder):
    """Shards sequence collections some of whose tables may be TT.

    Replaces `EmbeddingCollectionSharder`, for stock collections whose plan asks for TT tables and
    for `TTEmbeddingCollection`, as `TTEmbeddingBagCollectionSharder` does for pooled ones.

    Args:
        fused_params, qcomm_codecs_registry: see `TTEmbeddingBagCollectionSharder`.
        use_index_dedup: makes the ids of a feature unique before they travel, as in TorchRec, and
            so the rows that come back: pays where ids repeat within a rank's batch.
        num_dist_groups, module_type, dist_group_slope: see `TTEmbeddingBagCollectionSharder`.

    Raises:
        TypeError, ValueError: see `TTCollectionSharder`.

    Example::

        ec = TTEmbeddingCollection(tables, tt={"movies": spec}, device="meta")
        sharder = TTEmbeddingCollectionSharder(
            {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
        )
        plan = {"movies": tt_table_wise(0)}
        sharded = torchrec.distributed.shard.shard(ec, plan, sharder=sharder)
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        num_dist_groups: int = 1,
        module_type: type[EmbeddingCollection] = EmbeddingCollection,
        dist_group_slope: float = 0.0,
    ) -> None:
        super().__init__(
            fused_params,
            qcomm_codecs_registry,
            use_index_dedup,
            num_dist_groups=num_dist_groups,
            dist_group_slope=dist_group_slope,
            module_type=module_type,
        )

    def _options(self) -> dict[str, Any]:
        return {"use_index_dedup": self._use_index_dedup}

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingCollection]:
        return ShardedTTEmbeddingCollection


class _DenseTablesOnly(BaseEmbeddingSharder[nn.Module]):
    """TorchRec's own sharder of the collection within another module, where TT tables cannot be.

    Comes before one of TorchRec's two sharders of collections.
    """

    def shard(
        self, module: nn.Module, params: dict[str, ParameterSharding], *args: Any, **kwargs: Any
    ) -> Any:
        tiered = [name for name, entry in params.items() if tiers_of(entry) is not None]
        self._refuse([*core_specs(module), *tt_table_names(module, params)], tiered)
        return super().shard(module, params, *args, **kwargs)

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        self._refuse(core_specs(module))
        return super().shardable_parameters(module)

    def _refuse(self, tt: Iterable[str], tiered: Iterable[str] = ()) -> None:
        described = describe_tables(dict.fromkeys(tt), tiered)
        if described:
            raise NotImplementedError(
                f"{described} are in a collection within a feature-processed or "
                "managed-collision one, where they cannot be sharded: give them a collection of "
                "their own in the model, or make them dense"
            )


class _DenseBagsOnly(_DenseTablesOnly, EmbeddingBagCollectionSharder):
    pass


class _DenseSequencesOnly(_DenseTablesOnly, EmbeddingCollectionSharder):
    pass


def get_ecorec_sharders(
    fused_params: dict[str, Any] | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    num_dist_groups: int = 1,
    dist_group_slope: float = 0.0,
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with those of pooled and sequence collections replaced by ours.

    Those of feature-processed and managed-collision collections are TorchRec's, as they are without
    arguments, but for naming TT tables within them, which are refused.

    Args:
        fused_params: see `TTEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: quantised communication of these collections.
        num_dist_groups, dist_group_slope: see `TTEmbeddingBagCollectionSharder`.

    Example::

        sharders = get_ecorec_sharders(
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        )
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """
    ours: list[ModuleSharder[nn.Module]] = [
        TTEmbeddingBagCollectionSharder(
            fused_params, qcomm_codecs_registry, num_dist_groups, module_type, dist_group_slope
        )
        for module_type in (EmbeddingBagCollection, TTEmbeddingBagCollection)
    ]
    ours += [
        TTEmbeddingCollectionSharder(
            fused_params,
            qcomm_codecs_registry,
            num_dist_groups=num_dist_groups,
            module_type=module_type,
            dist_group_slope=dist_group_slope,
        )
        for module_type in (EmbeddingCollection, TTEmbeddingCollection)
    ]
    ours += [
        FeatureProcessedEmbeddingBagCollectionSharder(_DenseBagsOnly()),
        ManagedCollisionEmbeddingBagCollectionSharder(_DenseBagsOnly()),
        ManagedCollisionEmbeddingCollectionSharder(_DenseSequencesOnly()),
    ]
    replaced = {sharder.module_type for sharder in ours}
    return ours + [s for s in get_default_sharders() if s.module_type not in replaced]
