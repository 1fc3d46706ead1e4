"""Which tables of a collection lie in several memories; refusals, before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from ecorec_torchrec.modules import table_configs
from ecorec_torchrec.plan import (
    TIERED_SHARDING_TYPES,
    WHY_TIERED_IS_NOT_CUT,
    tiers_of,
    why_rows_are_not_tiered,
)
from ecorec_torchrec.plan.tables import core_specs
from ecorec_torchrec.tiers import TierSpec
from ecorec_torchrec.tt.init import is_uniform_between


def resolve_tiered_tables(
    module: nn.Module, plan: Mapping[str, ParameterSharding]
) -> dict[str, TierSpec]:
    """The memories of every tiered table, in table order.

    Raises:
        ValueError: a tiered table is neither table-wise nor row-wise, is held as TT cores, is not
            of float32, has a number of columns that FBGEMM does not take, or an `init_fn` of its
            own.
    """
    specs: dict[str, TierSpec] = {}
    for config in table_configs(module):
        entry = plan.get(config.name)
        spec = None if entry is None else tiers_of(entry)
        if entry is None or spec is None:
            continue
        if entry.sharding_type not in TIERED_SHARDING_TYPES:
            raise ValueError(
                f"tiered table {config.name!r} cannot be sharded {entry.sharding_type}: "
                f"{WHY_TIERED_IS_NOT_CUT}"
            )
        if config.name in core_specs(module):
            raise ValueError(
                f"table {config.name!r} is held as TT cores, so it cannot be planned as tiered"
            )
        _check_config(config)
        specs[config.name] = spec
    return specs


def _check_config(config: BaseEmbeddingConfig) -> None:
    dtype = data_type_to_dtype(config.data_type)
    reason = why_rows_are_not_tiered(dtype, config.embedding_dim)
    if reason is not None:
        raise ValueError(f"tiered table {config.name!r}: {reason}")
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if not math.isfinite(low) or not math.isfinite(high) or low > high:
        raise ValueError(
            f"tiered table {config.name!r}: weight_init_min={low} and weight_init_max={high} must "
            "be finite and in order"
        )
    if config.init_fn is not None and not is_uniform_between(config.init_fn, low, high):
        raise ValueError(
            f"tiered table {config.name!r}: init_fn is not supported, since its rows are drawn one "
            "by one when they are first used: give weight_init_min and weight_init_max"
        )
