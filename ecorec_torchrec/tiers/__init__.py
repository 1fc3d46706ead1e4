"""Tables larger than memory, trained exactly: a hierarchy of memories under a lookup.

A lookup kernel holds S rows of a table in slots; the rows of the coming batches are brought into
them by a worker, from a second level in memory and from a file, and rows that have to leave are
written back with their optimizer state. In TorchRec this takes the place of FBGEMM's SSD table
batched embedding, whose operators are not in the published wheels.
"""

from .hot_ids import load_hot_ids, save_hot_ids
from .init import RowInit
from .spec import RowLayout, TierSpec
from .table import Ticket, TieredTable

__all__ = [
    "RowInit",
    "RowLayout",
    "Ticket",
    "TierSpec",
    "TieredTable",
    "load_hot_ids",
    "save_hot_ids",
]
