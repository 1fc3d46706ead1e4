"""Pooled lookup of tiered tables, in the shape of TorchRec's compute kernels."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .tiered_kernel import TieredKernel


class BatchedTieredEmbeddingBag(TieredKernel, BaseBatchedEmbeddingBag[Tensor]):
    """Pooled tables in several memories. Replaces TorchRec's `BatchedFusedEmbeddingBag`."""

    _pooling: PoolingMode

    @property
    def _pooling_mode(self) -> PoolingMode:
        return self._pooling

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Pools the group's features.

        Without gradients, the rows are read where they are, and the slots stay as they are.

        Args:
            features: the F features of the group, in table order, B bags each.
            vbe_output: not supported (variable batch sizes are refused before this point).
            vbe_output_offsets: not supported.

        Returns:
            (B, F * D) float32.

        Raises:
            ValueError: an id has no row, or the slots do not suffice for the batches in flight.
        """
        assert vbe_output is None and vbe_output_offsets is None
        weights_L = features.weights() if self._config.is_weighted else None
        with record_function("## ecorec_torchrec.lookup: tiered ##"):
            if torch.is_grad_enabled():
                return self._look_up(features, weights_L)
            return self._evaluate(features, weights_L)

    def _evaluate(self, features: KeyedJaggedTensor, weights_L: Tensor | None) -> Tensor:
        batch_size, offsets = features.stride(), features.offsets()
        pooled: list[Tensor] = []
        first_bag = first_id = 0
        for i, ids_L in enumerate(self._ids_by_table(features)):
            num_bags = self._feature_table_map.count(i) * batch_size
            table_offsets = offsets[first_bag : first_bag + num_bags + 1] - first_id
            rows_UD, inverse_L = self._peek(i, ids_L)
            bags = nn.functional.embedding_bag(
                inverse_L,
                rows_UD,
                table_offsets,
                mode="sum",
                per_sample_weights=(
                    None if weights_L is None else weights_L[first_id : first_id + len(ids_L)]
                ),
                include_last_offset=True,
            )
            if self._pooling is PoolingMode.MEAN:
                # As FBGEMM does it; torch's own mean differs in the last bit.
                lengths = table_offsets.diff().clamp(min=1).to(bags.dtype)
                bags = bags * lengths.reciprocal().unsqueeze(1)
            # Bags come feature by feature; in the output the features of a bag lie side by side.
            pooled += bags.view(-1, batch_size, self._local_cols[i]).unbind(0)
            first_bag, first_id = first_bag + num_bags, first_id + len(ids_L)
        return torch.cat(pooled, 1)
