"""The grouped lookup that chooses the compute kernel of every group of tables."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardingType,
)
from torchrec.distributed.types import ShardingEnv

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
