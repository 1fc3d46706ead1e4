"""The grouped lookups that choose the compute kernel of every group of tables.

TorchRec has one lookup for pooled and one for sequence collections, which hand over their kernels'
arguments in different orders.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
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

from .tt_embedding import BatchedFusedTTEmbedding, BatchedTTEmbedding
from .tt_embedding_bag import BatchedFusedTTEmbeddingBag, BatchedTTEmbeddingBag


class TTGroupedPooledEmbeddingsLookup(GroupedPooledEmbeddingsLookup):
    """TorchRec's grouped lookup with TT groups among the dense ones; outputs share one all-to-all.

    Replaces `GroupedPooledEmbeddingsLookup` for tables that live on one rank each.
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
            return self.tt_kernel(config, pg, device, sharding_type)
        return super()._create_embedding_kernel(config, device, pg, sharding_type, env)


class TTDataParallelPooledEmbeddingsLookup(TTGroupedPooledEmbeddingsLookup):
    """The same for data-parallel tables, whose cores the dense optimizer steps."""

    tt_kernel = BatchedTTEmbeddingBag


class TTGroupedEmbeddingsLookup(GroupedEmbeddingsLookup):
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
            return self.tt_kernel(config, pg, device)
        return super()._create_embedding_kernel(config, pg, device, env)


class TTDataParallelEmbeddingsLookup(TTGroupedEmbeddingsLookup):
    """The same for data-parallel tables, whose cores the dense optimizer steps."""

    tt_kernel = BatchedTTEmbedding
