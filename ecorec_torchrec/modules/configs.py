"""Table configs with a TT shape, and the one place that checks a shape against its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
)

from ecorec_torchrec.tt import TTSpec

TT_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


@dataclass
class TTEmbeddingBagConfig(EmbeddingBagConfig):
    """An `EmbeddingBagConfig` that may ask for its table to be stored as tensor-train cores.

    All other fields mean what they mean to TorchRec: `data_type` is the type of the cores,
    `init_fn` and `weight_init_min/max` set mean and spread of the table's entries. A stock
    `EmbeddingBagCollection` takes the shape when it is sharded by `EcoRecPlanner`'s plan or another
    that asks for TT, so give it `device="meta"`; unsharded its table is dense, unlike that of a
    `TTEmbeddingBagCollection`.

    Args:
        tt: shape of the table; None for a dense table.

    Raises:
        TypeError: `tt` is not a `TTSpec`.
        ValueError: `tt` has another number of rows or columns than the table, or `data_type` is
            none of FP32, FP16 and BF16.

    Example::

        TTEmbeddingBagConfig(
            name="users", num_embeddings=1_000_000, embedding_dim=64, feature_names=["user"],
            tt=TTSpec.suggest(1_000_000, 64, rank=16),
        )
    """

    tt: TTSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tt is not None:
            check_spec(self, self.tt)


@dataclass
class TTEmbeddingConfig(EmbeddingConfig):
    """An `EmbeddingConfig` that may ask for its table to be stored as tensor-train cores.

    The counterpart of `TTEmbeddingBagConfig` for sequence (unpooled) tables, with the same fields,
    meanings and errors.

    Args:
        tt: shape of the table; None for a dense table.

    Raises:
        TypeError, ValueError: see `TTEmbeddingBagConfig`.

    Example::

        TTEmbeddingConfig(
            name="movies", num_embeddings=1_000_000, embedding_dim=64, feature_names=["history"],
            tt=TTSpec.suggest(1_000_000, 64, rank=16),
        )
    """

    tt: TTSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tt is not None:
            check_spec(self, self.tt)


def check_spec(config: BaseEmbeddingConfig, spec: TTSpec) -> None:
    """Raises unless `spec` can be the shape of the table of `config`; see TTEmbeddingBagConfig."""
    if not isinstance(spec, TTSpec):
        raise TypeError(f"table {config.name!r}: tt must be a TTSpec, got {spec!r}")
    wanted = (config.num_embeddings, config.embedding_dim)
    found = (spec.num_embeddings, spec.embedding_dim)
    if wanted != found:
        raise ValueError(
            f"table {config.name!r} has num_embeddings={wanted[0]} and embedding_dim={wanted[1]}, "
            f"its TT shape {found[0]} and {found[1]}: {spec}"
        )
    if config.data_type not in TT_DATA_TYPES:
        raise ValueError(
            f"table {config.name!r}: data_type {config.data_type.name} is not one of "
            f"{[data_type.name for data_type in TT_DATA_TYPES]}, which TT cores can have"
        )


def resolve_specs(
    tables: Sequence[BaseEmbeddingConfig], tt: Mapping[str, TTSpec] | None
) -> dict[str, TTSpec]:
    """The TT shape of every TT table, in table order, from the configs and a `tt=` argument.

    Raises:
        TypeError: `tt` is not a mapping, or holds something else than `TTSpec`.
        ValueError: a table's name occurs twice or cannot be a module's, `tt` names a table that is
            not there, a config and `tt` give different shapes, or a shape does not fit its table.
    """
    if tt is not None and not isinstance(tt, Mapping):
        raise TypeError(f"tt must map table names to TTSpec, got {tt!r}")
    given = dict(tt or {})
    names = [config.name for config in tables]
    _check_names(names)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(f"tt names tables {unknown}, the collection has {names}")
    specs: dict[str, TTSpec] = {}
    for config in tables:
        from_config = getattr(config, "tt", None)
        spec = given.get(config.name, from_config)
        if spec is None:
            continue
        check_spec(config, spec)
        if from_config is not None and from_config != spec:
            raise ValueError(
                f"table {config.name!r} has two TT shapes, {from_config} in its config and "
                f"{spec} in tt"
            )
        specs[config.name] = spec
    return specs


def _check_names(names: Sequence[str]) -> None:
    container = nn.ModuleDict()
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"table name {name!r} occurs twice in one collection")
        if not name or "." in name or hasattr(container, name):
            raise ValueError(
                f"table name {name!r} cannot be used: it is empty, has a dot, or is an attribute "
                "of torch.nn.ModuleDict, in which TorchRec keeps the tables"
            )
