"""Pooled TT lookup of one group of tables, in the shape of TorchRec's compute kernels."""

from __future__ import annotations

from torch import Tensor
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag

from .tt_kernel import FusedTTKernel, TTKernel


class BatchedTTEmbeddingBag(TTKernel, BaseBatchedEmbeddingBag[Tensor]):
    """Pooled data-parallel tables. Replaces TorchRec's `BatchedDenseEmbeddingBag`."""

    def forward(
        self,
        features: KeyedJaggedTensor,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Pools the group's features.

        Args:
            features: the F features of `batch`, in that order, B bags each.
            vbe_output: not supported (variable batch sizes are refused before this point).
            vbe_output_offsets: not supported.

        Returns:
            (B, F * D) in `settings.output_dtype`.
        """
        assert vbe_output is None and vbe_output_offsets is None
        with record_function("## ecorec_torchrec.lookup ##"):
            pooled = batched_tt_embedding_bag(
                features.values(),
                features.offsets(),
                self._emb_module(),
                self.batch,
                mode="mean" if self._config.pooling is PoolingType.MEAN else "sum",
                per_sample_weights=features.weights() if self._config.is_weighted else None,
                **self._lookup_options(),
            )
        return self._with_gradients(pooled)


class BatchedFusedTTEmbeddingBag(FusedTTKernel, BatchedTTEmbeddingBag):
    """Pooled table-wise tables. Replaces TorchRec's `BatchedFusedEmbeddingBag`."""
