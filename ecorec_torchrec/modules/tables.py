"""One TT table as a module: its cores, their start values, and the lookup, pooled or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    data_type_to_dtype,
    pooling_type_to_str,
)

from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding, batched_tt_embedding_bag
from ecorec_torchrec.tt import TTSpec, entry_moments, init_cores_


def draw_seed() -> int:
    """The seed of one TT table's start values, from torch's default CPU generator.

    Cores drawn from a seed do not depend on where they lie: ranks with equal random state draw
    equal seeds, and a model starts equal unsharded, table-wise and data-parallel. Draw the seeds of
    all TT tables, in table order, before other start values use the generator.
    """
    return int(torch.randint(2**62, (), device="cpu"))


def init_table_cores_(
    cores: Sequence[Tensor], spec: TTSpec, config: BaseEmbeddingConfig, seed: int
) -> None:
    """Start values of a table's cores, with mean and spread as its config asks; in place."""
    mean, std = entry_moments(
        config.name,
        config.num_embeddings,
        config.embedding_dim,
        init_fn=config.init_fn,
        weight_init_min=config.weight_init_min,
        weight_init_max=config.weight_init_max,
    )
    generator = torch.Generator().manual_seed(seed)
    init_cores_(cores, spec, entry_mean=mean, entry_std=std, generator=generator)


class TTTable(nn.Module):
    """The cores of one table: K parameters `tt_cores.<k>` of `spec.core_shapes`, uninitialised.

    Args:
        config: the table; its `data_type` is the type of the cores.
        spec: its TT shape.
        device: where the cores lie.
    """

    def __init__(self, config: BaseEmbeddingConfig, spec: TTSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        dtype = data_type_to_dtype(config.data_type)
        self.tt_cores = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            for shape in spec.core_shapes
        )
        self._batches = {
            feature: TableBatch(
                table_names=(config.name,),
                num_embeddings=(spec.num_embeddings,),
                row_factors=(spec.row_factors,),
                col_factors=spec.col_factors,
                ranks=spec.ranks,
                feature_names=(feature,),
                feature_tables=(0,),
            )
            for feature in config.feature_names
        }

    def _batch(self, feature: str, indices_L: Tensor) -> TableBatch | str:
        """The table as the lookup takes it, with the feature's name for its errors."""
        batch = self._batches[feature]
        # A traced graph is Python source: the batch goes into it as text.
        return batch.key if isinstance(indices_L, torch.fx.Proxy) else batch

    def extra_repr(self) -> str:
        return (
            f"{self.spec.num_embeddings}, {self.spec.embedding_dim}, "
            f"row_factors={self.spec.row_factors}, col_factors={self.spec.col_factors}, "
            f"ranks={self.spec.ranks}"
        )


class TTEmbeddingBag(TTTable):
    """A pooled TT table, in the place that `nn.EmbeddingBag` has in TorchRec's collection."""

    def __init__(self, config: EmbeddingBagConfig, spec: TTSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        self.mode = pooling_type_to_str(config.pooling)

    def forward(
        self, feature: str, indices_L: Tensor, offsets: Tensor, weights_L: Tensor | None = None
    ) -> Tensor:
        """Pooled rows (B, D) in float32.

        Args:
            feature: which of the table's features this is; named in errors.
            indices_L: int32 or int64 row ids.
            offsets: B + 1 bag borders.
            weights_L: per-sample weights.
        """
        batch = self._batch(feature, indices_L)
        return _pooled_rows(indices_L, offsets, list(self.tt_cores), batch, self.mode, weights_L)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


class TTEmbedding(TTTable):
    """A sequence TT table, in the place that `nn.Embedding` has in TorchRec's collection."""

    def forward(self, feature: str, indices_L: Tensor) -> Tensor:
        """Rows (L, D) in float32, one per id.

        Args:
            feature: which of the table's features this is; named in errors.
            indices_L: int32 or int64 row ids.
        """
        return _rows(indices_L, list(self.tt_cores), self._batch(feature, indices_L))


@torch.fx.wrap
def _pooled_rows(
    indices_L: Tensor,
    offsets: Tensor,
    cores: list[Tensor],
    batch: TableBatch | str,
    mode: str,
    weights_L: Tensor | None,
) -> Tensor:
    return batched_tt_embedding_bag(
        indices_L,
        offsets,
        cores,
        TableBatch.from_key(batch) if isinstance(batch, str) else batch,
        mode=mode,
        per_sample_weights=weights_L,
        output_dtype=torch.float32,
    )


@torch.fx.wrap
def _rows(indices_L: Tensor, cores: list[Tensor], batch: TableBatch | str) -> Tensor:
    return batched_tt_embedding(
        indices_L,
        torch.arange(2, device=indices_L.device) * indices_L.numel(),
        cores,
        TableBatch.from_key(batch) if isinstance(batch, str) else batch,
        output_dtype=torch.float32,
    )
