"""Embedding collections with TT tables, unsharded.

They take the place of `EmbeddingBagCollection` and `EmbeddingCollection` of
`torchrec.modules.embedding_modules`, of which they are subclasses, and of the table configs
`EmbeddingBagConfig` and `EmbeddingConfig`.
"""

from .configs import (
    TT_DATA_TYPES,
    TTEmbeddingBagConfig,
    TTEmbeddingConfig,
    check_spec,
    resolve_specs,
)
from .embedding_bag_collection import TTEmbeddingBagCollection
from .embedding_collection import TTEmbeddingCollection
from .features import check_features, check_ids, split_features, without_weights
from .tables import TTEmbedding, TTEmbeddingBag, draw_seed, init_table_cores_
from .tt_collection import TTCollection, table_configs, tables_name

__all__ = [
    "TT_DATA_TYPES",
    "TTCollection",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagConfig",
    "TTEmbeddingCollection",
    "TTEmbeddingConfig",
    "check_features",
    "check_ids",
    "check_spec",
    "draw_seed",
    "init_table_cores_",
    "resolve_specs",
    "split_features",
    "table_configs",
    "tables_name",
    "without_weights",
]
