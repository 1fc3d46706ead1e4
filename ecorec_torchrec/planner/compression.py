"""Which tables are tiered or compressed, and how far: as little as makes the model fit.

The planner's first two aims, in this order: no rank over its cap; least lookup-weighted
compression, that is, the least sum over tables of (lookups per sample) * log2(dense bytes / TT
bytes). Only then, with the forms of all tables decided, does predicted step time choose shardings
and ranks.

Tiers are exact, so a tiered table counts as not compressed and comes before TT; among tables that
may be tiered, those go first whose rows take least time to fetch per byte that is freed: whole
tables of low demand (GB/s per GB) leave the fast memory, tables of high demand keep it. That holds
while fetching hides behind the lookups and collectives of the slowest rank; where it does not, and
only then, tiered tables that may be TT become TT until it does.
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

_LEAST_MS = 1e-9


@dataclass(frozen=True)
class Form:
    """One way to store a table, and the shardings it can have then.

    Args:
        tt: the shape of the cores, None for a dense table.
        compression: lookups per sample * log2(dense bytes / TT bytes); 0 for a table that is not
            TT.
        num_bytes: the least that all its shards together need of the capped memory.
        fetch_ms: the least that all shards of a tiered table take to fetch rows; 0 for another.
        host_price: what the second level of a tiered table takes of the hosts' memory, in bytes of
            the capped memory by the ratio of what there is of both.
        shardings: all options of this form.
        candidates: those worth a try when only fitting counts: the fastest, the one with the
            smallest largest shard, the smallest.
    """

    tt: TTSpec | None
    compression: float
    num_bytes: int
    fetch_ms: float = 0.0
    host_price: float = 0.0
    shardings: tuple[Candidate, ...] = ()
    candidates: tuple[Candidate, ...] = ()

    @property
    def shortest_ms(self) -> float:
        """Predicted time of the longest shard, in the sharding where that is shortest."""
        return min(max(map(max, sharding.ms, sharding.hidden_ms)) for sharding in self.shardings)

    @property
    def priced_bytes(self) -> float:
        """What it takes of all memories, in bytes of the capped one."""
        return self.num_bytes + self.host_price

    @property
    def is_tiered(self) -> bool:
        return any(candidate.tier_level is not None for candidate in self.shardings)


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
    by_table: dict[str, dict[tuple[TTSpec | None, int | None], list[Candidate]]] = {}
    for candidate in candidates:
        by_kind = by_table.setdefault(candidate.option.fqn, {})
        by_kind.setdefault((candidate.tt, candidate.tier_level), []).append(candidate)
    forms: dict[str, list[Form]] = {}
    for fqn, by_kind in by_table.items():
        # Dense first, then cache after cache, then shape after shape, as the enumerator orders.
        kept: list[Form] = []
        for (tt, _), shardings in by_kind.items():
            form = _form(tt, shardings, constraints, topology)
            if not kept or form.priced_bytes < kept[-1].priced_bytes:
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

    def fetch_ms(candidate: Candidate) -> float:
        pairs = zip(candidate.perfs, candidate.counts, strict=True)
        return sum(perf.prefetch_compute * count for perf, count in pairs)

    smallest = min(shardings, key=total)
    tiered = smallest.tier_level is not None
    candidates = (min(shardings, key=slowest_shard), min(shardings, key=largest_shard), smallest)
    num_bytes = total(smallest)
    return Form(
        tt,
        compression,
        num_bytes,
        min(map(fetch_ms, shardings)) if tiered else 0.0,
        _host_bytes_priced(smallest, topology) if tiered else 0.0,
        tuple(shardings),
        candidates,
    )


def _host_bytes_priced(candidate: Candidate, topology: Topology) -> float:
    """Host memory behind the capped one, at the ratio of what there is of both."""
    if topology.compute_device == "cpu":
        return 0.0  # it is the capped one
    pairs = zip(candidate.storages, candidate.counts, strict=True)
    host_bytes = sum(storage.ddr * count for storage, count in pairs)
    caps = [device.storage for device in topology.devices]
    there = sum(storage.ddr for storage in caps)
    return host_bytes * sum(storage.hbm for storage in caps) / there if there else 0.0


def least_compression(
    forms: Mapping[str, Sequence[Form]], fits: FitCheck
) -> dict[str, Form] | None:
    """The forms with the least lookup-weighted compression among those that fit.

    Greedy, not exhaustive. Starting from all tables as they are, the step that frees most bytes for
    the compression it adds comes first (of tables that are read equally often: the largest), and of
    steps that add none the one that frees most bytes for the time it takes to fetch rows. As few
    steps are taken as make the model fit. Then each table, the most costly first, goes back to the
    least compressed form with which the whole still fits.

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
    costs = [(-form.compression, -form.fetch_ms) for form in chosen(levels)]
    for table in sorted(range(len(tables)), key=lambda table: costs[table]):
        for level in range(levels[table]):
            relaxed = [*levels[:table], level, *levels[table + 1 :]]
            if fits(chosen(relaxed)) is not None:
                levels = relaxed
                break
    return dict(zip(tables, chosen(levels), strict=True))


def hidden_fetches(
    untiered: Mapping[str, Sequence[Form]], chosen: Mapping[str, Form], fits: FitCheck
) -> dict[str, Form] | None:
    """`chosen` with as few tiered tables turned TT as make them fit the check.

    The table goes first whose rows take longest to fetch for the compression that TT adds.

    Args:
        untiered: the forms of the tables that are not tiered.
        fits: whether forms can be placed so that no rank waits for rows.

    Returns:
        Form per table, or None where not even all of them turned TT pass.
    """

    def as_tt(fqn: str) -> Form | None:
        shapes = [form for form in untiered.get(fqn, ()) if form.tt is not None]
        no_larger = [form for form in shapes if form.num_bytes <= chosen[fqn].num_bytes]
        return next(iter(no_larger), shapes[-1] if shapes else None)

    turned = {
        fqn: form for fqn in chosen if chosen[fqn].is_tiered and (form := as_tt(fqn)) is not None
    }
    if not turned:
        return None

    def compression_per_ms(fqn: str) -> float:
        return turned[fqn].compression / max(chosen[fqn].fetch_ms, _LEAST_MS)

    order = sorted(turned, key=compression_per_ms)

    def state(count: int) -> dict[str, Form]:
        return {**chosen, **{fqn: turned[fqn] for fqn in order[:count]}}

    if fits(list(state(len(order)).values())) is None:
        return None
    few, enough = -1, len(order)
    while enough - few > 1:
        middle = (few + enough) // 2
        if fits(list(state(middle).values())) is None:
            few = middle
        else:
            enough = middle
    return state(enough)


def _steps_by_worth(forms: Sequence[Sequence[Form]]) -> list[int]:
    """Table numbers, one per step to its next form, by what it costs per byte freed."""

    def entry(table: int, level: int) -> tuple[float, float, int, int]:
        now, then = forms[table][level], forms[table][level + 1]
        freed = now.priced_bytes - then.priced_bytes
        compression = max(0.0, then.compression - now.compression)
        return compression / freed, (then.fetch_ms - now.fetch_ms) / freed, table, level

    heap = [entry(table, 0) for table in range(len(forms)) if len(forms[table]) > 1]
    heapq.heapify(heap)
    steps = []
    while heap:
        _, _, table, level = heapq.heappop(heap)
        steps.append(table)
        if level + 2 < len(forms[table]):
            heapq.heappush(heap, entry(table, level + 1))
    return steps
