"""The planner: per table dense or TT, which rank, which sharding, on which ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
)

from ecorec_torchrec.plan import RecordedPlan, TTParameterSharding, with_dist_group
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.tt import TTSpec

from .compression import Form, PlacementCheck, least_compression, table_forms
from .constraints import EcoRecConstraints
from .enumerator import EcoRecEnumerator
from .estimators import optimizer_class
from .options import tt_of
from .partitioner import EcoRecPartitioner
from .report import PlanReport
from .shortage import PlanningInputs, shortage_error

_RESERVED_SHARE = 0.15  # of HBM, as TorchRec's default policy keeps back
_MAX_GRID_PROPOSALS = 1000
_INFERIOR_PROPOSALS = 100  # in a row, after which a greedy search ends


class EcoRecPlanner(EmbeddingShardingPlanner):
    """TorchRec's `EmbeddingShardingPlanner` that may store tables as TT cores.

    Its aims, in this order:

    1. no rank over its memory cap;
    2. the least lookup-weighted compression: tables stay dense where that fits, and where it does
       not, the table that frees most bytes per lookup goes TT first, with the highest rank that
       fits;
    3. the least predicted step time, searched by TorchRec's proposers among the shardings that the
       forms decided under 2 have: dense tables every TorchRec sharding, TT tables table-wise and
       data-parallel.

    Which tables may be TT: those with a shape of their own (always), and those that
    `EcoRecConstraints` allows `tt_ranks`. Equal input gives an equal plan.

    Args:
        topology, batch_size, constraints, debug, callbacks, timeout_seconds: as TorchRec's.
        enumerator: an `EcoRecEnumerator`.
        storage_reservation: as TorchRec's. The default keeps back 15 % of HBM; TorchRec's own
            is known to over-estimate.
        proposer: as TorchRec's; it searches under aim 3.
        partitioner, performance_model, stats, plan_loader: as TorchRec's.

    Raises:
        TypeError: `enumerator` is of another class; `constraints` is no mapping from table names
            to `ParameterConstraints`.
        ValueError: `batch_size` is below 1.

    Example::

        planner = EcoRecPlanner(
            Topology(world_size=2, compute_device="cpu", ddr_cap=2**30),
            batch_size=1024,
            constraints={"users": EcoRecConstraints(tt_ranks=(16, 32))},
        )
        plan = planner.plan(model, get_ecorec_sharders(fused_params))
        planner.report.print()
        model = DistributedModelParallel(model, plan=plan, sharders=..)
    """

    _proposers: list[Proposer]

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: EcoRecEnumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
    ) -> None:
        if enumerator is not None and not isinstance(enumerator, EcoRecEnumerator):
            raise TypeError(
                f"enumerator must be an EcoRecEnumerator, got {type(enumerator).__name__}: "
                "TorchRec's does not know TT tables"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        _check_constraints(constraints)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation
            or FixedPercentageStorageReservation(_RESERVED_SHARE),
            proposer=proposer
            or [
                GreedyProposer(threshold=_INFERIOR_PROPOSALS),
                GreedyProposer(use_depth=False, threshold=_INFERIOR_PROPOSALS),
                UniformProposer(),
                GridSearchProposer(max_proposals=_MAX_GRID_PROPOSALS),
            ],
            partitioner=partitioner or EcoRecPartitioner(),
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        if enumerator is None:
            self._enumerator = EcoRecEnumerator(self._topology, self._batch_size, constraints)
        self.report: PlanReport | None = None
        """The last plan as tables for people; with `collective_plan` on rank 0 only."""

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> RecordedPlan:
        """Plans on rank 0 and broadcasts; `sharders` default to `get_ecorec_sharders()`."""
        return super().collective_plan(module, sharders or get_ecorec_sharders(), pg)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> RecordedPlan:
        """A plan for the model.

        Args:
            module: the model, not sharded yet; on the meta device it costs no memory.
            sharders: `get_ecorec_sharders(..)`.

        Returns:
            A `ShardingPlan` whose TT entries are `TTParameterSharding` with their shape.

        Raises:
            PlannerError: constraints leave a table no option (the message names both), or the
                tables do not fit (need and have per rank, and cures that work).
        """
        self.report = None
        options = self._enumerator.enumerate(module, sharders)
        if not options:
            return RecordedPlan({}, world_size=self._topology.world_size)
        inputs = self._inputs(module, sharders)
        try:
            capacity = inputs.capacity()
        except PlannerError as error:
            raise shortage_error(inputs) from error
        forms = table_forms(options, self._constraints, self._topology)
        fits = PlacementCheck(self._partitioner, capacity)
        chosen = least_compression(forms, fits)
        if chosen is None:
            raise shortage_error(inputs)
        stock_plan = self._fastest(module, sharders, chosen, fits)
        plan = _recorded(stock_plan, {fqn: form.tt for fqn, form in chosen.items()}, options)
        self._place_in_dist_groups(plan)
        plan.world_size = self._topology.world_size
        self._warn_without_optimizer()
        self.report = PlanReport.of(plan, module, options=self._best_plan, capacity=capacity)
        return plan

    def _place_in_dist_groups(self, plan: RecordedPlan) -> None:
        """As the constraints ask; other tables are left to the sharder's `num_dist_groups`."""
        for module_plan in plan.plan.values():
            for table, entry in module_plan.items():
                constraint = EcoRecConstraints.of((self._constraints or {}).get(table))
                if constraint.dist_group is not None:
                    module_plan[table] = with_dist_group(entry, constraint.dist_group)

    def _fastest(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        chosen: dict[str, Form],
        fits: PlacementCheck,
    ) -> ShardingPlan:
        """TorchRec's search, with the form of every table decided."""
        proposal = fits(list(chosen.values()))
        assert proposal is not None
        proposers = self._proposers
        self._proposers = [_FirstProposal(proposal), *proposers]
        self._enumerator.kept = {fqn: form.tt for fqn, form in chosen.items()}
        try:
            return super().plan(module, sharders)
        finally:
            self._proposers = proposers
            self._enumerator.kept = None

    def _inputs(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> PlanningInputs:
        return PlanningInputs(
            module,
            sharders,
            self._topology,
            self._batch_size,
            self._constraints or {},
            self._storage_reservation,
            self._partitioner,
        )

    def _warn_without_optimizer(self) -> None:
        """Table-wise cores are stepped in backward; without an optimizer they cannot be sharded."""
        data = self._enumerator._sharder_data_map
        missing = [
            option.name
            for option in self._best_plan
            if tt_of(option) is not None
            and option.sharding_type == ShardingType.TABLE_WISE.value
            and optimizer_class(option, data[option.module_type_key].fused_params) is None
        ]
        if missing:
            warnings.warn(
                f"no optimizer is known for the table-wise TT tables {', '.join(missing)}, which "
                "sharding will refuse: give the sharders fused_params, or use "
                "apply_optimizer_in_backward",
                stacklevel=3,
            )


def _check_constraints(constraints: object) -> None:
    if constraints is None:
        return
    if not isinstance(constraints, Mapping):
        raise TypeError(f"constraints must map table names to constraints, got {constraints!r}")
    for name, constraint in constraints.items():
        if not isinstance(constraint, ParameterConstraints):
            raise TypeError(
                f"the constraint of table {name!r} must be EcoRecConstraints or TorchRec's "
                f"ParameterConstraints, got {constraint!r}"
            )


class _FirstProposal(Proposer):
    """Proposes one known proposal, so that the search has a plan that fits to improve on."""

    def __init__(self, proposal: list[ShardingOption]) -> None:
        self._proposal: list[ShardingOption] | None = proposal

    def load(self, search_space: list[ShardingOption], enumerator: object = None) -> None:
        pass

    def feedback(self, *args: object, **kwargs: object) -> None:
        self._proposal = None

    def propose(self) -> list[ShardingOption] | None:
        return self._proposal


def _recorded(
    plan: ShardingPlan, specs: dict[str, TTSpec | None], options: list[ShardingOption]
) -> RecordedPlan:
    """TorchRec's plan in the model's order, with the TT shapes and the sizes of the tables."""
    recorded = RecordedPlan({})
    for option in options:
        module_plan = recorded.plan.setdefault(option.path, EmbeddingModuleShardingPlan())
        if option.name in module_plan:
            continue
        entry = plan.plan[option.path][option.name]
        spec = specs[option.fqn]
        if spec is not None:
            entry = TTParameterSharding(**vars(entry), tt=spec)
        module_plan[option.name] = entry
        shapes = recorded.table_shapes.setdefault(option.path, {})
        shapes[option.name] = tuple(option.tensor.shape)
    return recorded
