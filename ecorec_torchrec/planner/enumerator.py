"""The space of options of a model: TorchRec's for dense tables, and TT shapes where allowed."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import data_type_to_dtype

from ecorec_torchrec.modules import TT_DATA_TYPES
from ecorec_torchrec.plan import (
    TIERED_SHARDING_TYPES,
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    WHY_TT_IS_NOT_CUT,
)
from ecorec_torchrec.plan.tables import core_specs, module_dtypes, module_specs
from ecorec_torchrec.tt import TTSpec

from .calibration import Calibration
from .constraints import EcoRecConstraints
from .estimators import EcoRecPerfEstimator, EcoRecStorageEstimator
from .options import Candidate, TTShardingOption, tt_of
from .profile import Profile
from .tier_options import (
    TieredShardingOption,
    TierMenu,
    why_not_tiered,
)
from .tiers import TierSpeeds

HOST_KERNELS = (
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)
_TT_DTYPES = tuple(data_type_to_dtype(data_type) for data_type in TT_DATA_TYPES)
_GRID = ShardingType.GRID_SHARD.value
_COLUMN_SHARDINGS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value, _GRID)
_COLUMN_CUTS = (2, 4)
_MIN_COLUMNS = 32  # of a shard that the planner cuts; TorchRec's estimates know blocks of 32 to 128
_SHARDING_ORDER = {sharding_type.value: i for i, sharding_type in enumerate(ShardingType)}


@dataclass(frozen=True)
class PlannedTable:
    """A table to be planned, and in which forms it may be stored.

    Args:
        path, name: where it is in the model.
        num_embeddings: N.
        dtype: storage type of its weight or cores.
        sharder: the sharder of its module.
        specs: the TT shapes that it may have, the largest first.
        dense: whether it may be dense.
        tiered: whether it may be tiered.
    """

    path: str
    name: str
    num_embeddings: int
    dtype: torch.dtype
    sharder: ModuleSharder[nn.Module]
    specs: tuple[TTSpec, ...]
    dense: bool
    tiered: bool = False

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.name}"

    def kernels(self, sharding_type: str, device: str) -> list[str]:
        """Compute kernels of its sharder, and the one of TT and tiered tables if it may be so."""
        kernels = list(self.sharder.compute_kernels(sharding_type, device))
        as_tt = self.can_be_tt and sharding_type in TT_SHARDING_TYPES
        if as_tt or (self.tiered and sharding_type in TIERED_SHARDING_TYPES):
            kernels.append(TT_COMPUTE_KERNEL)
        return kernels

    @property
    def can_be_tt(self) -> bool:
        return bool(self.specs) and getattr(self.sharder, "shards_tt_tables", False)


class EcoRecEnumerator(EmbeddingEnumerator):
    """TorchRec's `EmbeddingEnumerator`, and one option per TT shape and TT sharding type.

    A table with a shape of its own (`TTEmbeddingBagConfig.tt`, or `tt=` of
    `TTEmbeddingBagCollection`) gets that shape and no dense option; a table that is allowed
    `tt_ranks` gets a suggested shape per rank. The options are in the model's order, so equal input
    gives an equal plan.

    A table that may be tiered gets options of several cache sizes (`TierMenu`).

    A table that may be TT or tiered is not offered host memory behind the GPU (`fused_uvm`,
    `fused_uvm_caching`) unless its constraint names these kernels.

    Args:
        topology, batch_size, constraints, estimator, use_exact_enumerate_order: as TorchRec's.
        max_rank: TT ranks above it are lowered to it, those of the model's own shapes too; what
            the planner tries when it looks for a cure.
        profile: of the data, for the time estimates.
        tier_speeds: of a rank, for those of tiered tables.
        calibration: of the machine, for the time estimates.
    """

    _estimators: list[ShardEstimator]

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
        *,
        max_rank: int | None = None,
        profile: Profile | None = None,
        tier_speeds: TierSpeeds | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(
            topology,
            batch_size,
            constraints,
            estimator
            or [
                EcoRecPerfEstimator(
                    topology=topology,
                    constraints=constraints,
                    profile=profile,
                    calibration=calibration,
                ),
                EcoRecStorageEstimator(topology=topology, constraints=constraints),
            ],
            use_exact_enumerate_order,
        )
        self._max_rank = max_rank
        self._tier_menu = TierMenu(topology, constraints, profile, tier_speeds)
        self._profiles = {} if profile is None else profile.tables
        self._as_templates = False
        self._candidates: list[Candidate] = []
        self._candidates_of: tuple[nn.Module, list[ModuleSharder[nn.Module]]] | None = None
        self.narrowed: Sequence[Candidate] | None = None
        """What `enumerate` gives, in place of all options."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """All options, or the `narrowed` ones; copies that the caller may change.

        Raises:
            PlannerError: the constraints leave a table no option; the message names both.
        """
        candidates = self.candidates(module, sharders)
        stock = [candidate for candidate in candidates if candidate.block is None]
        options = self.narrowed if self.narrowed is not None else stock
        self._last_stored_search_space = [self.expanded(candidate) for candidate in options]
        return [self.expanded(candidate) for candidate in options]

    def candidates(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[Candidate]:
        """All options, and dense tables in more column shards than TorchRec would cut.

        Raises:
            PlannerError: as `enumerate`.
        """
        if (module, sharders) != self._candidates_of:
            self._candidates = self._make_candidates(module, sharders)
            self._candidates_of = (module, sharders)
        return self._candidates

    def expanded(self, candidate: Candidate) -> ShardingOption:
        """The option with all its shards and their estimates, and without ranks."""
        stock = candidate.option
        sizes, offsets = self._layout(stock, stock.sharding_type, candidate.block)
        runs = zip(stock.shards, candidate.counts, strict=True)
        estimates = itertools.chain(*(itertools.repeat(shard, count) for shard, count in runs))
        option = copy.copy(stock)
        option.shards = [
            Shard(list(size), list(offset), storage=shard.storage, perf=shard.perf)
            for size, offset, shard in zip(sizes, offsets, estimates, strict=True)
        ]
        return option

    def _make_candidates(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[Candidate]:
        tables = {table.fqn: table for table in self.tables(module, sharders)}
        self._warn_of_unknown_tables({table.name for table in tables.values()})
        for table in tables.values():
            self._check(table)
        templates = self._templates(module, sharders)
        candidates: list[Candidate] = []
        for fqn, table in tables.items():
            template = templates.get(fqn)  # none for a table of another device group
            found = [] if template is None else list(self._candidates_like(template, table))
            if not found:  # a table without options would silently stay unsharded
                limits = self._constraint(table.name).limits() or "no constraint"
                raise _impossible(table.name, f"on {self._compute_device}, with {limits}")
            candidates += sorted(found, key=_order_within_table)
        self.populate_estimates([candidate.option for candidate in candidates])
        return candidates

    def _templates(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> dict[str, ShardingOption]:
        """One option of TorchRec's per table, to be cut into other shards.

        TorchRec makes every shard of every option, on hundreds of ranks millions.
        """
        estimators = self._estimators
        self._estimators = []
        self._as_templates = True
        try:
            return {option.fqn: option for option in super().enumerate(module, sharders)}
        finally:
            self._estimators = estimators
            self._as_templates = False
            self._last_stored_module = None  # TorchRec's cache, of what has no estimates

    def _candidates_like(
        self, template: ShardingOption, table: PlannedTable
    ) -> Iterator[Candidate]:
        constraint = self._constraint(table.name)
        for sharding_type, blocks in self._cuts(table, template.tensor.shape[1]):
            kernels = table.kernels(sharding_type, self._compute_device)
            allowed = self._filter_compute_kernels(table.name, kernels, sharding_type)
            for block in blocks:
                sizes, offsets = self._layout(template, sharding_type, block)
                for kernel in allowed:
                    option = copy.copy(template)
                    option.sharding_type, option.compute_kernel = sharding_type, kernel
                    option.partition_by = get_partition_by_type(sharding_type)
                    option.shards, counts = _runs(sizes, offsets)
                    for form in self._in_allowed_forms(option, table, constraint):
                        yield Candidate(form, counts, block)

    def _cuts(self, table: PlannedTable, columns: int) -> Iterator[tuple[str, list[int | None]]]:
        """Sharding types of a table, each with its columns per shard; None is TorchRec's choice.

        TorchRec offers grids only where a constraint names them. As it offers no narrower columns
        either, they come along with these wherever a table may be cut by rows and columns.
        """
        constraint, offered = self._constraint(table.name), table.sharder.sharding_types
        sharder_key = sharder_name(table.sharder.module_type)
        types = offered(self._compute_device)
        filtered = self._filter_sharding_types(table.name, types, sharder_key)
        narrow = _narrow_blocks(columns) if constraint.min_partition is None else []
        for sharding_type in filtered:
            is_cut = sharding_type in _COLUMN_SHARDINGS
            yield sharding_type, [None, *narrow] if is_cut else [None]
        if (
            not constraint.sharding_types
            and _GRID in types
            and ShardingType.TABLE_ROW_WISE.value in filtered
            and self._world_size > self._local_world_size
        ):
            yield _GRID, list(narrow)

    def _in_allowed_forms(
        self, stock: ShardingOption, table: PlannedTable, constraint: EcoRecConstraints
    ) -> list[ShardingOption]:
        """What one of TorchRec's options becomes: itself, one per TT shape or cache size, none."""
        if stock.compute_kernel == TT_COMPUTE_KERNEL:
            forms: list[ShardingOption] = []
            # Another module's table of the same name may be what only this one cannot.
            if table.tiered and stock.sharding_type in TIERED_SHARDING_TYPES:
                forms += self._tier_menu.options(stock, table.sharder, constraint)
            if table.can_be_tt and stock.sharding_type in TT_SHARDING_TYPES:
                forms += [TTShardingOption.of(stock, spec, table.dtype) for spec in table.specs]
            return forms
        spilled = stock.compute_kernel in HOST_KERNELS
        other_forms = table.specs or table.tiered
        named = stock.compute_kernel in (constraint.compute_kernels or [])
        if spilled and other_forms and not named:
            return []
        return [stock] if table.dense else []

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """As TorchRec's; tiered tables are the tables in their slots, and what fetching takes."""
        looked_up = [
            option.in_slots() if isinstance(option, TieredShardingOption) else option
            for option in sharding_options
        ]
        super().populate_estimates(looked_up)
        for option, in_slots in zip(sharding_options, looked_up, strict=True):
            if isinstance(option, TieredShardingOption):
                self._tier_menu.estimate(option, in_slots)

    def _layout(
        self, option: ShardingOption, sharding_type: str, block: int | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Sizes and offsets of all shards, as TorchRec cuts."""
        return calculate_shard_sizes_and_offsets(
            tensor=option.tensor,
            world_size=self._world_size,
            local_world_size=self._local_world_size,
            sharding_type=sharding_type,
            col_wise_shard_dim=block or self._constraint(option.name).min_partition,
            device_memory_sizes=self._device_memory_sizes,
            num_buckets=self._get_num_buckets(option.name, option.module[1]),
        )

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        if self._as_templates:
            return [ShardingType.TABLE_WISE.value]
        return super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if self._as_templates:
            return [EmbeddingComputeKernel.FUSED.value]
        return super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)

    def tables(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> Iterator[PlannedTable]:
        """The tables that the sharders take, in the model's order."""
        by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}

        def visit(path: str, child: nn.Module) -> Iterator[PlannedTable]:
            sharder = by_type.get(sharder_name(type(child)))
            if sharder is None:
                for name, grandchild in child.named_children():
                    yield from visit(f"{path}.{name}" if path else name, grandchild)
                return
            _refuse_nested_cores(path, child, sharder)
            own, cores, dtypes = module_specs(child), core_specs(child), module_dtypes(child)
            for name, weight in sharder.shardable_parameters(child).items():
                dtype = dtypes.get(name, weight.dtype)
                specs, dense = self._forms(name, weight, dtype, own.get(name), name in cores)
                tiered = self._may_be_tiered(name, weight, sharder, own.get(name))
                dense &= self._constraint(name).tiers != "always"
                yield PlannedTable(
                    path, name, weight.shape[0], dtype, sharder, specs, dense, tiered
                )

        yield from visit("", module)

    def _forms(
        self,
        name: str,
        weight: torch.Tensor,
        dtype: torch.dtype,
        own: TTSpec | None,
        has_cores: bool,
    ) -> tuple[tuple[TTSpec, ...], bool]:
        """The TT shapes that a table may have, and whether it may be dense."""
        constraint = self._constraint(name)
        unfit = _why_not_tt(dtype, constraint)
        if unfit and (constraint.tt == "always" or (own and constraint.tt != "never")):
            raise _impossible(name, f"it is to be TT, but {unfit}")
        if own is not None:
            if constraint.tt == "never" and has_cores:
                raise _impossible(name, "tt='never', but the model holds it as TT cores")
            if constraint.tt_ranks:
                warnings.warn(
                    f"table {name!r}: tt_ranks={constraint.tt_ranks} is ignored, the model gives "
                    f"it the shape {own}",
                    stacklevel=2,
                )
            return ((), True) if constraint.tt == "never" else ((self._lowered(own),), False)
        if constraint.tt == "always" and not constraint.tt_ranks:
            raise _impossible(
                name, "tt='always', but neither tt_ranks nor the model's config gives it a shape"
            )
        if unfit and constraint.tt_ranks:
            warnings.warn(f"table {name!r}: tt_ranks is ignored, {unfit}", stacklevel=2)
            return (), True
        rows, columns = weight.shape
        if not constraint.tt_ranks:
            return (), True
        widest = _suggested(rows, columns, max(constraint.tt_ranks))  # the factors are the same
        suggested = {self._lowered(_cut(widest, rank)) for rank in constraint.tt_ranks}
        specs = tuple(sorted(suggested, key=lambda spec: (-spec.num_parameters, spec.ranks)))
        return specs, constraint.tt != "always"

    def _may_be_tiered(
        self,
        name: str,
        weight: torch.Tensor,
        sharder: ModuleSharder[nn.Module],
        own: TTSpec | None,
    ) -> bool:
        constraint = self._constraint(name)
        if constraint.tier_folder is None:
            return False
        has_shape = own is not None and constraint.tt != "never"
        unfit = (
            f"the model gives it the shape {own}"
            if has_shape
            else why_not_tiered(name, weight, sharder)
        )
        if unfit and constraint.tiers == "always":
            raise _impossible(name, f"tiers='always', but {unfit}")
        if unfit:
            warnings.warn(f"table {name!r}: tier_folder is ignored, {unfit}", stacklevel=2)
        return unfit is None

    def _lowered(self, spec: TTSpec) -> TTSpec:
        return spec if self._max_rank is None else _cut(spec, self._max_rank)

    def _constraint(self, name: str) -> EcoRecConstraints:
        """The constraint of a table; TorchRec's own kind says nothing about TT."""
        return EcoRecConstraints.of((self._constraints or {}).get(name))

    def _check(self, table: PlannedTable) -> None:
        """Refuses a table that would have no option, before TorchRec does so without a reason."""
        self._check_profile(table)
        constraint, device = self._constraint(table.name), self._compute_device
        offered = table.sharder.sharding_types(device)
        kernels = [
            (sharding_type, kernel)
            for sharding_type in offered
            if sharding_type in (constraint.sharding_types or offered)
            for kernel in table.kernels(sharding_type, device)
            if kernel in (constraint.compute_kernels or [kernel])
        ]
        limits = (
            f"sharding_types={constraint.sharding_types} and "
            f"compute_kernels={constraint.compute_kernels}"
        )
        can_be_dense = table.dense and any(kernel != TT_COMPUTE_KERNEL for _, kernel in kernels)
        if table.tiered and any(
            kernel == TT_COMPUTE_KERNEL and sharding_type in TIERED_SHARDING_TYPES
            for sharding_type, kernel in kernels
        ):
            return
        if not table.specs:
            if not can_be_dense:
                raise _impossible(
                    table.name, f"{limits}; on {device}, its sharder offers {', '.join(offered)}"
                )
            return
        sharder = type(table.sharder).__name__
        if not table.can_be_tt:
            reason = f"{sharder} shards no TT tables: plan with get_ecorec_sharders()"
            if not can_be_dense:
                raise _impossible(table.name, reason)
            warnings.warn(f"table {table.name!r}: tt_ranks is ignored, {reason}", stacklevel=3)
        elif not can_be_dense and not any(kernel == TT_COMPUTE_KERNEL for _, kernel in kernels):
            raise _impossible(table.name, f"{limits}, and it is a TT table; {WHY_TT_IS_NOT_CUT}")

    def _check_profile(self, table: PlannedTable) -> None:
        profile = self._profiles.get(table.name)
        if profile is not None and profile.num_embeddings != table.num_embeddings:
            raise ValueError(
                f"table {table.name!r}: the profile is of {profile.num_embeddings} rows, the model "
                f"has {table.num_embeddings}"
            )

    def _warn_of_unknown_tables(self, names: set[str]) -> None:
        unknown = sorted(set(self._constraints or {}) - names - set(self._profiles))
        if unknown:
            warnings.warn(
                f"constraints for {', '.join(unknown)} are ignored: no such table to shard",
                stacklevel=3,
            )


def _why_not_tt(dtype: torch.dtype, constraint: EcoRecConstraints) -> str | None:
    if dtype not in _TT_DTYPES:
        return f"cores cannot be stored as {dtype}"
    output = constraint.output_dtype
    if output is not None and output not in TT_DATA_TYPES:
        return f"output_dtype={output} is none that TT lookups have"
    return None


def _refuse_nested_cores(path: str, module: nn.Module, sharder: ModuleSharder[nn.Module]) -> None:
    """A sharder of TorchRec's for a module around a collection knows dense tables only."""
    if getattr(sharder, "shards_tt_tables", False):
        return
    for child in module.modules():
        for table in core_specs(child):
            raise _impossible(
                table,
                f"{path!r} is a {type(module).__name__}, whose sharder {type(sharder).__name__} "
                "shards no TT tables",
            )


@lru_cache(maxsize=4096)
def _suggested(num_embeddings: int, embedding_dim: int, rank: int) -> TTSpec:
    return TTSpec.suggest(num_embeddings, embedding_dim, rank=rank)


def _cut(spec: TTSpec, rank: int) -> TTSpec:
    """The shape with all ranks lowered to `rank`."""
    if max(spec.ranks) <= rank:
        return spec
    ranks = tuple(min(own, rank) for own in spec.ranks)
    return TTSpec(spec.num_embeddings, spec.row_factors, spec.col_factors, ranks)


