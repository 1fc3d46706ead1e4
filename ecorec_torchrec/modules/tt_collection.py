"""What unsharded collections share, pooled and sequence: TT tables among TorchRec's dense ones."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from ecorec_torchrec.tt import TTSpec

from .quantization import NotQuantizable
from .tables import TTTable, draw_seed, init_table_cores_


def table_configs(module: object) -> list[Any]:
    """The table configs of a pooled or sequence collection; none for other modules."""
    if isinstance(module, EmbeddingBagCollectionInterface):
        return list(module.embedding_bag_configs())
    if isinstance(module, EmbeddingCollectionInterface):
        return list(module.embedding_configs())
    return []


def tables_name(module: object) -> str:
    """The attribute of a collection that holds its tables, by which parameter names begin."""
    return "embedding_bags" if isinstance(module, EmbeddingBagCollectionInterface) else "embeddings"


class TTCollection(NotQuantizable):
    """A collection some of whose tables are TT; comes before TorchRec's class.

    TorchRec's constructor is to build all tables on the meta device: dense ones get their memory
    from `_place_tables`, and TT tables must never get that of a dense weight.
    """

    _table_type: type[TTTable]
    _device: torch.device

    def _place_tables(self, specs: dict[str, TTSpec], device: torch.device | str | None) -> None:
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._tt_specs = specs
        tables = getattr(self, tables_name(self))
        for config in table_configs(self):
            if config.name in specs:
                tables[config.name] = self._table_type(config, specs[config.name], self._device)
            else:
                dense = tables[config.name]
                if config.data_type == DataType.BF16:  # which TorchRec would store as float16
                    dense.to(torch.bfloat16)
                dense.to_empty(device=self._device)
        self.reset_parameters()

    @property
    def tt_specs(self) -> dict[str, TTSpec]:
        """The shape of every TT table, by table name, in table order."""
        return dict(self._tt_specs)

    def reset_parameters(self) -> None:
        """Draws start values as the table configs ask: `init_fn`, `weight_init_min/max`.

        The seeds of all TT tables are drawn first, in table order; see `draw_seed`.
        """
        if self._device.type == "meta":
            return
        seeds = {name: draw_seed() for name in self._tt_specs}
        tables = getattr(self, tables_name(self))
        for config in table_configs(self):
            table = tables[config.name]
            if isinstance(table, TTTable):
                cores = list(table.tt_cores)
                init_table_cores_(cores, table.spec, config, seeds[config.name])
            else:
                assert config.init_fn is not None  # the config's __post_init__ sees to it
                with torch.no_grad():
                    config.init_fn(table.weight)
