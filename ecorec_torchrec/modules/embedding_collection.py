"""Sequence (unpooled) embedding tables, dense and TT, in one collection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ecorec_torchrec.tt import TTSpec

from .configs import resolve_specs
from .features import check_features, outside_table, split_features
from .tables import TTEmbedding
from .tt_collection import TTCollection

for _function in ("check_features", "split_features"):
    torch.fx.wrap(_function)


class TTEmbeddingCollection(TTCollection, EmbeddingCollection):
    """An `EmbeddingCollection` some of whose tables are stored as tensor-train cores.

    Input, output and names are TorchRec's: a `KeyedJaggedTensor` with B examples goes in, in any
    order of features; per feature a `JaggedTensor` with one row (D) in float32 per id comes out,
    named `<feature>@<table>` where several tables share a feature.

    A TT table has parameters `embeddings.<table>.tt_cores.<k>`, K of them, where a dense one has
    `embeddings.<table>.weight`. All else, start values and training unsharded among it, is as in
    `TTEmbeddingBagCollection`.

    Args:
        tables: configs, all of one `embedding_dim`; a `TTEmbeddingConfig` may bring its own TT
            shape.
        tt: TT shape per table name, for tables of any config class.
        device: where parameters lie; torch's default device when None.
        need_indices: whether the ids come back as the weights of the output.

    Raises:
        TypeError: `tt` is not a mapping from names to `TTSpec`.
        ValueError: tables of unlike `embedding_dim`, and all that `TTEmbeddingBagCollection` lists.

    Example::

        tables = [
            EmbeddingConfig(name="movies", num_embeddings=1_000_000, embedding_dim=64,
                            feature_names=["history"]),
        ]
        ec = TTEmbeddingCollection(tables, tt={"movies": TTSpec.suggest(1_000_000, 64, rank=16)})
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=["history"], values=torch.tensor([7, 999_999, 0]), lengths=torch.tensor([2, 1]),
        )
        ec(features)["history"].values().shape    # (3, 64)
    """

    _table_type = TTEmbedding

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        tt: Mapping[str, TTSpec] | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        specs = resolve_specs(tables, tt)
        super().__init__(tables, torch.device("meta"), need_indices)
        self._place_tables(specs, device)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up the rows of every feature.

        Args:
            features: int32 or int64 ids of B examples, all features of the collection among its
                keys. A TensorDict of jagged tensors is accepted too.

        Returns:
            Name -> `JaggedTensor` of float32 rows (ids of the feature, D), lengths (B,), and the
            ids as weights if `need_indices`.

        Raises:
            TypeError, ValueError: the input is broken (see `check_features`) or an id is outside
                its table; the message names table and feature, the value and the limit.
        """
        features = maybe_td_to_kjt(features, None)
        names = [name for table_names in self._feature_names for name in table_names]
        jagged = split_features(check_features(features, names))
        found: dict[str, JaggedTensor] = {}
        for config, table, embedding_names in zip(
            self._embedding_configs,
            self.embeddings.values(),
            self._embedding_names_by_table,
            strict=True,
        ):
            for name, embedding_name in zip(config.feature_names, embedding_names, strict=True):
                feature = jagged[name]
                if isinstance(table, TTEmbedding):
                    rows = table(name, feature.values())
                else:
                    rows = _dense_rows(table, config.name, name, feature.values())
                found[embedding_name] = JaggedTensor(
                    values=rows,
                    lengths=feature.lengths(),
                    weights=feature.values() if self._need_indices else None,
                )
        return found


def _dense_rows(
    table: nn.Embedding, table_name: str, feature_name: str, indices_L: Tensor
) -> Tensor:
    """`table`'s rows in float32, with its errors about ids in our words."""
    try:
        return table(indices_L).float()
    except (IndexError, RuntimeError) as error:
        named = outside_table(table_name, feature_name, indices_L, table.num_embeddings)
        if named is None:
            raise
        raise named from error
