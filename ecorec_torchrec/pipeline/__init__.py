"""The train pipeline in which dist groups overlap too.

Replaces `TrainPipelineSparseDist`.
"""

from .step_times import StepTimes
from .train_pipeline import EcoRecTrainPipeline

__all__ = ["EcoRecTrainPipeline", "StepTimes"]
