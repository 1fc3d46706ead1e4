"""Planning and sharding of a model: the planner of a variant, and `DistributedModelParallel`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from ecorec_torchrec.plan import load_plan
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.train.config import PlanConfig, TrainConfig
from ecorec_torchrec.train.data import Schema
from ecorec_torchrec.train.model import RankingModel, Variant, build_model, tt_specs
from ecorec_torchrec.tt import TTSpec

_GIB = 1 << 30
_RESERVED = 0.15  # share of the memory kept from the planner for MLPs and batches


def sharders_of(variant: Variant) -> list[ModuleSharder[nn.Module]]:
    """Stock TorchRec sharders for the twins, EcoRec's for the TT model."""
    return get_ecorec_sharders() if variant.uses_tt else get_default_sharders()
