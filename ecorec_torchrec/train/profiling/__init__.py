"""What data asks of its tables, measured batch by batch: makes `ecorec_torchrec.planner.Profile`.

TorchRec has no counterpart: its planner is told pooling factors and takes ids as it is told.
"""

from ecorec_torchrec.train.profiling.batches import DatasetIds, FeatureBatch, IdSource, TraceIds
from ecorec_torchrec.train.profiling.measure import ProfileSettings, measure_profile

__all__ = [
    "DatasetIds",
    "FeatureBatch",
    "IdSource",
    "ProfileSettings",
    "TraceIds",
    "measure_profile",
]
