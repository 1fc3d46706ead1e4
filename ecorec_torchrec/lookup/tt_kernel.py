"""What the compute kernels of pooled and of sequence tables share: cores, settings, bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

from ecorec_torchrec.kernels.tt_index import TableBatch

from .cores import GroupCores
from .optimizers import FusedTTOptimizer, mark_in_backward
from .settings import TTSettings
from .weightless import WeightlessKernel


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


class TTKernel(WeightlessKernel):
    """Tables whose cores are ordinary parameters: data-parallel ones, reduced by DDP.

    Comes before one of TorchRec's two base classes of compute kernels, which a subclass names.

    Args:
        config: the group; every table carries `TTSettings` in its `fused_params`.
        pg: unused, as in TorchRec's dense kernels.
        device: of the cores.
        more: what else TorchRec's base class is given.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        *more: Any,
    ) -> None:
        super().__init__(config, pg, device, *more)
        self.batch = table_batch(config)
        self.settings = TTSettings.of(config.fused_params)
        self._emb_module = GroupCores(
            self.batch,
            data_type_to_dtype(config.data_type),
            device,
            requires_grad=not self.frozen,
        )
        self._nothing: nn.Parameter | None = None
        if self.frozen:
            mark_in_backward(self._emb_module.named_slices().values(), EmptyFusedOptimizer())
            # DDP refuses a lookup in which nothing requires a gradient. This has no elements.
            self._nothing = nn.Parameter(torch.empty(0, device=device))

    @property
    def frozen(self) -> bool:
        optimizer = self.settings.optimizer
        return optimizer is not None and optimizer.cls is None

    @property
    def emb_module(self) -> GroupCores:
        return self._emb_module

    def _lookup_options(self) -> dict[str, Any]:
        """What pooled and sequence lookups are told alike."""
        return {
            "output_dtype": self.settings.output_dtype,
            "workspace_bytes": self.settings.workspace_bytes,
            "backend": self.settings.backend,
            "bounds_check": self.settings.bounds_check,
        }

    def _with_gradients(self, embeddings: Tensor) -> Tensor:
        """Looked-up embeddings whose gradients are clipped, if asked for."""
        max_gradient = self.settings.max_gradient
        if max_gradient is not None and embeddings.requires_grad:
            embeddings.register_hook(lambda grad: grad.clamp(-max_gradient, max_gradient))
        if torch.is_grad_enabled() and not embeddings.requires_grad:
            # Frozen tables: every rank must still take part in the backward all-to-all.
            embeddings.requires_grad_()
        return embeddings

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The flat leaves: what DDP broadcasts and reduces."""
        dot = "." if prefix else ""
        tables = "/".join(self.batch.table_names)
        for k, flat in enumerate(self._emb_module.flat):
            yield f"{prefix}{dot}{tables}.tt_cores.{k}", flat
        if self._nothing is not None:
            yield f"{prefix}{dot}{tables}.nothing", self._nothing


class FusedTTKernel(TTKernel, FusedOptimizerModule):
    """Tables that live on one rank and are stepped in the backward pass.

    Where no optimizer is given it serves evaluation only; the sharded collection refuses a backward
    pass through it.
    """

    def __init__(self, config: GroupedEmbeddingConfig, *more: Any) -> None:
        super().__init__(config, *more)
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

    def _with_gradients(self, embeddings: Tensor) -> Tensor:
        """As `TTKernel`'s; torch's own error about cores that have changed names no table."""
        embeddings = super()._with_gradients(embeddings)
        versions = self._versions()

        def check(_: Tensor) -> None:
            if self._versions() != versions:
                raise RuntimeError(
                    f"the cores of TT tables {list(self.batch.table_names)} have changed since the "
                    "forward pass that this backward pass belongs to, as by the update of another "
                    "backward pass: add the losses and go backward once, or set "
                    "step_in_backward=False in fused_params"
                )

        if embeddings.requires_grad and not self.frozen:
            embeddings.register_hook(check)
        return embeddings

    def _versions(self) -> list[int]:
        return [0 if flat.is_inference() else flat._version for flat in self._emb_module.flat]

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim
