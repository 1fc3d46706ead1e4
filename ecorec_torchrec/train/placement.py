"""From a configuration to a sharded model: TT shapes, plan, `DistributedModelParallel`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    KernelConfig,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from ecorec_torchrec.plan import RecordedPlan, load_plan
from ecorec_torchrec.planner import (
    Calibration,
    EcoRecConstraints,
    EcoRecPlanner,
    PlanReport,
    Profile,
    TierSpeeds,
    load_profile,
)
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.data import Schema
from ecorec_torchrec.train.hardware import load_hardware
from ecorec_torchrec.train.model import TT, RankingModel, Variant, build_model, tt_specs
from ecorec_torchrec.train.table_list import ListedTable, collection_of, constraints_of
from ecorec_torchrec.train.tiers import SLOTS_ONLY, place_tiers, tier_specs
from ecorec_torchrec.tt import TTSpec

_RESERVED_FRACTION = 0.15  # memory that the planner leaves to MLPs and batches


@dataclass(frozen=True)
class PlannedModel:
    """An unsharded model with its plan.

    Attributes:
        model: tables on the meta device.
        plan: where they go.
        report: the plan for people.
        tt_specs: the tables that are TT.
    """

    model: RankingModel
    plan: ShardingPlan
    report: PlanReport
    tt_specs: dict[str, TTSpec]


def plan_variant(
    config: TrainConfig, schema: Schema, variant: Variant, device: torch.device
) -> PlannedModel:
    """Plans the model of this run's ranks; all call it together.

    It seeds torch's default generator, from which the MLPs are drawn here and the tables when the
    model is sharded: nothing may draw from it in between.
    """
    torch.manual_seed(config.seed)
    if config.plan.hardware is not None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        load_hardware(config.plan.hardware).check_is_here(local_world_size)
    topology = make_topology(config, device.type, dist.get_world_size())
    return plan_model(config, schema, variant, topology)


def plan_model(
    config: TrainConfig, schema: Schema, variant: Variant, topology: Topology
) -> PlannedModel:
    """Builds the model and its plan. With a process group, all ranks call it together.

    Raises:
        ValueError: a table or shape of the configuration does not fit the data, the plan file does
            not fit the model, or no plan fits into the memory.
    """
    specs = tt_specs(config.tt, schema, config.model.embedding_dim) if variant.is_ours else {}
    tiers = tier_specs(config, schema) if variant.is_ours else {}
    _warn_of_ignored_profile(config)
    if config.plan.file is not None and variant.is_ours:
        model = build_model(config, schema, variant, specs)
        plan: ShardingPlan = load_plan(config.plan.file, model, topology.world_size)
        return PlannedModel(model, plan, PlanReport.of(plan, model), specs)
    leave_choice = variant.is_ours and config.tt.choice == "auto"
    slots = {table: spec.cache_rows for table, spec in tiers.items()}
    seen = replace(variant, folded_rows=variant.folded_rows | slots)  # by the planner
    model = build_model(config, schema, seen, {} if leave_choice else specs)
    try:
        planner = _make_planner(config, variant, topology)
        plan = _plan_on_all_ranks(planner, model, sharders_of(config, variant))
    except PlannerError as error:
        raise ValueError(str(error)) from error
    report = getattr(planner, "report", None) or PlanReport.of(plan, model)
    if leave_choice:
        specs = {table.name: table.tt for table in report.tables if table.tt is not None}
    if leave_choice or tiers:
        model = build_model(config, schema, variant, specs)
    if tiers:
        ranks = topology.world_size, topology.local_world_size
        plan = place_tiers(plan, model, tiers, config.tiers.sharding, *ranks)
        report = PlanReport.of(plan, model)
    return PlannedModel(model, plan, report, specs)


def make_topology(config: TrainConfig, device_type: str, world_size: int) -> Topology:
    """TorchRec's picture of the machines: this run's ranks, `plan.hardware`, the caps of `plan`.

    Raises:
        ValueError: `plan.hardware` cannot be used, or its hosts are not filled by the ranks.
    """
    hardware = None if config.plan.hardware is None else load_hardware(config.plan.hardware)
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if hardware is not None:
        per_host = min(hardware.ranks_per_host, world_size)
        if world_size % per_host:
            raise ValueError(
                f"world size {world_size} does not fill hosts of {per_host} ranks "
                f"(plan.hardware={config.plan.hardware!r})"
            )
    trainer = TrainerConfig(
        world_size=world_size,
        local_world_size=per_host,
        hbm_cap_bytes=_gib(config.plan.hbm_cap_gib),
        ddr_cap_bytes=_gib(config.plan.ddr_cap_gib),
        ssd_cap_bytes=_gib(config.plan.storage_cap_gib),
    )
    return TopologyFactory.create_topology(
        trainer,
        hardware_config=None if hardware is None else hardware.for_torchrec(),
        kernel_config=KernelConfig(
            compute_device=device_type, use_hardware_based_bandwidth=hardware is not None
        ),
    )


def local_batch_size(config: TrainConfig, world_size: int) -> int:
    """Rows of a batch on one rank."""
    return config.plan.local_batch_size or -(-config.train.batch_size // world_size)


def _gib(amount: float | None) -> int | None:
    return None if amount is None else int(amount * (1 << 30))


def plan_tables(
    config: TrainConfig,
    tables: Sequence[ListedTable],
    topology: Topology,
    profile: Profile | None = None,
    compute_kernels: Sequence[str] | None = None,
) -> tuple[RecordedPlan, EcoRecPlanner]:
    """The plan of a list of tables, and the planner with its report.

    Args:
        profile: of the tables, where `plan.profile` names none.
        compute_kernels: TorchRec's kernels that tables may have; None for all.

    Raises:
        ValueError: `tt.tables` names no table, or no plan fits into the memory.
    """
    constraints = constraints_of(tables, config)
    for constraint in constraints.values():
        constraint.compute_kernels = None if compute_kernels is None else list(compute_kernels)
    planner = EcoRecPlanner(
        topology,
        batch_size=local_batch_size(config, topology.world_size),
        storage_reservation=FixedPercentageStorageReservation(_RESERVED_FRACTION),
        constraints=dict(constraints),
        profile=_profile(config) or profile,
        tier_speeds=_tier_speeds(config),
        auto_dist_groups=config.plan.num_dist_groups == "auto",
        calibration=_calibration(config),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    try:
        plan = planner.plan(collection_of(tables, config), sharders_of(config, TT))
    except PlannerError as error:
        raise ValueError(str(error)) from error
    return plan, planner


def shard_model(
    planned: PlannedModel, variant: Variant, config: TrainConfig, device: torch.device
) -> DistributedModelParallel:
    """Shards the model over the ranks; weights are drawn from torch's default generator."""
    return DistributedModelParallel(
        planned.model, device=device, plan=planned.plan, sharders=sharders_of(config, variant)
    )


