"""Plan entries that carry a TT shape, and plan files.

The entries extend TorchRec's `ParameterSharding`; the files hold a whole `ShardingPlan`, for which
TorchRec has no format.
"""

from .entries import (
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    WHY_TT_IS_NOT_CUT,
    TTParameterSharding,
    tt_data_parallel,
    tt_table_wise,
)
from .files import RecordedPlan, load_plan, save_plan

__all__ = [
    "TT_COMPUTE_KERNEL",
    "TT_SHARDING_TYPES",
    "WHY_TT_IS_NOT_CUT",
    "RecordedPlan",
    "TTParameterSharding",
    "load_plan",
    "save_plan",
    "tt_data_parallel",
    "tt_table_wise",
]
