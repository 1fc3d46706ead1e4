"""Embedding collections with TT tables, unsharded.

They take the place of `torchrec.modules.embedding_modules.EmbeddingBagCollection`, of which they
are subclasses, and of its table config `EmbeddingBagConfig`.
"""

from .configs import TT_DATA_TYPES, TTEmbeddingBagConfig, check_spec, resolve_specs
from .embedding_bag_collection import TTEmbeddingBagCollection
from .features import check_features, split_features
from .tables import TTEmbeddingBag, draw_seed, init_table_cores_

__all__ = [
    "TT_DATA_TYPES",
    "TTEmbeddingBag",
    "TTEmbeddingBagCollection",
    "TTEmbeddingBagConfig",
    "check_features",
    "check_spec",
    "draw_seed",
    "init_table_cores_",
    "resolve_specs",
    "split_features",
]
