"""TorchRec's pooled shardings with TT tables among the dense ones: only the lookup is another."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding_sharding import BaseEmbeddingLookup
from torchrec.distributed.embedding_types import BaseGroupedFeatureProcessor
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding

from ecorec_torchrec.lookup import (
    TTDataParallelPooledEmbeddingsLookup,
    TTGroupedPooledEmbeddingsLookup,
)


class TTTwPooledEmbeddingSharding(TwPooledEmbeddingSharding):
    """Table-wise: every table on one rank. Replaces `TwPooledEmbeddingSharding`."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        return TTGroupedPooledEmbeddingsLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            env=self._env,
        )


class TTDpPooledEmbeddingSharding(DpPooledEmbeddingSharding):
    """Data-parallel: every table on every rank. Replaces `DpPooledEmbeddingSharding`."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        return TTDataParallelPooledEmbeddingsLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            # As in TorchRec: DDP divides the gradients of data-parallel tables itself.
            scale_weight_gradients=False,
            env=self._env,
        )
