"""Sharders and sharded collections with TT tables.

Replaces `EmbeddingBagCollectionSharder`, `ShardedEmbeddingBagCollection` and
`get_default_sharders`.
"""

from ecorec_torchrec.errors import require_torchrec

require_torchrec()

from .embedding_bag import ShardedTTEmbeddingBagCollection  # noqa: E402
from .sharders import TTEmbeddingBagCollectionSharder, get_ecorec_sharders  # noqa: E402

__all__ = [
    "ShardedTTEmbeddingBagCollection",
    "TTEmbeddingBagCollectionSharder",
    "get_ecorec_sharders",
]
