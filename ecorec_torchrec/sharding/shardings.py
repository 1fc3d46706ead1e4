"""TorchRec's shardings with TT and tiered tables among the dense ones: only the lookup differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import BaseEmbeddingLookup, EmbeddingSharding
from torchrec.distributed.embedding_types import BaseGroupedFeatureProcessor, ShardingType
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding

from ecorec_torchrec.lookup import (
    TTDataParallelEmbeddingsLookup,
    TTDataParallelPooledEmbeddingsLookup,
    TTGroupedEmbeddingsLookup,
    TTGroupedPooledEmbeddingsLookup,
)


class TTSharding(EmbeddingSharding):
    """What they share; comes before one of TorchRec's shardings."""

    _lookup_type: ClassVar[type[BaseEmbeddingLookup]]
    _lookup_options: ClassVar[Mapping[str, Any]] = {}

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup:
        options = dict(self._lookup_options)
        if feature_processor is not None:  # sequence lookups have no such argument
            options["feature_processor"] = feature_processor
        return self._lookup_type(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            env=self._env,
            **options,
        )


class TTTwPooledEmbeddingSharding(TTSharding, TwPooledEmbeddingSharding):
    """Table-wise: every table on one rank. Replaces `TwPooledEmbeddingSharding`."""

    _lookup_type = TTGroupedPooledEmbeddingsLookup


class TieredRwPooledEmbeddingSharding(TTSharding, RwPooledEmbeddingSharding):
    """Row-wise: of every table some rows on each rank. Replaces `RwPooledEmbeddingSharding`."""

    _lookup_type = TTGroupedPooledEmbeddingsLookup
    # Told, as in TorchRec, since means are sums here that become means after they have travelled.
    _lookup_options: ClassVar[Mapping[str, Any]] = {"sharding_type": ShardingType.ROW_WISE}


class TTDpPooledEmbeddingSharding(TTSharding, DpPooledEmbeddingSharding):
    """Data-parallel: every table on every rank. Replaces `DpPooledEmbeddingSharding`."""

    _lookup_type = TTDataParallelPooledEmbeddingsLookup
    # As in TorchRec: DDP divides the gradients of data-parallel tables itself.
    _lookup_options: ClassVar[Mapping[str, Any]] = {"scale_weight_gradients": False}


class TieredRwSequenceEmbeddingSharding(TTSharding, RwSequenceEmbeddingSharding):
    """The sequence counterpart of `TieredRwPooledEmbeddingSharding`."""

    _lookup_type = TTGroupedEmbeddingsLookup


class TTTwSequenceEmbeddingSharding(TTSharding, TwSequenceEmbeddingSharding):
    """The sequence counterpart of `TTTwPooledEmbeddingSharding`."""

    _lookup_type = TTGroupedEmbeddingsLookup


class TTDpSequenceEmbeddingSharding(TTSharding, DpSequenceEmbeddingSharding):
    """The sequence counterpart of `TTDpPooledEmbeddingSharding`."""

    _lookup_type = TTDataParallelEmbeddingsLookup
