"""TorchRec compute kernels of TT tables: storage, optimizers, and the lookup that chooses them.

Replaces `BatchedDenseEmbeddingBag`, `BatchedFusedEmbeddingBag` and `GroupedPooledEmbeddingsLookup`.
"""

from .cores import CoreSlice, GroupableSpec, GroupCores, TableCores
from .grouped import TTDataParallelPooledEmbeddingsLookup, TTGroupedPooledEmbeddingsLookup
from .optimizer_spec import OptimizerSpec
from .optimizers import FusedTTOptimizer, GroupKeyedOptimizer, mark_in_backward
from .settings import TT_ONLY_SETTINGS, TTSettings
from .tt_embedding_bag import BatchedFusedTTEmbeddingBag, BatchedTTEmbeddingBag

__all__ = [
    "TT_ONLY_SETTINGS",
    "BatchedFusedTTEmbeddingBag",
    "BatchedTTEmbeddingBag",
    "CoreSlice",
    "FusedTTOptimizer",
    "GroupCores",
    "GroupKeyedOptimizer",
    "GroupableSpec",
    "OptimizerSpec",
    "TTDataParallelPooledEmbeddingsLookup",
    "TTGroupedPooledEmbeddingsLookup",
    "TTSettings",
    "TableCores",
    "mark_in_backward",
]
