"""Which tables are compressed, and to which rank: as little as makes the model fit.

The planner's first two aims, in this order: no rank over its cap; least lookup-weighted
compression, that is, the least sum over tables of (lookups per sample) * log2(dense bytes / TT
bytes). Only then, with the forms of all tables decided, does predicted step time choose shardings
and ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank

from ecorec_torchrec.tt import TTSpec

from .options import tt_of
from .partitioner import main_memory_bytes


@dataclass(frozen=True)
class Form:
    """One way to store a table, and the shardings it can have then.

    Args:
        tt: the shape of the cores, None for a dense table.
        compression: lookups per sample * log2(dense bytes / TT bytes); 0 for a dense table.
        num_bytes: the least that all its shards together need of the capped memory.
        shardings: all options of this form.
        candidates: those worth a try when only fitting counts: the fastest, the one with the
            smallest largest shard, the smallest.
    """

    tt: TTSpec | None
    compression: float
    num_bytes: int
    shardings: tuple[ShardingOption, ...] = ()
    candidates: tuple[ShardingOption, ...] = ()


FitCheck = Callable[[Sequence[Form]], list[ShardingOption] | None]
"""Of one form per table: a proposal that can be placed, or None."""


def table_forms(
    options: Sequence[ShardingOption],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> dict[str, list[Form]]:
    """The forms of every table, from the least compressed on; each needs less memory than the last.

    Args:
        options: the whole search space, with estimates.
    """
    by_table: dict[str, dict[TTSpec | None, list[ShardingOption]]] = {}
    for option in options:
        by_table.setdefault(option.fqn, {}).setdefault(tt_of(option), []).append(option)
    forms: dict[str, list[Form]] = {}
    for fqn, by_shape in by_table.items():
        # Dense first, then shape after shape, as the enumerator orders them.
        kept: list[Form] = []
        for tt, shardings in by_shape.items():
            form = _form(tt, shardings, constraints, topology)
            if not kept or form.num_bytes < kept[-1].num_bytes:
                kept.append(form)
        forms[fqn] = kept
    return forms


def _form(
    tt: TTSpec | None,
    shardings: list[ShardingOption],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> Form:
    first = shardings[0]
    compression = 0.0
    if tt is not None:
        per_sample = zip(first.input_lengths, get_num_poolings(constraints, first), strict=True)
        lookups = sum(length * count for length, count in per_sample)
        compression = lookups * max(0.0, math.log2(first.tensor.numel() / tt.num_parameters))

    def largest_shard(option: ShardingOption) -> int:
        return max(main_memory_bytes(shard.storage, topology) for shard in option.shards)

    def total(option: ShardingOption) -> int:
        return sum(main_memory_bytes(shard.storage, topology) for shard in option.shards)

    def slowest_shard(option: ShardingOption) -> float:
        return max(shard.perf.total for shard in option.shards)

    smallest = min(shardings, key=total)
    candidates = (min(shardings, key=slowest_shard), min(shardings, key=largest_shard), smallest)
    return Form(tt, compression, total(smallest), tuple(shardings), candidates)


class PlacementCheck:
    """Whether the tables fit in given forms: tries the partitioner on a few proposals.

    Args:
        partitioner: places a proposal or raises `PlannerError`.
        storage_constraint: the ranks with what is left of their memory for tables.
    """

    def __init__(self, partitioner: Partitioner, storage_constraint: Topology) -> None:
        self._partitioner = partitioner
        self._storage_constraint = storage_constraint
        self._capacity = sum(
            main_memory_bytes(device.storage, storage_constraint)
            for device in storage_constraint.devices
        )

    def __call__(self, forms: Sequence[Form]) -> list[ShardingOption] | None:
        """A proposal of these forms, one per table, that can be placed; None if there is none."""
        if sum(form.num_bytes for form in forms) > self._capacity:
            return None
        for proposal in zip(*(form.candidates for form in forms), strict=True):
            options = list(proposal)
            try:
                self._partitioner.partition(
                    proposal=options, storage_constraint=self._storage_constraint
                )
                return options
            except PlannerError:
                continue
            finally:
                reset_shard_rank(options)
        return None


def least_compression(
    forms: Mapping[str, Sequence[Form]], fits: FitCheck
) -> dict[str, Form] | None:
    """The forms with the least lookup-weighted compression among those that fit.

    Greedy, not exhaustive. Starting from all tables as they are, the step that frees most bytes for
    the compression it adds comes first (of tables that are read equally often: the largest), and as
    few steps are taken as make the model fit. Then each table, the most costly first, goes back to
    the least compressed form with which the whole still fits.

    Returns:
        Form per table, or None when not even the smallest forms fit.
    """
    tables = list(forms)

    def state(steps: Sequence[int]) -> list[int]:
        levels = [0] * len(tables)
        for table in steps:
            levels[table] += 1
        return levels

    def chosen(levels: Sequence[int]) -> list[Form]:
        return [forms[fqn][level] for fqn, level in zip(tables, levels, strict=True)]

    steps = _steps_by_worth(list(forms.values()))
    if fits(chosen(state(steps))) is None:
        return None
    few, enough = -1, len(steps)  # `few` steps do not fit, `enough` do
    while enough - few > 1:
        middle = (few + enough) // 2
        if fits(chosen(state(steps[:middle]))) is None:
            few = middle
        else:
            enough = middle
    levels = state(steps[:enough])
    costs = [form.compression for form in chosen(levels)]
    for table in sorted(range(len(tables)), key=lambda table: -costs[table]):
        for level in range(levels[table]):
            relaxed = [*levels[:table], level, *levels[table + 1 :]]
            if fits(chosen(relaxed)) is not None:
                levels = relaxed
                break
    return dict(zip(tables, chosen(levels), strict=True))


def _steps_by_worth(forms: Sequence[Sequence[Form]]) -> list[int]:
    """Table numbers, one per step to its next form, by bytes freed per compression added."""

    def entry(table: int, level: int) -> tuple[float, int, int]:
        now, then = forms[table][level], forms[table][level + 1]
        added = then.compression - now.compression
        freed = now.num_bytes - then.num_bytes
        return (-freed / added if added > 0 else -math.inf), table, level

    heap = [entry(table, 0) for table in range(len(forms)) if len(forms[table]) > 1]
    heapq.heapify(heap)
    steps = []
    while heap:
        _, table, level = heapq.heappop(heap)
        steps.append(table)
        if level + 2 < len(forms[table]):
            heapq.heappush(heap, entry(table, level + 1))
    return steps
