"""The tables of a model that a plan speaks of, and the TT shapes that the model itself fixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.sharding_plan import get_module_to_default_sharders
from torchrec.modules.embedding_configs import data_type_to_dtype

from ecorec_torchrec.modules import table_configs
from ecorec_torchrec.tt import TTSpec


@dataclass(frozen=True)
class ModelTable:
    """One table of a model.

    Args:
        num_embeddings: N.
        embedding_dim: D.
        dtype: storage type of a dense weight or of the TT cores.
        tt: the shape that the model gives it (`tt` of its config, or the `tt=` argument of
            its collection); None for a dense table.
        has_cores: the module holds TT cores, so the table cannot be planned dense any more.
    """

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
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
            weights = sharder.shardable_parameters(module).items()
            sizes = {name: (*weight.shape, weight.dtype) for name, weight in weights}
        else:
            sizes = {
                c.name: (c.num_embeddings, c.embedding_dim, data_type_to_dtype(c.data_type))
                for c in table_configs(module)
            }
        if sizes:
            specs, cores = module_specs(module), core_specs(module)
            found[path] = {
                name: ModelTable(rows, columns, dtype, specs.get(name), name in cores)
                for name, (rows, columns, dtype) in sizes.items()
            }
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def module_specs(module: nn.Module) -> dict[str, TTSpec]:
    """The TT shapes that `module` gives to its tables, by table name; dense tables are left out."""
    specs = {config.name: getattr(config, "tt", None) for config in table_configs(module)}
    return {name: spec for name, spec in specs.items() if spec is not None} | core_specs(module)


def module_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """The storage types of the tables of a collection, by table name."""
    return {config.name: data_type_to_dtype(config.data_type) for config in table_configs(module)}


def core_specs(module: nn.Module) -> dict[str, TTSpec]:
    """The shapes of the tables that `module` holds as TT cores already, not as a dense weight."""
    return dict(getattr(module, "tt_specs", {}))
