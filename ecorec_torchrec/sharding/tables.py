"""Which tables of a collection become TT, and with what shape; refusals, before any work.

A table is TT when its plan entry has the kernel `customized_kernel`. Its shape comes from the plan
entry, from the table's config, or from a collection that holds cores.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from ecorec_torchrec.modules import check_spec, table_configs, tables_name
from ecorec_torchrec.plan import (
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    WHY_TT_IS_NOT_CUT,
    is_tt,
    tiers_of,
)
from ecorec_torchrec.plan.tables import core_specs
from ecorec_torchrec.tt import TTSpec


def tt_table_names(module: nn.Module, plan: Mapping[str, ParameterSharding]) -> list[str]:
    """The tables whose plan entry asks for TT, in table order."""
    names = [config.name for config in table_configs(module)]
    return [name for name in names if name in plan and is_tt(plan[name])]


def resolve_tt_tables(
    module: nn.Module, plan: Mapping[str, ParameterSharding]
) -> dict[str, TTSpec]:
    """The shape of every TT table, in table order.

    Raises:
        ValueError: a table has no plan entry; a TT table has no shape, two shapes, one that does
            not fit, or a sharding type other than table-wise and data-parallel; or a table
            that its collection holds as cores is planned as a dense one.
    """
    held = core_specs(module)
    specs: dict[str, TTSpec] = {}
    for config in table_configs(module):
        if config.name not in plan:
            raise ValueError(f"table {config.name!r} has no entry in the sharding plan")
        entry = plan[config.name]
        if is_tt(entry):
            specs[config.name] = _spec(config, entry, held.get(config.name))
        elif tiers_of(entry) is not None:
            continue  # see `resolve_tiered_tables`
        elif config.name in held or getattr(entry, "tt", None) is not None:
            raise ValueError(
                f"table {config.name!r} is a TT table, but its plan entry has the compute kernel "
                f"{entry.compute_kernel!r}: use tt_table_wise, tt_data_parallel or EcoRecPlanner"
            )
        elif getattr(config, "tt", None) is not None:
            warnings.warn(
                f"table {config.name!r} has a TT shape, which is ignored: its plan entry has the "
                f"compute kernel {entry.compute_kernel!r}. EcoRecPlanner and tt_table_wise plan TT",
                stacklevel=2,
            )
    return specs


def describe_tables(tt: Iterable[str], tiered: Iterable[str]) -> str:
    """`TT tables ['a'] and tiered tables ['b']`, for errors; empty where there are none."""
    kinds = (("TT", list(tt)), ("tiered", list(tiered)))
    return " and ".join(f"{kind} tables {names}" for kind, names in kinds if names)


def check_ranks(
    plan: Mapping[str, ParameterSharding], tables: Iterable[str], world_size: int
) -> None:
    """Raises ValueError unless every one of `tables` is placed on ranks that there are.

    A table-wise one needs one shard on one rank, a data-parallel one all ranks.
    """
    for table in tables:
        entry = plan[table]
        if entry.sharding_type == ShardingType.DATA_PARALLEL.value:
            if entry.ranks is not None and sorted(entry.ranks) != list(range(world_size)):
                raise ValueError(
                    f"TT table {table!r} is data-parallel on ranks={entry.ranks}, but there are "
                    f"{world_size} ranks: make a new plan"
                )
            continue
        shards = getattr(entry.sharding_spec, "shards", [])
        owners = [shard.placement.rank() for shard in shards]
        if owners != entry.ranks or len(owners) != 1 or not 0 <= owners[0] < world_size:
            raise ValueError(
                f"TT table {table!r} is table-wise with ranks={entry.ranks} and "
                f"sharding_spec={entry.sharding_spec}: it needs one shard on one of "
                f"{world_size} ranks, see tt_table_wise"
            )


def limits_of_ids(
    configs: Iterable[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    own_tables: Iterable[str],
    fused_params: Mapping[str, Any],
) -> dict[str, tuple[str, int]]:
    """Feature -> the smallest table that must have a row for its ids, and its number of rows.

    Beside a TT or tiered table (`own_tables`) that checks its ids, those of dense tables must have
    a row too, unless their `bounds_check_mode` says otherwise: what becomes of them would else
    depend on the sharding.
    """

    def is_checked(table: str) -> bool:
        mode = plan[table].bounds_check_mode or fused_params.get("bounds_check_mode")
        return mode in (None, BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)

    limits: dict[str, tuple[str, int]] = {}
    if any(is_checked(name) for name in own_tables):
        for config in sorted(configs, key=lambda config: config.num_embeddings):
            for feature in config.feature_names if is_checked(config.name) else ():
                limits.setdefault(feature, (config.name, config.num_embeddings))
    return limits


def _spec(config: BaseEmbeddingConfig, entry: ParameterSharding, held: TTSpec | None) -> TTSpec:
    if entry.sharding_type not in TT_SHARDING_TYPES:
        raise ValueError(
            f"TT table {config.name!r} cannot be sharded {entry.sharding_type}: {WHY_TT_IS_NOT_CUT}"
        )
    sources = {
        "its plan entry": getattr(entry, "tt", None),
        "its config": getattr(config, "tt", None),
        "its collection": held,
    }
    given = {source: spec for source, spec in sources.items() if spec is not None}
    if not given:
        raise ValueError(
            f"table {config.name!r} is planned with the kernel {TT_COMPUTE_KERNEL!r} but has no TT "
            "shape: give one in the plan entry (TTParameterSharding), in the table's config "
            "(TTEmbeddingBagConfig, TTEmbeddingConfig) or to the collection (tt=)"
        )
    if len(set(given.values())) > 1:
        raise ValueError(f"table {config.name!r} is given different TT shapes: {given}")
    spec = next(iter(given.values()))
    check_spec(config, spec)
    return spec


class TablesView:
    """A collection as TorchRec's sharding code reads one: one N x D parameter per table.

    TT tables are stood for by a parameter on the meta device. It bears what
    `apply_optimizer_in_backward` left on the table's own weight or cores, with the optimizer class
    itself among the settings, since not all classes have an FBGEMM type. All but the parameters is
    the collection's own.
    """

    def __init__(
        self, module: nn.Module, plan: Mapping[str, ParameterSharding] | None = None
    ) -> None:
        self._module = module
        self._tt_names = {*core_specs(module), *(tt_table_names(module, plan) if plan else ())}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def table_parameters(self) -> dict[str, nn.Parameter]:
        """Table name -> its N x D parameter."""
        parameters = {}
        for config in table_configs(self._module):
            table = getattr(self._module, tables_name(self._module))[config.name]
            if config.name in self._tt_names:
                parameters[config.name] = _stand_in(config, list(table.parameters()))
            else:
                parameters[config.name] = table.weight
        return parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.table_parameters().items():
            if name in self._tt_names and hasattr(parameter, "_optimizer_classes"):
                # The settings name it; of a class TorchRec makes an FBGEMM type, or fails.
                parameter._optimizer_classes = [None]
            yield f"{tables_name(self._module)}.{name}.weight", parameter

    def state_dict(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())


def _stand_in(config: BaseEmbeddingConfig, own: list[nn.Parameter]) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(config.num_embeddings, config.embedding_dim, device="meta"))
    classes, settings = _optimizer_marks(config.name, own)
    if settings:
        weight._optimizer_classes = [classes]  # type: ignore[attr-defined]
        weight._optimizer_kwargs = [settings]  # type: ignore[attr-defined]
    return weight


def _optimizer_marks(table: str, own: list[nn.Parameter]) -> tuple[type | None, dict[str, Any]]:
    if not any(parameter.requires_grad for parameter in own):
        return None, {"optimizer": EmbOptimType.NONE}
    if not all(parameter.requires_grad for parameter in own):
        raise ValueError(f"table {table!r}: freeze all TT cores of a table, or none")
    marks = [
        (getattr(p, "_optimizer_classes", []), getattr(p, "_optimizer_kwargs", [])) for p in own
    ]
    classes, settings = marks[0]
    if any(mark != marks[0] for mark in marks) or len(classes) > 1:
        raise ValueError(
            f"table {table!r} has several optimizers in backward, {list(marks)}: its "
            "cores need one and the same"
        )
    if not classes:
        return None, {}
    return classes[0], {**settings[0], "optimizer": settings[0].get("optimizer", classes[0])}
