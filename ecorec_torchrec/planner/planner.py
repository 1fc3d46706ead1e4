"""The planner: per table dense or TT, which rank, which sharding, on which ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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

from ecorec_torchrec.plan import (
    RecordedPlan,
    TieredParameterSharding,
    TTParameterSharding,
    tiers_of,
    with_dist_group,
)
from ecorec_torchrec.sharding import get_ecorec_sharders

from .baselines import Baseline, greedy_by_unique_ids, torchrec_greedy
from .calibration import Calibration
from .compression import FitCheck, Form, hidden_fetches, least_compression, table_forms
from .constraints import EcoRecConstraints
from .dist_groups import choose_dist_groups, group_ms
from .enumerator import EcoRecEnumerator
from .estimators import optimizer_class
from .lookups import lookups_per_sample
from .options import Candidate, tt_of
from .partitioner import EcoRecPartitioner, PartitionerCheck
from .profile import Profile
from .report import PlanReport
from .search import PlacedTables, PlacementSearch
from .shortage import PlanningInputs, shortage_error
from .step_model import DenseWork, StepPrediction, predict_step
from .tier_options import option_tiers
from .tiers import TierSpeeds

RESERVED_SHARE = 0.15  # of HBM, as TorchRec's default policy keeps back
_MAX_GRID_PROPOSALS = 1000
_INFERIOR_PROPOSALS = 100  # in a row, after which a greedy search ends


class EcoRecPlanner(EmbeddingShardingPlanner):
    """TorchRec's `EmbeddingShardingPlanner` that may store tables as TT cores, or in tiers.

    Its aims, in this order:

    1. no rank over its memory cap;
    2. the least lookup-weighted compression: tables stay dense where that fits, and where it does
       not, tables that may be are tiered, which is exact: first those whose rows take least time
       to fetch per byte freed, with the largest cache that fits, as long as fetching hides behind
       the lookups. After that the table that frees most bytes per lookup goes TT first, with the
       highest rank that fits;
    3. the least predicted step time, that of the slowest rank, searched among the shardings that
       the forms decided under 2 have: dense tables every TorchRec sharding, also in more column
       shards than TorchRec cuts; TT tables table-wise and data-parallel.

    Which tables may be TT: those with a shape of their own (always), and those that
    `EcoRecConstraints` allows `tt_ranks`. Which may be tiered: those that it gives a `tier_folder`.
    Equal input gives an equal plan.

    Args:
        topology, batch_size, constraints, debug, callbacks, timeout_seconds: as TorchRec's.
        enumerator: an `EcoRecEnumerator`.
        storage_reservation: as TorchRec's. The default keeps back 15 % of HBM; TorchRec's own
            is known to over-estimate.
        proposer, partitioner, performance_model, plan_loader: as TorchRec's. Any of them puts
            TorchRec's search in the place of ours under aim 3.
        stats: as TorchRec's.
        profile: of the data, from `load_profile`: how often ids repeat in a batch, and lookups per
            sample where the constraints leave `pooling_factors` at TorchRec's default. Ids of
            tables that it lacks count as drawn uniformly.
        auto_dist_groups: also choose how many dist groups there are and which table is in which,
            see `choose_dist_groups`; a constraint that names the `dist_group` of a table goes
            before. Without it they are left to the sharder's `num_dist_groups`.
        tier_speeds: of a rank's memory and storage, such as `load_hardware(..).tier_speeds()`;
            without it as far as the topology tells.
        calibration: of the ranks' machine, such as `load_hardware(..).calibration()`: with measured
            costs, times are predicted from them.

    Raises:
        TypeError: `enumerator`, `profile` or `calibration` is of another class; `constraints` is no
            mapping from table names to `ParameterConstraints`.
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
    _partitioner: Partitioner

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
        *,
        profile: Profile | None = None,
        auto_dist_groups: bool = False,
        tier_speeds: TierSpeeds | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if enumerator is not None and not isinstance(enumerator, EcoRecEnumerator):
            raise TypeError(
                f"enumerator must be an EcoRecEnumerator, got {type(enumerator).__name__}: "
                "TorchRec's does not know TT tables"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        _check_constraints(constraints)
        if calibration is not None and not isinstance(calibration, Calibration):
            raise TypeError(f"calibration must be a Calibration, got {type(calibration).__name__}")
        if profile is not None:
            constraints = _with_lookups(constraints or {}, profile)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation
            or FixedPercentageStorageReservation(RESERVED_SHARE),
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
            self._enumerator = EcoRecEnumerator(
                self._topology,
                self._batch_size,
                constraints,
                profile=profile,
                tier_speeds=tier_speeds,
                calibration=calibration,
            )
        self._profile = profile
        self._auto_dist_groups = auto_dist_groups
        self._tier_speeds = tier_speeds
        self._calibration = calibration
        self._search_is_torchrecs = any((proposer, partitioner, performance_model, plan_loader))
        self._planned: tuple[list[Candidate], Topology] | None = None
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
        candidates = self._enumerator.candidates(module, sharders)
        if not candidates:
            return RecordedPlan({}, world_size=self._topology.world_size)
        forms = table_forms(candidates, self._constraints, self._topology)
        inputs = self._inputs(module, sharders, forms)
        try:
            capacity = inputs.capacity()
        except PlannerError as error:
            raise shortage_error(inputs) from error
        search = PlacementSearch(capacity)
        torchrecs = PartitionerCheck(self._partitioner, self._enumerator, capacity)
        fits: FitCheck = torchrecs if self._search_is_torchrecs else search.fit
        chosen = least_compression(forms, fits)
        if chosen is None:
            raise shortage_error(inputs)
        if self._search_is_torchrecs:
            stock_plan = self._searched_by_torchrec(module, sharders, chosen, torchrecs)
        else:
            if any(form.is_tiered for form in chosen.values()):
                others = [c for c in candidates if c.tier_level is None]
                untiered = table_forms(others, self._constraints, self._topology)
                chosen = hidden_fetches(untiered, chosen, search.fit_unhindered) or chosen
            placed = search.fastest(list(chosen.values()))
            stock_plan = self._as_placed(module, sharders, placed)
        plan = _recorded(stock_plan, candidates, self._best_plan)
        self._place_in_dist_groups(plan)
        plan.world_size = self._topology.world_size
        self._warn_without_optimizer()
        self.report = PlanReport.of(
            plan,
            module,
            options=self._best_plan,
            capacity=capacity,
            indivisible_ms=max(form.shortest_ms for form in chosen.values()),
        )
        shardings = [candidate for form in chosen.values() for candidate in form.shardings]
        self._planned = shardings, capacity
        if self._calibration is not None and "step" in self._calibration:
            step = self.predict_step(DenseWork.of(module))
            self.report = replace(self.report, step=step)
        return plan

    def predict_step(self, dense: DenseWork, plan: ShardingPlan | None = None) -> StepPrediction:
        """A step of the whole model, from the calibration's measured costs.

        Args:
            dense: the model beside its tables.
            plan: of the same model and in shardings that the last plan chose among; without it
                the last plan.

        Raises:
            ValueError: nothing was planned yet, the calibration has no measured costs of lookups,
                or the plan lacks a table or has shardings that the last plan did not choose among.
        """
        if self._planned is None:
            raise ValueError("predict_step(): plan() comes first")
        if self._calibration is None or "tt_forward" not in self._calibration:
            raise ValueError("predict_step() needs a calibration with measured costs of lookups")
        options = self._best_plan if plan is None else self._options_of(plan)
        lookups = sum(lookups_per_sample(option, self._constraints) for option in options)
        return predict_step(
            options, self._topology, self._calibration, dense, self._batch_size, lookups
        )

    def baselines(self, unique_ids: Mapping[str, float]) -> list[Baseline]:
        """Other planners' placements of the last plan's tables in its forms, at the same costs.

        Args:
            unique_ids: table -> distinct ids in a global batch, which EcoRec places by.

        Raises:
            ValueError: nothing was planned yet.
        """
        if self._planned is None:
            raise ValueError("baselines(): plan() comes first")
        shardings, capacity = self._planned
        return [
            greedy_by_unique_ids(shardings, unique_ids, capacity),
            torchrec_greedy(shardings, capacity),
        ]

    def _options_of(self, plan: ShardingPlan) -> list[ShardingOption]:
        """The options, with ranks, that a plan's entries are.

        Raises:
            ValueError: a table has no entry, or one that is no option of the last plan's search.
        """
        found: dict[str, ShardingOption] = {}
        for candidate in self._enumerator._candidates:
            option = candidate.option
            entry = plan.plan.get(option.path, {}).get(option.name)
            if entry is None:
                raise ValueError(f"table {option.name!r}: the plan has no entry for {option.fqn!r}")
            ranks = entry.ranks or []
            spec, tiers = getattr(entry, "tt", None), tiers_of(entry)
            is_same = (entry.sharding_type, entry.compute_kernel, spec, tiers, len(ranks)) == (
                option.sharding_type,
                option.compute_kernel,
                candidate.tt,
                option_tiers(option),
                sum(candidate.counts),
            )
            if is_same and option.fqn not in found:
                found[option.fqn] = self._enumerator.expanded(candidate)
                for shard, rank in zip(found[option.fqn].shards, ranks, strict=True):
                    shard.rank = rank
        for path, entries in plan.plan.items():
            for name, entry in entries.items():
                if f"{path}.{name}" not in found:
                    raise ValueError(
                        f"table {name!r}: {entry.sharding_type} by {entry.compute_kernel} is no "
                        "option that the planner has looked at"
                    )
        return list(found.values())

    def _place_in_dist_groups(self, plan: RecordedPlan) -> None:
        """As the constraints ask, and as predicted; others are left to the sharder."""
        predicted = {}
        if self._auto_dist_groups:
            cost_ms = group_ms(self._topology.compute_device, self._calibration)
            predicted = choose_dist_groups(self._best_plan, cost_ms)
        for path, module_plan in plan.plan.items():
            for table, entry in module_plan.items():
                constraint = EcoRecConstraints.of((self._constraints or {}).get(table))
                asked = constraint.dist_group
                dist_group = predicted.get((path, table)) if asked is None else asked
                if dist_group is not None:
                    module_plan[table] = with_dist_group(entry, dist_group)

    def _as_placed(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        placed: PlacedTables,
    ) -> ShardingPlan:
        """TorchRec's plan, checked, told to callbacks and stats, of a finished placement."""
        proposal = [self._enumerator.expanded(candidate) for candidate in placed.candidates]
        plan = _FinishedPlan(placed.options(self._enumerator))
        partitioner, proposers = self._partitioner, self._proposers
        self._partitioner, self._proposers = _AsPlaced(plan), [_OneProposal(proposal)]
        self._enumerator.narrowed = placed.candidates
        try:
            return super().plan(module, sharders)
        finally:
            self._partitioner, self._proposers = partitioner, proposers
            self._enumerator.narrowed = None

    def _searched_by_torchrec(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        chosen: Mapping[str, Form],
        fits: PartitionerCheck,
    ) -> ShardingPlan:
        """TorchRec's search, with the form of every table decided and a proposal that fits."""
        proposal = fits(list(chosen.values()))
        assert proposal is not None
        proposers = self._proposers
        self._proposers = [_OneProposal(proposal), *proposers]
        shardings = (candidate for form in chosen.values() for candidate in form.shardings)
        self._enumerator.narrowed = [c for c in shardings if c.block is None]
        try:
            return super().plan(module, sharders)
        finally:
            self._proposers = proposers
            self._enumerator.narrowed = None

    def _inputs(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        forms: Mapping[str, list[Form]],
    ) -> PlanningInputs:
        return PlanningInputs(
            module,
            sharders,
            self._topology,
            self._batch_size,
            self._constraints or {},
            self._storage_reservation,
            self._partitioner if self._search_is_torchrecs else None,
            known_forms=forms,
            profile=self._profile,
            tier_speeds=self._tier_speeds,
            calibration=self._calibration,
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


def _with_lookups(
    constraints: Mapping[str, ParameterConstraints], profile: Profile
) -> dict[str, ParameterConstraints]:
    """The constraints, with the profile's lookups per sample where they say the default."""
    if not isinstance(profile, Profile):
        raise TypeError(f"profile must be a Profile, got {type(profile).__name__}: load_profile()")
    completed = dict(constraints)
    for name, table in profile.tables.items():
        constraint = copy.copy(constraints.get(name) or EcoRecConstraints())
        if constraint.pooling_factors == EcoRecConstraints().pooling_factors:
            constraint.pooling_factors = list(table.lookups_per_sample)
        completed[name] = constraint
    return completed


class _OneProposal(Proposer):
    """Proposes one known proposal."""

    def __init__(self, proposal: list[ShardingOption]) -> None:
        self._proposal: list[ShardingOption] | None = proposal

    def load(self, search_space: list[ShardingOption], enumerator: object = None) -> None:
        pass

    def feedback(self, *args: object, **kwargs: object) -> None:
        self._proposal = None

    def propose(self) -> list[ShardingOption] | None:
        return self._proposal


class _AsPlaced(Partitioner):
    """Leaves every shard where it is: on the ranks of a finished plan."""

    def __init__(self, plan: _FinishedPlan) -> None:
        self._plan = plan

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        return self._plan


class _FinishedPlan(list[ShardingOption]):
    """Options with ranks that nobody changes.

    TorchRec copies the best plan deeply, which takes seconds for tables on hundreds of ranks.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> _FinishedPlan:
        return self


def _recorded(
    plan: ShardingPlan, candidates: Sequence[Candidate], options: Sequence[ShardingOption]
) -> RecordedPlan:
    """TorchRec's plan in the model's order, with TT shapes, tiers and the sizes of the tables."""
    placed = {option.fqn: option for option in options}
    recorded = RecordedPlan({})
    for option in (candidate.option for candidate in candidates):
        module_plan = recorded.plan.setdefault(option.path, EmbeddingModuleShardingPlan())
        if option.name in module_plan:
            continue
        entry = plan.plan[option.path][option.name]
        spec, tiers = tt_of(placed[option.fqn]), option_tiers(placed[option.fqn])
        if spec is not None:
            entry = TTParameterSharding(**vars(entry), tt=spec)
        if tiers is not None:
            entry = TieredParameterSharding(**vars(entry), tiers=tiers)
        module_plan[option.name] = entry
        shapes = recorded.table_shapes.setdefault(option.path, {})
        shapes[option.name] = tuple(option.tensor.shape)
    return recorded
