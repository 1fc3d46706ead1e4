"""Pooled TT lookup of one group of tables, in the shape of TorchRec's compute kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardingType
from torchrec.modules.embedding_configs import PoolingType, data_type_to_dtype
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag

from .cores import GroupCores
from .optimizers import FusedTTOptimizer, mark_in_backward
from .settings import TTSettings


def table_batch(config: GroupedEmbeddingConfig) -> TableBatch:
    """The tables and features of a TorchRec group, as the TT kernels take them."""
    tables = config.embedding_tables
    specs = [TTSettings.of(table.fused_params).tt.spec for table in tables]
    return TableBatch(
        table_names=tuple(table.name for table in tables),
        num_embeddings=tuple(spec.num_embeddings for spec in specs),
        row_factors=tuple(spec.row_factors for spec in specs),
        col_factors=specs[0].col_factors,
        ranks=specs[0].ranks,
        feature_names=tuple(name for table in tables for name in table.feature_names),
        feature_tables=tuple(
            index for index, table in enumerate(tables) for _ in table.feature_names
        ),
    )


class BatchedTTEmbeddingBag(BaseBatchedEmbeddingBag[Tensor]):
    """Tables whose cores are ordinary parameters: data-parallel ones, reduced by DDP.

    Replaces TorchRec's `BatchedDenseEmbeddingBag`.

    Args:
        config: the group; every table carries `TTSettings` in its `fused_params`.
        pg: unused, as in TorchRec's dense kernel.
        device: of the cores.
        sharding_type: as TorchRec hands it over.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        self.batch = table_batch(config)
        self.settings = TTSettings.of(config.fused_params)
        self._emb_module = GroupCores(
            self.batch,
            data_type_to_dtype(config.data_type),
            device,
            requires_grad=not self.frozen,
        )

    @property
    def frozen(self) -> bool:
        optimizer = self.settings.optimizer
        return optimizer is not None and optimizer.cls is None

    @property
    def emb_module(self) -> GroupCores:
        return self._emb_module

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
        pooled = batched_tt_embedding_bag(
            features.values(),
            features.offsets(),
            self._emb_module(),
            self.batch,
            mode="mean" if self._config.pooling is PoolingType.MEAN else "sum",
            per_sample_weights=features.weights() if self._config.is_weighted else None,
            output_dtype=self.settings.output_dtype,
            workspace_bytes=self.settings.workspace_bytes,
            backend=self.settings.backend,
            bounds_check=self.settings.bounds_check,
        )
        max_gradient = self.settings.max_gradient
        if max_gradient is not None and pooled.requires_grad:
            pooled.register_hook(lambda grad: grad.clamp(-max_gradient, max_gradient))
        if torch.is_grad_enabled() and not pooled.requires_grad:
            # Frozen tables: every rank must still take part in the backward all-to-all.
            pooled.requires_grad_()
        return pooled

    # TorchRec's bookkeeping speaks of one `<table>.weight` per table, which TT tables do not have:
    # the sharded collection registers and saves the cores itself.

    def split_embedding_weights(self) -> list[Tensor]:
        return []

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        return {} if destination is None else destination

    def named_split_embedding_weights(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The flat leaves: what DDP broadcasts and reduces."""
        dot = "." if prefix else ""
        tables = "/".join(self.batch.table_names)
        for k, flat in enumerate(self._emb_module.flat):
            yield f"{prefix}{dot}{tables}.tt_cores.{k}", flat

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()


class BatchedFusedTTEmbeddingBag(BatchedTTEmbeddingBag, FusedOptimizerModule):
    """Tables that live on one rank and are stepped in the backward pass.

    Replaces TorchRec's `BatchedFusedEmbeddingBag`. Where no optimizer is given it serves
    evaluation only; the sharded collection refuses a backward pass through it.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        optimizer = self.settings.optimizer
        self._optim: FusedOptimizer
        if optimizer is None or self.frozen:
            self._optim = EmptyFusedOptimizer()
            cores = self._emb_module
            mark_in_backward((*cores.flat, *cores.named_slices().values()), self._optim)
        else:
            self._optim = FusedTTOptimizer(
                self._emb_module,
                optimizer,
                step_in_backward=self.settings.step_in_backward,
                nonfinite_gradients=self.settings.nonfinite_gradients,
            )

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim
