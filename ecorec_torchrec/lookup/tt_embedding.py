"""Sequence (unpooled) TT lookup of one group of tables, in the shape of TorchRec's kernels."""

from __future__ import annotations

from torch import Tensor
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding

from .tt_kernel import FusedTTKernel, TTKernel


class BatchedTTEmbedding(TTKernel, BaseBatchedEmbedding[Tensor]):
    """Data-parallel sequence tables. Replaces TorchRec's `BatchedDenseEmbedding`."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Looks up the rows of the group's features.

        Args:
            features: the F features of `batch`, in that order, B examples each.

        Returns:
            (L, D) in `settings.output_dtype`, a row per id, in the order of the ids.
        """
        with record_function("## ecorec_torchrec.lookup ##"):
            rows_LD = batched_tt_embedding(
                features.values(),
                _feature_offsets(features),
                self._emb_module(),
                self.batch,
                **self._lookup_options(),
            )
        return self._with_gradients(rows_LD)


class BatchedFusedTTEmbedding(FusedTTKernel, BatchedTTEmbedding):
    """Table-wise sequence tables. Replaces TorchRec's `BatchedFusedEmbedding`."""


def _feature_offsets(features: KeyedJaggedTensor) -> Tensor:
    """F + 1 borders of the features, read where they lie: `offset_per_key` would wait for a GPU."""
    offsets, batch_size = features.offsets(), features.stride()
    if batch_size == 0:
        return offsets.new_zeros(len(features.keys()) + 1)
    return offsets[::batch_size]
