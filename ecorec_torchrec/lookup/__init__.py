"""TorchRec compute kernels of TT tables: storage, optimizers, and the lookups that choose them.

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
from .tt_embedding import BatchedFusedTTEmbedding, BatchedTTEmbedding
from .tt_embedding_bag import BatchedFusedTTEmbeddingBag, BatchedTTEmbeddingBag
from .tt_kernel import FusedTTKernel, TTKernel

__all__ = [
    "TT_ONLY_SETTINGS",
    "BatchedFusedTTEmbedding",
    "BatchedFusedTTEmbeddingBag",
    "BatchedTTEmbedding",
    "BatchedTTEmbeddingBag",
    "CoreSlice",
    "FusedTTKernel",
    "FusedTTOptimizer",
    "GroupCores",
    "GroupKeyedOptimizer",
    "GroupableSpec",
    "OptimizerSpec",
    "TTDataParallelEmbeddingsLookup",
    "TTDataParallelPooledEmbeddingsLookup",
    "TTGroupedEmbeddingsLookup",
    "TTGroupedPooledEmbeddingsLookup",
    "TTKernel",
    "TTSettings",
    "TableCores",
    "mark_in_backward",
]
