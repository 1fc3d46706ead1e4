"""TorchRec compute kernels of TT and tiered tables, and the lookups that choose among them.

Replaces `BatchedDenseEmbeddingBag`, `BatchedFusedEmbeddingBag` and `GroupedPooledEmbeddingsLookup`,
and their sequence counterparts `BatchedDenseEmbedding`, `BatchedFusedEmbedding` and
`GroupedEmbeddingsLookup`.
"""

from .cores import CoreSlice, GroupableSpec, GroupCores, TableCores
from .grouped import (
    TTDataParallelEmbeddingsLookup,
    TTDataParallelPooledEmbeddingsLookup,
    TTGroupedEmbeddingsLookup,
    TTGroupedPooledEmbeddingsLookup,
)
from .optimizer_spec import OptimizerSpec
from .optimizers import FusedTTOptimizer, GroupKeyedOptimizer, mark_in_backward
from .settings import TT_ONLY_SETTINGS, TTSettings
from .tiered_embedding import BatchedTieredEmbedding
from .tiered_embedding_bag import BatchedTieredEmbeddingBag
from .tiered_kernel import Lease, TieredKernel, TieredOptimizer, shard_name
from .tiered_settings import TIERED_OPTIMIZERS, TieredSettings
from .tt_embedding import BatchedFusedTTEmbedding, BatchedTTEmbedding
from .tt_embedding_bag import BatchedFusedTTEmbeddingBag, BatchedTTEmbeddingBag
from .tt_kernel import FusedTTKernel, TTKernel

__all__ = [
    "TIERED_OPTIMIZERS",
    "TT_ONLY_SETTINGS",
    "BatchedFusedTTEmbedding",
    "BatchedFusedTTEmbeddingBag",
    "BatchedTTEmbedding",
    "BatchedTTEmbeddingBag",
    "BatchedTieredEmbedding",
    "BatchedTieredEmbeddingBag",
    "CoreSlice",
    "FusedTTKernel",
    "FusedTTOptimizer",
    "GroupCores",
    "GroupKeyedOptimizer",
    "GroupableSpec",
    "Lease",
    "OptimizerSpec",
    "TTDataParallelEmbeddingsLookup",
    "TTDataParallelPooledEmbeddingsLookup",
    "TTGroupedEmbeddingsLookup",
    "TTGroupedPooledEmbeddingsLookup",
    "TTKernel",
    "TTSettings",
    "TableCores",
    "TieredKernel",
    "TieredOptimizer",
    "TieredSettings",
    "mark_in_backward",
    "shard_name",
]
