"""Sequence (unpooled) lookup of tiered tables, in the shape of TorchRec's compute kernels."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .tiered_kernel import TieredKernel


class BatchedTieredEmbedding(TieredKernel, BaseBatchedEmbedding[Tensor]):
    """Sequence tables in several memories. Replaces TorchRec's `BatchedFusedEmbedding`."""

    @property
    def _pooling_mode(self) -> PoolingMode:
        return PoolingMode.NONE

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks up the rows of the group's features.

        Without gradients, the rows are read where they are, and the slots stay as they are.

        Args:
            features: the F features of the group, in table order, B examples each.

        Returns:
            (L, D) float32, a row per id, in the order of the ids.

        Raises:
            ValueError: an id has no row, or the slots do not suffice for the batches in flight.
        """
        with record_function("## ecorec_torchrec.lookup: tiered ##"):
            if torch.is_grad_enabled():
                return self._look_up(features)
            found = [self._peek(i, ids_L) for i, ids_L in enumerate(self._ids_by_table(features))]
            return torch.cat([rows_UD[inverse_L] for rows_UD, inverse_L in found])
