"""Per table dense or TT, which rank, which sharding: extends `EmbeddingShardingPlanner`."""

from .baselines import Baseline
from .calibration import Calibration
from .constraints import EcoRecConstraints
from .dist_groups import choose_dist_groups
from .enumerator import EcoRecEnumerator
from .estimators import EcoRecPerfEstimator, EcoRecStorageEstimator
from .partitioner import EcoRecPartitioner
from .planner import EcoRecPlanner
from .profile import DistinctCurve, HotRows, Profile, ReuseCurve, TableProfile
from .profile_file import load_profile, save_profile
from .report import PlanReport, RankReport, TableReport
from .step_model import DenseWork, StepPrediction
from .tiers import TierSpeeds, TierTraffic, predicted_tiered_step

__all__ = [
    "Baseline",
    "Calibration",
    "DenseWork",
    "DistinctCurve",
    "EcoRecConstraints",
    "EcoRecEnumerator",
    "EcoRecPartitioner",
    "EcoRecPerfEstimator",
    "EcoRecPlanner",
    "EcoRecStorageEstimator",
    "HotRows",
    "PlanReport",
    "Profile",
    "RankReport",
    "ReuseCurve",
    "StepPrediction",
    "TableProfile",
    "TableReport",
    "TierSpeeds",
    "TierTraffic",
    "choose_dist_groups",
    "load_profile",
    "predicted_tiered_step",
    "save_profile",
]
