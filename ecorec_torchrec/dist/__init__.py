"""Pipelined dist: the tables of a collection in groups that communicate while others compute.

Replaces `KJTListSplitsAwaitable`, which waits for the ids of all groups before the first lookup.
"""

from .groups import DIST_GROUPS, DistGroups, sharding_type_of, split_dist_groups
from .input_dist import GroupedKJTList, GroupedKJTListAwaitable, GroupedKJTListSplitsAwaitable

__all__ = [
    "DIST_GROUPS",
    "DistGroups",
    "GroupedKJTList",
    "GroupedKJTListAwaitable",
    "GroupedKJTListSplitsAwaitable",
    "sharding_type_of",
    "split_dist_groups",
]
