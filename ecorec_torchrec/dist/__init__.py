"""Pipelined dist: the tables of a collection in groups that communicate while others compute.

Replaces `KJTListSplitsAwaitable`, which waits for the ids of all groups before the first lookup.
"""

from .groups import NUM_DIST_GROUPS, sharding_type_of, split_dist_groups
from .input_dist import GroupedKJTList, GroupedKJTListAwaitable, GroupedKJTListSplitsAwaitable

__all__ = [
    "NUM_DIST_GROUPS",
    "GroupedKJTList",
    "GroupedKJTListAwaitable",
    "GroupedKJTListSplitsAwaitable",
    "sharding_type_of",
    "split_dist_groups",
]
