"""Sharders and sharded collections with TT tables.

Replaces `EmbeddingBagCollectionSharder`, `EmbeddingCollectionSharder`, the sharded collections that
they make, and `get_default_sharders`.
"""

from ecorec_torchrec.errors import require_torchrec

require_torchrec()

from .embedding import ShardedTTEmbeddingCollection  # noqa: E402
from .embedding_bag import ShardedTTEmbeddingBagCollection  # noqa: E402
from .sharders import (  # noqa: E402
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingCollectionSharder,
    get_ecorec_sharders,
)

__all__ = [
    "ShardedTTEmbeddingBagCollection",
    "ShardedTTEmbeddingCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTEmbeddingCollectionSharder",
    "get_ecorec_sharders",
]