def _narrow_blocks(embedding_dim: int) -> list[int]:
    """Columns per shard when a table is cut in 2 and in 4, where that leaves enough."""
    return [
        embedding_dim // cuts
        for cuts in _COLUMN_CUTS
        if embedding_dim % (4 * cuts) == 0 and embedding_dim // cuts >= _MIN_COLUMNS
    ]


def _runs(
    sizes: Sequence[list[int]], offsets: Sequence[list[int]]
) -> tuple[list[Shard], tuple[int, ...]]:
    """The first shard of every run of equal sizes, and the lengths of the runs."""
    shards, counts = [], []
    for size, run in itertools.groupby(range(len(sizes)), key=lambda i: sizes[i]):
        positions = list(run)
        shards.append(Shard(list(size), list(offsets[positions[0]])))
        counts.append(len(positions))
    return shards, tuple(counts)


def _order_within_table(candidate: Candidate) -> tuple[int, int, int, str, int]:
    """Dense, then tiered, then TT, the largest first; TorchRec's order depends on string hashes."""
    option, tt = candidate.option, tt_of(candidate.option)
    form, size = (0, 0) if tt is None else (2, -tt.num_parameters)
    if isinstance(option, TieredShardingOption):
        form, size = 1, option.level
    cuts = sum(candidate.counts)
    return form, size, _SHARDING_ORDER[option.sharding_type], option.compute_kernel, cuts


def _impossible(table: str, reason: str) -> PlannerError:
    return PlannerError(
        f"table {table!r} has no sharding option: {reason}", PlannerErrorType.STRICT_CONSTRAINTS
    )
