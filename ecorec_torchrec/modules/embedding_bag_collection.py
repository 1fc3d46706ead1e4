"""Pooled embedding tables, dense and TT, in one collection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ecorec_torchrec.tt import TTSpec

from .configs import resolve_specs
from .features import check_features, outside_table, split_features
from .tables import TTEmbeddingBag
from .tt_collection import TTCollection

for _function in (
    "check_features",
    "split_features",
    "process_pooled_embeddings",
    "reorder_inverse_indices",
):
    torch.fx.wrap(_function)


class TTEmbeddingBagCollection(TTCollection, EmbeddingBagCollection):
    """An `EmbeddingBagCollection` some of whose tables are stored as tensor-train cores.

    Input, output and names are TorchRec's: a `KeyedJaggedTensor` with B examples goes in, in any
    order of features; a `KeyedTensor` (B, sum of D) in float32 comes out, the features in table
    order, those that several tables share named `<feature>@<table>`. Row ids belong to a table and
    start at 0, so features of different tables may use equal ids.

    A TT table has parameters `embedding_bags.<table>.tt_cores.<k>`, K of them, where a dense one
    has `embedding_bags.<table>.weight`; the dense N x D weight of a TT table is never allocated.
    The collection trains as it is, with any `torch.optim` optimizer, and the same names remain when
    it is sharded.

    Args:
        tables: configs; a `TTEmbeddingBagConfig` may bring its own TT shape.
        tt: TT shape per table name, for tables of any config class.
        is_weighted: whether ids come with weights.
        device: where parameters lie; torch's default device when None.

    Raises:
        TypeError: `tt` is not a mapping from names to `TTSpec`.
        ValueError: a table name occurs twice, is no module name ("items" is not: it is a method of
            `torch.nn.ModuleDict`) or, in `tt`, names no table; a shape does not fit its table;
            config and `tt` give different shapes.

    Example::

        tables = [
            EmbeddingBagConfig(name="users", num_embeddings=1_000_000, embedding_dim=64,
                               feature_names=["user"]),
            EmbeddingBagConfig(name="genders", num_embeddings=3, embedding_dim=8,
                               feature_names=["gender"]),
        ]
        ebc = TTEmbeddingBagCollection(tables, tt={"users": TTSpec.suggest(1_000_000, 64, rank=16)})
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=["user", "gender"], values=torch.tensor([7, 999_999, 0, 2]),
            lengths=torch.tensor([2, 0, 1, 1]),
        )
        pooled = ebc(features)
        pooled.keys()            # ["user", "gender"]
        pooled.values().shape    # (2, 72)
    """

    _table_type = TTEmbeddingBag

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        tt: Mapping[str, TTSpec] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        specs = resolve_specs(tables, tt)
        super().__init__(tables, is_weighted, torch.device("meta"))
        self._place_tables(specs, device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools the rows of every feature.

        Args:
            features: int32 or int64 ids of B examples, all features of the collection among its
                keys. A TensorDict of jagged tensors is accepted too.

        Returns:
            KeyedTensor (B, sum of D), float32.

        Raises:
            TypeError, ValueError: the input is broken (see `check_features`) or an id is outside
                its table; the message names table and feature, the value and the limit.
        """
        names = [name for table_names in self._feature_names for name in table_names]
        features = maybe_td_to_kjt(features, None)
        features = check_features(features, names, self._is_weighted)
        inverse_indices = reorder_inverse_indices(features.inverse_indices_or_none(), names)
        jagged = split_features(features)
        pooled: list[Tensor] = []
        for config, table in zip(
            self._embedding_bag_configs, self.embedding_bags.values(), strict=True
        ):
            for name in config.feature_names:
                feature = jagged[name]
                weights_L = feature.weights() if self._is_weighted else None
                if isinstance(table, TTEmbeddingBag):
                    rows = table(name, feature.values(), feature.offsets(), weights_L)
                else:
                    rows = _dense_lookup(
                        table, config.name, name, feature.values(), feature.offsets(), weights_L
                    )
                pooled.append(rows)
        return KeyedTensor(
            keys=self._embedding_names,
            values=process_pooled_embeddings(pooled, inverse_indices),
            length_per_key=self._lengths_per_embedding,
        )


def _dense_lookup(
    bag: nn.EmbeddingBag,
    table_name: str,
    feature_name: str,
    indices_L: Tensor,
    offsets: Tensor,
    weights_L: Tensor | None,
) -> Tensor:
    """`bag`'s pooled rows in float32, with its errors about ids in our words."""
    if weights_L is not None:
        weights_L = weights_L.to(bag.weight.dtype)
    try:
        return bag(indices_L, offsets, per_sample_weights=weights_L).float()
    except (IndexError, RuntimeError) as error:
        named = outside_table(table_name, feature_name, indices_L, bag.num_embeddings)
        if named is None:
            raise
        raise named from error
