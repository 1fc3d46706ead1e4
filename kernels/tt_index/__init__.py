"""The index plan of a batch: sorted, deduplicated and grouped ids, shared by forward and backward.

Takes the place of the sort and segment step inside FBGEMM's table-batched embedding backward.
"""

from .checks import BOUNDS_CHECKS
from .op import index_plan
from .plan import IndexPlan
from .table_batch import TableBatch

__all__ = ["BOUNDS_CHECKS", "IndexPlan", "TableBatch", "index_plan"]
