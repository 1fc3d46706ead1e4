"""The DLRM that is trained, with TT and tiered tables or as one of its two dense twins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.train.config import ModelConfig, TrainConfig, TTConfig
from ecorec_torchrec.train.data import RankBatch, Schema
from ecorec_torchrec.train.optimizers import attach_table_optimizers
from ecorec_torchrec.tt import TTSpec


@dataclass(frozen=True)
class Variant:
    """How the tables of `tt.tables` and `tiers.tables` are held.

    Attributes:
        name: `tt`; `tiered`, without TT tables; `dense`, the dense twin; or `hash_equal_bytes`,
            the hashing twin.
        folded_rows: rows of the tables that ids are folded into (id modulo rows), by feature.
    """

    name: str
    folded_rows: dict[str, int] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether it is sharded and trained by this package, or by TorchRec alone."""
        return self.name in ("tt", "tiered")


TT = Variant("tt")
TIERED = Variant("tiered")
DENSE = Variant("dense")


def main_variant(config: TrainConfig) -> Variant:
    """The variant that a run is for; others are its twins."""
    if config.tt.tables:
        return TT
    return TIERED if config.tiers.tables else DENSE


class RankingModel(DLRMTrain):
    """TorchRec's `DLRMTrain` with a loss that is right for uneven shares of a global batch."""

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__(dlrm_module)
        self.loss_fn = nn.BCEWithLogitsLoss(reduction="sum")

    def forward(self, batch: RankBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Returns the loss, and (loss, `(B,)` logits, `(B,)` labels) detached.

        The average of the losses over the ranks is the mean over the global batch.
        """
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels) * batch.loss_scale
        return loss, (loss.detach(), logits.detach(), batch.labels)


def tt_specs(config: TTConfig, schema: Schema, embedding_dim: int) -> dict[str, TTSpec]:
    """The shape of every table that `tt.tables` names.

    Raises:
        ValueError: a table that the data set does not have, or a shape that does not fit it.
    """
    rows = {feature.name: feature.num_embeddings for feature in schema.sparse}
    specs = {}
    for table in config.tables:
        if table not in rows:
            raise ValueError(f"tt.tables: no table {table!r}; there are {', '.join(rows)}")
        shape = config.shapes.get(table)
        if shape is None:
            specs[table] = TTSpec.suggest(
                rows[table], embedding_dim, rank=config.rank, num_cores=config.num_cores
            )
            continue
        specs[table] = TTSpec(rows[table], shape.row_factors, shape.col_factors, shape.ranks)
        if specs[table].embedding_dim != embedding_dim:
            raise ValueError(
                f"tt.shapes.{table}.col_factors={shape.col_factors} multiply to "
                f"{specs[table].embedding_dim}, not to model.embedding_dim={embedding_dim}"
            )
    return specs


def build_model(
    config: TrainConfig, schema: Schema, variant: Variant, specs: dict[str, TTSpec]
) -> RankingModel:
    """The unsharded model: tables on the meta device, MLPs on the CPU, optimizers attached.

    Args:
        config: of the run.
        schema: of the data.
        variant: `folded_rows` sets the sizes of the hashing twin's tables.
        specs: shapes of the tables that are TT.
    """
    tables = [
        EmbeddingBagConfig(
            name=feature.name,
            embedding_dim=config.model.embedding_dim,
            num_embeddings=variant.folded_rows.get(feature.name, feature.num_embeddings),
            feature_names=[feature.name],
            pooling=PoolingType[config.model.pooling.upper()],
            **(_init_range(config.tt.entry_std) if feature.name in specs else {}),
        )
        for feature in schema.sparse
    ]
    return RankingModel(_dlrm(_collection(tables, specs, config), config.model, len(schema.dense)))


def _init_range(entry_std: float | None) -> dict[str, float]:
    """The table config's way to say how far initial entries spread: a uniform distribution."""
    if entry_std is None:
        return {}
    bound = entry_std * math.sqrt(3)
    return {"weight_init_min": -bound, "weight_init_max": bound}


def _collection(
    tables: list[EmbeddingBagConfig], specs: dict[str, TTSpec], config: TrainConfig
) -> EmbeddingBagCollection:
    meta = torch.device("meta")
    if specs:
        collection = TTEmbeddingBagCollection(tables, tt=specs, device=meta)
    else:
        collection = EmbeddingBagCollection(tables, device=meta)
    attach_table_optimizers(collection, specs, config.optim)
    return collection


def _dlrm(collection: EmbeddingBagCollection, config: ModelConfig, num_dense: int) -> DLRM:
    dense_sizes = [*config.dense_arch, config.embedding_dim]
    over_sizes = [*config.over_arch, 1]
    dlrm = DLRM(collection, num_dense, dense_sizes, over_sizes)
    if config.dropout:
        # TorchRec's MLP has no dropout, but takes any activation module.
        def activation() -> nn.Module:
            return nn.Sequential(nn.ReLU(), nn.Dropout(config.dropout))

        num_features = dlrm.sparse_arch.F
        num_interactions = num_features * (num_features + 1) // 2
        over_in_size = config.embedding_dim + num_interactions
        dlrm.dense_arch.model = MLP(num_dense, dense_sizes, activation=activation)
        dlrm.over_arch.model[0] = MLP(over_in_size, over_sizes[:-1], activation=activation)
    return dlrm
