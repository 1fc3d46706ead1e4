"""Sharders and sharded collections with TT and tiered tables.

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
from .tiered_checkpoint import load_tiers, save_tiers, tier_statistics, tiered_rows  # noqa: E402

__all__ = [
    "ShardedTTEmbeddingBagCollection",
    "ShardedTTEmbeddingCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTEmbeddingCollectionSharder",
    "get_ecorec_sharders",
    "load_tiers",
    "save_tiers",
    "tier_statistics",
    "tiered_rows",
]
