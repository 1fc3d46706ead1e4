"""Plan entries that carry a TT shape, memory tiers or a dist group, and plan files.

The entries extend TorchRec's `ParameterSharding`; the files hold a whole `ShardingPlan`, for which
TorchRec has no format.
"""

from .entries import (
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    WHY_TT_IS_NOT_CUT,
    GroupedParameterSharding,
    TTParameterSharding,
    check_dist_group,
    in_dist_group,
    tt_data_parallel,
    tt_table_wise,
    with_dist_group,
)
from .files import RecordedPlan, load_plan, save_plan
from .tiered import (
    TIERED_COMPUTE_KERNEL,
    TIERED_SHARDING_TYPES,
    WHY_TIERED_IS_NOT_CUT,
    TieredParameterSharding,
    is_tt,
    tiered_row_wise,
    tiered_table_wise,
    tiers_of,
    why_rows_are_not_tiered,
)

__all__ = [
    "TIERED_COMPUTE_KERNEL",
    "TIERED_SHARDING_TYPES",
    "TT_COMPUTE_KERNEL",
    "TT_SHARDING_TYPES",
    "WHY_TIERED_IS_NOT_CUT",
    "WHY_TT_IS_NOT_CUT",
    "GroupedParameterSharding",
    "RecordedPlan",
    "TTParameterSharding",
    "TieredParameterSharding",
    "check_dist_group",
    "in_dist_group",
    "is_tt",
    "load_plan",
    "save_plan",
    "tiered_row_wise",
    "tiered_table_wise",
    "tiers_of",
    "tt_data_parallel",
    "tt_table_wise",
    "why_rows_are_not_tiered",
    "with_dist_group",
]
