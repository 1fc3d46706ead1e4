"""Plan entries that carry a TT shape or a dist group, and plan files.

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

__all__ = [
    "TT_COMPUTE_KERNEL",
    "TT_SHARDING_TYPES",
    "WHY_TT_IS_NOT_CUT",
    "GroupedParameterSharding",
    "RecordedPlan",
    "TTParameterSharding",
    "check_dist_group",
    "in_dist_group",
    "load_plan",
    "save_plan",
    "tt_data_parallel",
    "tt_table_wise",
    "with_dist_group",
]
