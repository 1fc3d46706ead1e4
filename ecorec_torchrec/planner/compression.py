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
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from ecorec_torchrec.tt import TTSpec

from .options import Candidate, main_memory_bytes


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
    shardings: tuple[Candidate, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def shortest_ms(self) -> float:
        """Predicted time of the longest shard, in the sharding where that is shortest."""
        return min(max(perf.total for perf in sharding.perfs) for sharding in self.shardings)


FitCheck = Callable[[Sequence[Form]], object | None]
"""Of one form per table: something that is not None if they can be placed."""


def table_forms(
    candidates: Sequence[Candidate],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> dict[str, list[Form]]:
    """The forms of every table, from the least compressed on; each needs less memory than the last.

    Args:
        candidates: the whole search space, with estimates.
    """
    by_table: dict[str, dict[TTSpec | None, list[Candidate]]] = {}
    for candidate in candidates:
        by_shape = by_table.setdefault(candidate.option.fqn, {})
        by_shape.setdefault(candidate.tt, []).append(candidate)
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
    shardings: list[Candidate],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> Form:
    first = shardings[0].option
    compression = 0.0
    if tt is not None:
        per_sample = zip(first.input_lengths, get_num_poolings(constraints, first), strict=True)
        lookups = sum(length * count for length, count in per_sample)
        compression = lookups * max(0.0, math.log2(first.tensor.numel() / tt.num_parameters))

    def sizes(candidate: Candidate) -> list[int]:
        return [main_memory_bytes(storage, topology) for storage in candidate.storages]

    def largest_shard(candidate: Candidate) -> int:
        return max(sizes(candidate))

    def total(candidate: Candidate) -> int:
        pairs = zip(sizes(candidate), candidate.counts, strict=True)
        return sum(size * count for size, count in pairs)

    def slowest_shard(candidate: Candidate) -> float:
        return max(perf.total for perf in candidate.perfs)

    smallest = min(shardings, key=total)
    candidates = (min(shardings, key=slowest_shard), min(shardings, key=largest_shard), smallest)
    return Form(tt, compression, total(smallest), tuple(shardings), candidates)


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
