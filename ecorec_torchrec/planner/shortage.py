"""The error when no plan fits: what each rank needs and has, and what would help, with numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from .calibration import Calibration
from .compression import FitCheck, Form, least_compression, table_forms
from .constraints import EcoRecConstraints
from .enumerator import HOST_KERNELS, EcoRecEnumerator, PlannedTable
from .options import Candidate, main_memory_bytes
from .partitioner import PartitionerCheck
from .profile import Profile
from .search import PlacementSearch
from .tiers import TierSpeeds

_SUGGESTED_RANKS = (64, 32, 16, 8, 4)
_MIB = 2**20
_NO_LIMIT = Storage(hbm=2**62, ddr=2**62, ssd=2**62)


@dataclass(frozen=True)
class PlanningInputs:
    """All that decides whether a plan exists, so that a change of it can be tried.

    Args:
        module, sharders, topology, batch_size, constraints, reservation: as the planner's.
        partitioner: the user's own; None for `PlacementSearch`.
        max_rank: TT ranks above it are lowered to it.
        known_forms: of the tables, which caps and reservations leave as they are.
        profile, tier_speeds, calibration: as the planner's.
    """

    module: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    topology: Topology
    batch_size: int
    constraints: Mapping[str, ParameterConstraints]
    reservation: StorageReservation
    partitioner: Partitioner | None
    max_rank: int | None = None
    known_forms: Mapping[str, list[Form]] | None = None
    profile: Profile | None = None
    tier_speeds: TierSpeeds | None = None
    calibration: Calibration | None = None

    def enumerator(self) -> EcoRecEnumerator:
        return EcoRecEnumerator(
            self.topology,
            self.batch_size,
            dict(self.constraints),
            max_rank=self.max_rank,
            profile=self.profile,
            tier_speeds=self.tier_speeds,
            calibration=self.calibration,
        )

    def tables(self) -> list[PlannedTable]:
        return list(self.enumerator().tables(self.module, self.sharders))

    def forms(self) -> Mapping[str, list[Form]]:
        if self.known_forms is not None:
            return self.known_forms
        candidates = self.enumerator().candidates(self.module, self.sharders)
        return table_forms(candidates, self.constraints, self.topology)

    def changed(self, **changes: Any) -> PlanningInputs:
        """The same with other values that the tables' forms depend on."""
        return replace(self, known_forms=None, **changes)

    def capacity(self) -> Topology:
        """The ranks with what they have for tables.

        Raises:
            PlannerError: the reservation leaves nothing.
        """
        return copy.deepcopy(self.reservation).reserve(
            topology=self.topology,
            batch_size=self.batch_size,
            module=self.module,
            sharders=self.sharders,
            constraints=dict(self.constraints),
        )

    def fit(self) -> bool:
        """Whether there is a plan with every table in its smallest form."""
        try:
            return self.check()([forms[-1] for forms in self.forms().values()]) is not None
        except PlannerError:
            return False

    def check(self) -> FitCheck:
        """Whether given forms can be placed.

        Raises:
            PlannerError: the reservation leaves nothing.
        """
        if self.partitioner is None:
            return PlacementSearch(self.capacity()).fit
        return PartitionerCheck(self.partitioner, self.enumerator(), self.capacity())

    @property
    def memories(self) -> tuple[str, ...]:
        """The memories that tables can lie in, by name in `Storage`; the ranks' own first."""
        return ("ddr", "ssd") if self.topology.compute_device == "cpu" else ("hbm", "ddr", "ssd")

    def caps(self, memory: str) -> list[int]:
        return [getattr(device.storage, memory) for device in self.topology.devices]

    def with_cap(self, memory: str, cap: int) -> PlanningInputs:
        """The same with `cap` bytes of one memory on every rank."""
        topology = copy.deepcopy(self.topology)
        for device in topology.devices:
            setattr(device.storage, memory, cap)
        return replace(self, topology=topology)


def shortage_error(inputs: PlanningInputs) -> PlannerError:
    """The error for inputs that have no plan."""
    needed = _needed(inputs)
    try:
        left = [device.storage for device in inputs.capacity().devices]
        reserved_by = ""
    except PlannerError as error:
        left = [Storage(hbm=0, ddr=0) for _ in inputs.topology.devices]
        reserved_by = f"\n{type(inputs.reservation).__name__} leaves nothing: {error}"
    budgets = [
        Budget(
            memory,
            need=[getattr(storage, memory) for storage in needed],
            have=[getattr(storage, memory) for storage in left],
            cap=inputs.caps(memory),
        )
        for memory in inputs.memories
    ]
    lines = ["The tables do not fit, even with every table in its smallest allowed form."]
    lines += ["  rank  memory  need bytes        have bytes        (cap, less what is reserved)"]
    for rank in range(inputs.topology.world_size):
        lines += [f"  {rank:>4}  {budget.line(rank)}" for budget in budgets if budget.need[rank]]
    cures = list(_cures(inputs, budgets))
    if cures:
        lines += ["Cures, each of them enough:"]
        lines += [f"  {number}) {cure}" for number, cure in enumerate(cures, start=1)]
    return PlannerError("\n".join(lines) + reserved_by, PlannerErrorType.INSUFFICIENT_STORAGE)


