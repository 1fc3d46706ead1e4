"""Lookups in tensor-train tables, forward and backward: of one table, or of many by one kernel.

Replaces FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` for TT tables.
"""

from .backends import BACKENDS, unavailable_backends
from .functional import (
    batched_tt_embedding,
    batched_tt_embedding_bag,
    tt_embedding,
    tt_embedding_bag,
)

__all__ = [
    "BACKENDS",
    "batched_tt_embedding",
    "batched_tt_embedding_bag",
    "tt_embedding",
    "tt_embedding_bag",
    "unavailable_backends",
]
