"""The grouped lookups that choose the compute kernel of every group of tables.

TorchRec has one lookup for pooled and one for sequence collections, which hand over their kernels'
arguments in different orders.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardingType,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .tiered_embedding import BatchedTieredEmbedding
from .tiered_embedding_bag import BatchedTieredEmbeddingBag
from .tiered_kernel import TieredKernel
from .tt_embedding import BatchedFusedTTEmbedding, BatchedTTEmbedding
from .tt_embedding_bag import BatchedFusedTTEmbeddingBag, BatchedTTEmbeddingBag


class _WithTieredTables:
    """What pooled and sequence lookups share of tiered tables; comes before TorchRec's class."""

    _emb_modules: Iterable[nn.Module]
    _feature_splits: list[int]

    @property
    def has_tiered_tables(self) -> bool:
        return any(isinstance(kernel, TieredKernel) for kernel in self._emb_modules)

    def prefetch_rows(self, features: KeyedJaggedTensor) -> None:
        """Starts to bring in the rows of tiered tables of a batch that will be looked up."""
        groups = features.split(self._feature_splits)
        for kernel, own_features in zip(self._emb_modules, groups, strict=True):
            if isinstance(kernel, TieredKernel):
                kernel.prefetch(own_features)


class TTGroupedPooledEmbeddingsLookup(_WithTieredTables, GroupedPooledEmbeddingsLookup):
    """TorchRec's grouped lookup with TT and tiered groups among the dense ones.

    Their outputs share one all-to-all. Replaces `GroupedPooledEmbeddingsLookup` for tables that
    are not data-parallel.
    """

    tt_kernel: type[BatchedTTEmbeddingBag] = BatchedFusedTTEmbeddingBag

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> BaseEmbedding:
        if config.compute_kernel is EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            kernel = BatchedTieredEmbeddingBag if _is_tiered(config) else self.tt_kernel
            return kernel(config, pg, device, sharding_type)
        return super()._create_embedding_kernel(config, device, pg, sharding_type, env)


class TTDataParallelPooledEmbeddingsLookup(TTGroupedPooledEmbeddingsLookup):
    """The same for data-parallel tables, whose cores the dense optimizer steps."""

    tt_kernel = BatchedTTEmbeddingBag


class TTGroupedEmbeddingsLookup(_WithTieredTables, GroupedEmbeddingsLookup):
    """The sequence counterpart of `TTGroupedPooledEmbeddingsLookup`.

    Replaces `GroupedEmbeddingsLookup`.
    """

    tt_kernel: type[BatchedTTEmbedding] = BatchedFusedTTEmbedding

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> BaseEmbedding:
        if config.compute_kernel is EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            kernel = BatchedTieredEmbedding if _is_tiered(config) else self.tt_kernel
            return kernel(config, pg, device)
        return super()._create_embedding_kernel(config, pg, device, env)


class TTDataParallelEmbeddingsLookup(TTGroupedEmbeddingsLookup):
    """The same for data-parallel tables, whose cores the dense optimizer steps."""

    tt_kernel = BatchedTTEmbedding


def _is_tiered(config: GroupedEmbeddingConfig) -> bool:
    return "tiers" in config.fused_params