def sharders_of(config: TrainConfig, variant: Variant) -> list[ModuleSharder[nn.Module]]:
    """Stock TorchRec sharders for the twins, EcoRec's for the TT and tiered models."""
    if not variant.is_ours:
        return get_default_sharders()
    count = config.plan.num_dist_groups
    return get_ecorec_sharders(
        {"nonfinite_gradients": config.optim.nonfinite_gradients},
        num_dist_groups=1 if count == "auto" else count,  # auto: the plan tells
        dist_group_slope=config.plan.dist_group_slope,
    )


def _make_planner(
    config: TrainConfig, variant: Variant, topology: Topology
) -> EmbeddingShardingPlanner:
    arguments: dict[str, Any] = {
        "topology": topology,
        "batch_size": local_batch_size(config, topology.world_size),
        "storage_reservation": FixedPercentageStorageReservation(_RESERVED_FRACTION),
        "debug": False,
    }
    if not variant.is_ours:
        return EmbeddingShardingPlanner(**arguments)
    constraints = dict.fromkeys(config.tiers.tables, SLOTS_ONLY)
    if config.tt.choice == "auto":
        if config.tt.shapes:
            warnings.warn(
                f"tt.shapes of {', '.join(config.tt.shapes)} is ignored: with tt.choice=auto the "
                "planner chooses shapes of tt.rank",
                stacklevel=2,
            )
        allowed = EcoRecConstraints(tt="auto", tt_ranks=(config.tt.rank,))
        constraints |= dict.fromkeys(config.tt.tables, allowed)
    return EcoRecPlanner(
        **arguments,
        constraints=constraints,
        profile=_profile(config),
        auto_dist_groups=config.plan.num_dist_groups == "auto",
        calibration=_calibration(config),
    )


def _warn_of_ignored_profile(config: TrainConfig) -> None:
    if config.plan.profile is None:
        return
    if not config.tt.tables and not config.tiers.tables:
        reason = "without tt.tables and tiers.tables, TorchRec's own planner makes the plan"
    elif config.plan.file is not None:
        reason = "plan.file is a finished plan"
    else:
        return
    warnings.warn(f"plan.profile is ignored: {reason}", stacklevel=3)


def _tier_speeds(config: TrainConfig) -> TierSpeeds | None:
    hardware = config.plan.hardware
    return None if hardware is None else load_hardware(hardware).tier_speeds()


def _profile(config: TrainConfig) -> Profile | None:
    return None if config.plan.profile is None else load_profile(config.plan.profile)


def _calibration(config: TrainConfig) -> Calibration | None:
    """What operations cost on the machines of `plan.hardware`, as far as its file tells."""
    hardware = config.plan.hardware
    return None if hardware is None else load_hardware(hardware).calibration()


def _plan_on_all_ranks(
    planner: EmbeddingShardingPlanner, model: nn.Module, sharders: list[ModuleSharder[nn.Module]]
) -> ShardingPlan:
    if dist.is_initialized() and dist.get_world_size() > 1:
        return planner.collective_plan(model, sharders, dist.group.WORLD)
    return planner.plan(model, sharders)
