"""Per table dense or TT, which rank, which sharding: extends `EmbeddingShardingPlanner`."""

from .baselines import Baseline
from .constraints import EcoRecConstraints
from .enumerator import EcoRecEnumerator
from .estimators import EcoRecPerfEstimator, EcoRecStorageEstimator
from .partitioner import EcoRecPartitioner
from .planner import EcoRecPlanner
from .report import PlanReport, RankReport, TableReport

__all__ = [
    "Baseline",
    "EcoRecConstraints",
    "EcoRecEnumerator",
    "EcoRecPartitioner",
    "EcoRecPerfEstimator",
    "EcoRecPlanner",
    "EcoRecStorageEstimator",
    "PlanReport",
    "RankReport",
    "TableReport",
]
