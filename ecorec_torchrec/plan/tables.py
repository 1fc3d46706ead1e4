"""The tables of a model that a plan speaks of, and the TT shapes that the model itself fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.sharding_plan import get_module_to_default_sharders
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from ecorec_torchrec.tt import TTSpec


@dataclass(frozen=True)
class ModelTable:
    """One table of a model.

    Args:
        num_embeddings: N.
        embedding_dim: D.
        tt: the shape that the model gives it (`TTEmbeddingBagConfig.tt`, or the `tt=` argument of
            `TTEmbeddingBagCollection`); None for a dense table.
        has_cores: the module holds TT cores, so the table cannot be planned dense any more.
    """

    num_embeddings: int
    embedding_dim: int
    tt: TTSpec | None
    has_cores: bool


def model_tables(model: nn.Module) -> dict[str, dict[str, ModelTable]]:
    """All tables of `model`: module path -> table name -> table, in the model's order.

    A module counts when TorchRec has a default sharder for it, or when it is an embedding (bag)
    collection of a subclass; the modules inside it are not looked at, as in TorchRec's planner.

    Example::

        model_tables(torch.nn.Sequential(ebc))   # {"0": {"users": ModelTable(...), ...}}
    """
    found: dict[str, dict[str, ModelTable]] = {}
    sharders = get_module_to_default_sharders()

    def visit(path: str, module: nn.Module) -> None:
        sharder = sharders.get(type(module))
        if sharder is not None:
            shapes = {name: p.shape for name, p in sharder.shardable_parameters(module).items()}
        else:
            shapes = {c.name: (c.num_embeddings, c.embedding_dim) for c in _configs(module)}
        if shapes:
            specs = module_specs(module)
            found[path] = {
                name: ModelTable(rows, columns, specs.get(name), has_tt_cores(module, name))
                for name, (rows, columns) in shapes.items()
            }
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def module_specs(module: nn.Module) -> dict[str, TTSpec]:
    """The TT shapes that `module` gives to its tables, by table name; dense tables are left out."""
    specs = {config.name: getattr(config, "tt", None) for config in _configs(module)}
    return {name: spec for name, spec in specs.items() if spec is not None}


def has_tt_cores(module: nn.Module, table: str) -> bool:
    """Whether `module` holds `table` as TT cores already (rather than as a dense weight)."""
    tables = getattr(module, "embedding_bags", None) or getattr(module, "embeddings", None)
    if not isinstance(tables, nn.ModuleDict) or table not in tables:
        return False
    return hasattr(tables[table], "tt_cores")


def _configs(module: nn.Module) -> list[Any]:
    if isinstance(module, EmbeddingBagCollectionInterface):
        return list(module.embedding_bag_configs())
    if isinstance(module, EmbeddingCollectionInterface):
        return list(module.embedding_configs())
    return []
