"""The fastest shardings of tables whose forms are decided, and the ranks of all shards.

The step takes as long as its slowest rank. Were tables divisible at will, the best that options
with pieces of at most t could do is the larger of t and (their total time) / (ranks); the t where
the two meet is where the search starts. Options of some limits around it are placed (`Placement`),
the best are improved by moves and exchanges of shards, then by cutting tables of the busiest rank
in another way; at last tables are cut one by one to fit into gaps below an ever lower limit. Where
memory is short, every byte gets a price in time, which is raised until a placement is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.types import PartitionByType, ShardingOption, Topology

from .compression import Form
from .enumerator import EcoRecEnumerator
from .options import Candidate
from .placement import Array, Cluster, Piece, Placement, improve

_LIMITS = (
    1.0,
    1.05,
    1.1,
    1.2,
    1.4,
    0.85,
    0.7,
    0.5,
    0.35,
)  # of the length at which pieces cost as much as the mean
_PRICES = (0.0, *(4.0**k for k in range(-4, 7)))  # of all bytes, in all time
_IMPROVED_PROPOSALS = 4
_BISECTIONS = 6
_CUT_STEPS = 2000
_GAIN = 1e-3  # the least that another cut must bring


@dataclass(frozen=True, eq=False)
class PlacedTables:
    """One option per table, and where it is.

    Args:
        candidates: per table.
        placement: of the pieces of all.
    """

    candidates: list[Candidate]
    placement: Placement

    def options(self, enumerator: EcoRecEnumerator) -> list[ShardingOption]:
        """As TorchRec wants them: with every shard and its rank."""
        options = [enumerator.expanded(candidate) for candidate in self.candidates]
        for piece, start in self.placement.start.items():
            shards = options[piece.table].shards
            for offset in range(piece.width):
                shards[piece.first + offset].rank = start + offset
        return options


class PlacementSearch:
    """Searches placements of tables under the memory caps; equal input gives equal results.

    Args:
        capacity: the ranks, with what they have for tables.
    """

    def __init__(self, capacity: Topology) -> None:
        self._cluster = Cluster.of(capacity)
        self._pieces: dict[tuple[int, int], tuple[Candidate, list[Piece]]] = {}

    def fit_unhindered(self, forms: Sequence[Form]) -> PlacedTables | None:
        """A placement in which no rank waits for rows of tiered tables; None if none is found."""
        for candidates in zip(*(form.candidates for form in forms), strict=True):
            placed = self.placed(candidates)
            if placed is not None and placed.placement.fetches_hide:
                return placed
        return None

    def fit(self, forms: Sequence[Form]) -> PlacedTables | None:
        """A placement of one form per table with memory as the only aim; None if none is found."""
        if sum(form.num_bytes for form in forms) > self._cluster.main_bytes_W.sum():
            return None
        proposals = list(zip(*(form.candidates for form in forms), strict=True))
        for candidates in reversed(proposals):  # the smallest first: it fits most often
            for by_memory in (True, False):
                placed = self.placed(candidates, by_memory=by_memory)
                if placed is not None:
                    return placed
        return None

    def fastest(self, forms: Sequence[Form]) -> PlacedTables:
        """The fastest placement found of forms that `fit`."""
        menus = [form.shardings for form in forms]
        menu = _Menu(menus, self._cluster)
        found: list[PlacedTables] = []
        for price in _PRICES:
            proposals = (self.placed(proposal) for proposal in menu.proposals(price))
            found = [placed for placed in proposals if placed is not None]
            if found:
                break
        found.sort(key=lambda placed: placed.placement.step_ms)
        if not found:
            fitting = self.fit(forms)
            assert fitting is not None
            found = [fitting]
        improved = [self._improved(placed, menus) for placed in found[:_IMPROVED_PROPOSALS]]
        best = min(improved, key=lambda placed: placed.placement.step_ms)
        return self._fitted_to_gaps(best, menus)

    def _improved(self, placed: PlacedTables, menus: Sequence[Sequence[Candidate]]) -> PlacedTables:
        placed = self._densest(placed)
        improve(placed.placement)
        self._cut_otherwise(placed, menus)
        return placed

    def _fitted_to_gaps(
        self, placed: PlacedTables, menus: Sequence[Sequence[Candidate]]
    ) -> PlacedTables:
        """The least limit found below which tables fit one by one; `placed` if that is no less.

        Where there are about as many pieces as ranks, tables that come late must be cut to fit into
        what the early ones left.
        """
        by_cost = [sorted(menu, key=_total_ms) for menu in menus]

        def urgency(table: int) -> tuple[bool, float, int]:
            cheapest = by_cost[table][0]
            everywhere = cheapest.option.partition_by == PartitionByType.UNIFORM.value
            return not everywhere, -_total_ms(cheapest), table

        order = sorted(range(len(menus)), key=urgency)
        low = float(placed.placement.ms_W.mean())
        for _ in range(_BISECTIONS):
            middle = (low + placed.placement.step_ms) / 2
            fitted = self._one_by_one(by_cost, order, middle)
            if fitted is None:
                low = middle
            else:
                placed = fitted
        return placed

    def _one_by_one(
        self, by_cost: Sequence[Sequence[Candidate]], order: Sequence[int], limit_ms: float
    ) -> PlacedTables | None:
        """Per table the cheapest option for which there is room below a limit."""
        placement = Placement(self._cluster)
        chosen = {}
        for table in order:
            for candidate in by_cost[table]:
                if placement.add(self._pieces_of(candidate, table), limit_ms=limit_ms):
                    chosen[table] = candidate
                    break
                for piece in list(placement.of_table.get(table, ())):
                    placement.take(piece)
            else:
                return None
        return PlacedTables([chosen[table] for table in range(len(by_cost))], placement)

    def placed(
        self,
        candidates: Sequence[Candidate],
        *,
        limit_ms: float | None = None,
        by_memory: bool = False,
    ) -> PlacedTables | None:
        """One option per table where `Placement.add` puts them; None if some find no room."""
        placement = Placement(self._cluster)
        pieces = [
            piece
            for table, candidate in enumerate(candidates)
            for piece in self._pieces_of(candidate, table)
        ]
        if not placement.add(pieces, limit_ms=limit_ms, by_memory=by_memory):
            return None
        return PlacedTables(list(candidates), placement)

    def _densest(self, placed: PlacedTables) -> PlacedTables:
        """The same options on ranks that are filled up to a limit, the least that is found."""
        pieces = placed.placement.start
        low = max(placed.placement.ms_W.mean(), max(piece.slowest_ms for piece in pieces))
        for _ in range(_BISECTIONS):
            middle = (low + placed.placement.step_ms) / 2
            denser = self.placed(placed.candidates, limit_ms=middle)
            if denser is None:
                low = middle
            else:
                placed = denser
        return placed

    def _pieces_of(self, candidate: Candidate, table: int) -> list[Piece]:
        key = (table, id(candidate))
        if key not in self._pieces:  # kept with the candidate: an id is unique while it lives
            self._pieces[key] = (candidate, self._cluster.pieces(candidate, table))
        return self._pieces[key][1]

    def _cut_otherwise(self, placed: PlacedTables, menus: Sequence[Sequence[Candidate]]) -> None:
        """Replaces options of tables on the busiest rank while that makes the step shorter."""
        for _ in range(_CUT_STEPS):
            if not any(
                self._replace(placed, table, candidate)
                for table in _tables_on_busiest_rank(placed.placement)
                for candidate in menus[table]
            ):
                return
            improve(placed.placement)

    def _replace(self, placed: PlacedTables, table: int, candidate: Candidate) -> bool:
        """Gives a table on the busiest rank another option, unless a rank gets as busy by it."""
        placement = placed.placement
        if candidate is placed.candidates[table]:
            return False
        enough_ms = placement.step_ms * (1 - _GAIN)
        old = [(piece, placement.start[piece]) for piece in placement.of_table[table]]
        busiest = int(placement.busy_ms.argmax())
        for piece, _ in old:
            placement.take(piece)
        if placement.add(self._pieces_of(candidate, table)):
            touched = [
                placement.busy_ms[busiest],
                *map(placement.slowest_ms, placement.of_table[table]),
            ]
            if max(touched) < enough_ms:
                placed.candidates[table] = candidate
                return True
        for piece in list(placement.of_table[table]):
            placement.take(piece)
        for piece, start in old:
            placement.put(piece, start)
        return False


def _total_ms(candidate: Candidate) -> float:
    pairs = zip(candidate.perfs, candidate.counts, strict=True)
    return sum(perf.total * count for perf, count in pairs)


def _tables_on_busiest_rank(placement: Placement) -> list[int]:
    """Those that take longest there first."""
    busiest = int(placement.busy_ms.argmax())
    ms: dict[int, float] = {}
    for piece, start in placement.start.items():
        if start <= busiest < start + piece.width:
            ms[piece.table] = ms.get(piece.table, 0.0) + float(piece.ms_R[busiest - start])
    return sorted(ms, key=lambda table: (-ms[table], table))


class _Menu:
    """All options of all tables as arrays (table, option), unused places infinitely slow."""

    def __init__(self, candidates: Sequence[Sequence[Candidate]], cluster: Cluster) -> None:
        self._candidates = candidates
        self._num_ranks = cluster.world_size
        shape = (len(candidates), max(len(options) for options in candidates))
        self._work_ms = np.full(shape, np.inf)
        self._slowest_ms = np.full(shape, np.inf)
        self._bytes = np.zeros(shape)
        host_is_main = bool(np.isinf(cluster.host_bytes_H).all())
        for table, options in enumerate(candidates):
            for i, candidate in enumerate(options):
                counts = np.array(candidate.counts)
                ms = np.array([perf.total for perf in candidate.perfs])
                main = np.array([s.ddr if host_is_main else s.hbm for s in candidate.storages])
                if main.max() > cluster.main_bytes_W.max():
                    continue
                self._work_ms[table, i] = counts @ ms
                self._slowest_ms[table, i] = ms.max()
                self._bytes[table, i] = counts @ main
        usable = np.isfinite(self._work_ms)
        self._total_ms = float(self._work_ms.min(axis=1).sum())
        self._total_bytes = float(cluster.main_bytes_W.sum()) or 1.0
        self._usable = bool(usable.any(axis=1).all())

    def proposals(self, price: float) -> Iterator[list[Candidate]]:
        """One option per table, for several lengths that pieces may have.

        Args:
            price: what memory costs, as a multiple of (all time) / (all memory).
        """
        if not self._usable:
            return
        seen = set()
        balanced_ms = self._balanced_ms(price)
        for limit in _LIMITS:
            chosen = self._choice(limit * balanced_ms, price)
            if chosen.tobytes() not in seen:
                seen.add(chosen.tobytes())
                yield [
                    options[i] for options, i in zip(self._candidates, chosen.tolist(), strict=True)
                ]

    def _choice(self, limit_ms: float, price: float) -> Array:
        """Per table the option with least time (and priced memory) among short enough pieces."""
        cost = self._work_ms + price * self._total_ms / self._total_bytes * self._bytes
        cost = np.where(self._slowest_ms <= limit_ms, cost, np.inf)
        shortest = self._slowest_ms.argmin(axis=1)
        return np.where(np.isfinite(cost).any(axis=1), cost.argmin(axis=1), shortest)

    def _balanced_ms(self, price: float) -> float:
        """The limit at which the mean rank takes as long as a piece may."""
        low, high = 0.0, float(self._slowest_ms[np.isfinite(self._slowest_ms)].max())
        for _ in range(50):
            limit = (low + high) / 2
            chosen = self._choice(limit, price)[:, None]
            mean = np.take_along_axis(self._work_ms, chosen, axis=1).sum() / self._num_ranks
            low, high = (limit, high) if mean > limit else (low, limit)
        return high