@dataclass(frozen=True)
class Budget:
    """One kind of memory: per rank the bytes needed, there for tables, and there at all."""

    memory: str
    need: Sequence[int]
    have: Sequence[int]
    cap: Sequence[int]

    def line(self, rank: int) -> str:
        need, have, cap = self.need[rank], self.have[rank], self.cap[rank]
        return f"{self.memory:<6}  {need:<16,}  {have:<16,}  ({cap:,} - {cap - have:,})"


def _needed(inputs: PlanningInputs) -> list[Storage]:
    """What the smallest forms need, spread evenly over ranks without a cap.

    In the ranks' own memory where a table may lie there, though host memory could take it.
    """
    topology = copy.deepcopy(inputs.topology)
    for device in topology.devices:
        device.storage = copy.copy(_NO_LIMIT)

    def rank_memory(candidate: Candidate) -> tuple[bool, int]:
        sizes = [main_memory_bytes(storage, topology) for storage in candidate.storages]
        total = sum(size * count for size, count in zip(sizes, candidate.counts, strict=True))
        return candidate.option.compute_kernel in HOST_KERNELS, total

    smallest = [forms[-1] for forms in inputs.forms().values()]
    chosen = [min(form.shardings, key=rank_memory) for form in smallest]
    placed = PlacementSearch(topology).placed(chosen, by_memory=True)
    assert placed is not None, "without caps everything fits"
    needed = [Storage(hbm=0, ddr=0) for _ in topology.devices]
    for option in placed.options(inputs.enumerator()):
        for shard in option.shards:
            needed[shard.rank] += shard.storage
    return needed


def _cures(inputs: PlanningInputs, budgets: Sequence[Budget]) -> Iterator[str]:
    """Changes that were tried and make a plan possible."""
    tables = inputs.tables()
    yield from _allow_tt(inputs, tables)
    yield from _lower_rank(inputs, tables)
    for budget in budgets:
        yield from _raise_cap(inputs, budget)
    yield from _reserve_less(inputs, budgets[0])
    yield from _reduce_batch(inputs)


def _allow_tt(inputs: PlanningInputs, tables: Sequence[PlannedTable]) -> Iterator[str]:
    constraints = dict(inputs.constraints)
    allowed = {}
    for table in tables:
        stock = constraints.get(table.name)
        other_form = getattr(stock, "tiers", "auto") == "always"
        if not (table.specs or other_form) and getattr(stock, "tt", "auto") != "never":
            allowed[table.fqn] = table.name
    for rank in _SUGGESTED_RANKS if allowed else ():
        for name in allowed.values():
            stock = vars(inputs.constraints[name]) if name in inputs.constraints else {}
            constraints[name] = EcoRecConstraints(**(stock | {"tt_ranks": (rank,)}))
        changed = inputs.changed(constraints=constraints)
        changed = replace(changed, known_forms=changed.forms())
        if not changed.fit():
            continue
        chosen = least_compression(changed.forms(), changed.check())
        assert chosen is not None, "the smallest forms fit"
        names = [name for fqn, name in allowed.items() if chosen[fqn].tt is not None]
        yield f"Allow {_some(names)} to be TT: EcoRecConstraints(tt_ranks=({rank},))"
        return


def _lower_rank(inputs: PlanningInputs, tables: Sequence[PlannedTable]) -> Iterator[str]:
    smallest = [table.specs[-1] for table in tables if table.specs]
    rank = max((max(spec.ranks) for spec in smallest), default=1)
    while rank > 1:
        rank = 1 << ((rank - 1).bit_length() - 1)  # the next power of two below
        if inputs.changed(max_rank=rank).fit():
            names = [t.name for t in tables if t.specs and max(t.specs[-1].ranks) > rank]
            yield (
                f"Lower the TT ranks of {_some(names)} to {rank}: tt_ranks=({rank},), or "
                "the ranks of the shape that the model gives"
            )
            return


def _raise_cap(inputs: PlanningInputs, budget: Budget) -> Iterator[str]:
    rows = list(zip(budget.need, budget.cap, budget.have, strict=True))
    if all(need <= have for need, _, have in rows):
        return
    # Whether the reservation is a number of bytes or a share of the cap.
    cap = max(
        max(need + cap - have, need * cap // have if have > 0 else 0) for need, cap, have in rows
    )
    for attempt in range(32):
        cap = -(-cap // _MIB) * _MIB
        if inputs.with_cap(budget.memory, cap).fit():
            yield (
                f"Raise the topology's {budget.memory}_cap to {cap} bytes ({cap // _MIB:,} MiB) "
                f"per rank (now {min(budget.cap)})"
            )
            return
        cap = cap * 21 // 20 + 1 if attempt < 20 else 2 * cap


def _reserve_less(inputs: PlanningInputs, budget: Budget) -> Iterator[str]:
    reserved = min(budget.cap) - max(budget.need)
    if budget.memory != "hbm" or reserved < 0:
        return  # TorchRec's fixed reservations are of HBM
    if replace(inputs, reservation=FixedAbsoluteStorageReservation(reserved)).fit():
        yield (
            f"Reserve {reserved} bytes per rank for the rest of the model: "
            f"FixedAbsoluteStorageReservation({reserved})"
        )


def _reduce_batch(inputs: PlanningInputs) -> Iterator[str]:
    batch_size = inputs.batch_size
    while batch_size > 1:
        batch_size //= 2
        if inputs.changed(batch_size=batch_size).fit():
            yield f"Reduce the local batch size to {batch_size} (now {inputs.batch_size})"
            return


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"tables {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
