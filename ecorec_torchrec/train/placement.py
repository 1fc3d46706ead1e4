"""From a configuration to a sharded model: TT shapes, plan, `DistributedModelParallel`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from ecorec_torchrec.plan import load_plan
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.data import Schema
from ecorec_torchrec.train.model import RankingModel, Variant, build_model, tt_specs
from ecorec_torchrec.tt import TTSpec

_RESERVED_FRACTION = 0.15  # memory that the planner leaves to MLPs and batches


@dataclass(frozen=True)
class PlannedModel:
    """An unsharded model with its plan.

    Attributes:
        model: tables on the meta device.
        plan: where they go.
        tt_specs: the tables that are TT, which `tt.choice: auto` leaves to the planner.
    """

    model: RankingModel
    plan: ShardingPlan
    tt_specs: dict[str, TTSpec]


def plan_model(
    config: TrainConfig, schema: Schema, variant: Variant, topology: Topology
) -> PlannedModel:
    """Builds the model and its plan. With a process group, all ranks call it together.

    Raises:
        ValueError: a table or shape of the configuration does not fit the data, or the plan file
            does not fit the model.
        torchrec.distributed.planner.types.PlannerError: no plan fits into the memory.
    """
    specs = tt_specs(config.tt, schema, config.model.embedding_dim) if variant.uses_tt else {}
    model = build_model(config, schema, variant, specs)
    if config.plan.file is not None and variant.uses_tt:
        return PlannedModel(model, load_plan(config.plan.file, model, topology.world_size), specs)
    plan = _make_plan(config, model, variant, topology)
    return PlannedModel(model, plan, specs)


def make_topology(config: TrainConfig, device_type: str, world_size: int) -> Topology:
    """TorchRec's picture of the machines: this run's ranks and the caps of `plan`."""
    trainer = TrainerConfig(
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        hbm_cap_bytes=_gib(config.plan.hbm_cap_gib),
        ddr_cap_bytes=_gib(config.plan.ddr_cap_gib),
    )
    return TopologyFactory.create_topology(
        trainer, kernel_config=KernelConfig(compute_device=device_type)
    )


def _gib(amount: float | None) -> int | None:
    return None if amount is None else int(amount * (1 << 30))


def shard_model(
    planned: PlannedModel, variant: Variant, device: torch.device
) -> DistributedModelParallel:
    """Shards the model over the ranks; weights are drawn from torch's default generator."""
    return DistributedModelParallel(
        planned.model, device=device, plan=planned.plan, sharders=_sharders(variant)
    )


def _sharders(variant: Variant) -> list[ModuleSharder[nn.Module]]:
    return get_ecorec_sharders() if variant.uses_tt else get_default_sharders()


def _make_plan(
    config: TrainConfig, model: RankingModel, variant: Variant, topology: Topology
) -> ShardingPlan:
    rows_per_rank = -(-config.train.batch_size // topology.world_size)
    reservation = FixedPercentageStorageReservation(_RESERVED_FRACTION)
    if variant.uses_tt:
        constraints = {table: EcoRecConstraints(tt="always") for table in config.tt.tables}
        planner = EcoRecPlanner(
            topology=topology,
            batch_size=rows_per_rank,
            storage_reservation=reservation,
            constraints=constraints,
            debug=False,
        )
    else:
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=rows_per_rank,
            storage_reservation=reservation,
            debug=False,
        )
    sharders = _sharders(variant)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return planner.collective_plan(model, sharders, dist.group.WORLD)
    return planner.plan(model, sharders)
