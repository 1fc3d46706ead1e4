"""The sharders to hand to `DistributedModelParallel` and to planners."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.modules import TTEmbeddingBagCollection

from .embedding_bag import TTEmbeddingBagCollectionSharder


def get_ecorec_sharders(
    fused_params: dict[str, Any] | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    num_dist_groups: int = 1,
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with those of embedding bag collections replaced by ours.

    Args:
        fused_params: see `TTEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: quantised communication of the embedding bag collections.
        num_dist_groups: see `TTEmbeddingBagCollectionSharder`.

    Example::

        sharders = get_ecorec_sharders(
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
        )
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """
    ours: list[ModuleSharder[nn.Module]] = [
        TTEmbeddingBagCollectionSharder(
            fused_params, qcomm_codecs_registry, num_dist_groups, module_type
        )
        for module_type in (EmbeddingBagCollection, TTEmbeddingBagCollection)
    ]
    return ours + [s for s in get_default_sharders() if s.module_type is not EmbeddingBagCollection]
