"""Placing one option per table on ranks: longest first, then exchange while that helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torchrec.distributed.planner.types import PartitionByType, Topology

from .options import Candidate

Array = np.ndarray

_SEARCH_STEPS = 3000
_CLOSE_ENOUGH = 1.001  # of the larger of mean and largest piece: what is left to gain


@dataclass(frozen=True, eq=False)
class Piece:
    """Shards of a table that go on ranks side by side: one rank, all of a host, or all there are.

    Args:
        table: position of the table among the placed ones.
        first: position of its first shard in the option.
        ms_R: predicted time per rank.
        main_bytes_R: of the memory that caps ranks.
        host_bytes_R: of the host's memory behind it; 0 where host memory is the capped one.
        fetch_ms_R: time to fetch rows of tiered tables, while earlier batches are trained on.
        file_bytes_R: of the host's storage.
        same_host: whether the pieces of the table must share a host.
        other_hosts: whether they must not, while there are hosts.
    """

    table: int
    first: int
    ms_R: Array
    main_bytes_R: Array
    host_bytes_R: Array
    fetch_ms_R: Array
    file_bytes_R: Array
    same_host: bool = False
    other_hosts: bool = False
    slowest_ms: float = field(init=False)
    most_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slowest = np.maximum(self.ms_R, self.fetch_ms_R).max()
        object.__setattr__(self, "slowest_ms", float(slowest))
        object.__setattr__(self, "most_bytes", int(self.main_bytes_R.max()))

    @property
    def width(self) -> int:
        return len(self.ms_R)

    @property
    def is_on_host(self) -> bool:
        """Whether it takes what the ranks of a host share."""
        return bool(self.host_bytes_R.any() or self.file_bytes_R.any())


@dataclass(frozen=True, eq=False)
class Cluster:
    """The ranks, and what they have for tables.

    Args:
        main_bytes_W: per rank, of the memory that caps it: host memory on CPU, HBM elsewhere.
        host_bytes_H: per host, of host memory behind it; without limit where that is the former.
        file_bytes_H: per host, of its storage.
        ranks_per_host: that share host memory.
        group: ranks among which TorchRec puts table-row-wise shards; the host, or its NVLink pod.
    """

    main_bytes_W: Array
    host_bytes_H: Array
    file_bytes_H: Array
    ranks_per_host: int
    group: int

    @classmethod
    def of(cls, capacity: Topology) -> Cluster:
        """Of TorchRec's topology; the ranks of a host share what it says of each of them."""
        on_host = capacity.compute_device == "cpu"
        storages = [device.storage for device in capacity.devices]
        main = np.array([s.ddr if on_host else s.hbm for s in storages], dtype=np.int64)
        per_host = capacity.local_world_size
        ddr = np.array([s.ddr for s in storages], dtype=np.float64)
        starts = np.arange(0, len(ddr), per_host)
        host = np.full(len(starts), np.inf) if on_host else np.add.reduceat(ddr, starts)
        ssd = np.array([s.ssd for s in storages], dtype=np.float64)
        return cls(main, host, np.add.reduceat(ssd, starts), per_host, capacity.intra_group_size)

    @property
    def world_size(self) -> int:
        return len(self.main_bytes_W)

    def pieces(self, candidate: Candidate, table: int) -> list[Piece]:
        """The pieces of an option."""
        host_is_main = bool(np.isinf(self.host_bytes_H).all())
        storages = candidate.storages
        ms = np.repeat(candidate.ms, candidate.counts)
        fetch = np.repeat(candidate.hidden_ms, candidate.counts)
        ssd = np.repeat([s.ssd for s in storages], candidate.counts).astype(np.int64)
        ddr = np.repeat([s.ddr for s in storages], candidate.counts).astype(np.int64)
        hbm = np.repeat([s.hbm for s in storages], candidate.counts).astype(np.int64)
        main, host = (ddr, np.zeros_like(ddr)) if host_is_main else (hbm, ddr)
        partition_by = candidate.option.partition_by
        row_cut = "row" in candidate.option.sharding_type
        width = 1
        if partition_by == PartitionByType.UNIFORM.value:
            width = self.world_size
        elif partition_by == PartitionByType.MULTI_HOST.value or (
            partition_by == PartitionByType.HOST.value and row_cut
        ):
            width = self.group
        return [
            Piece(
                table,
                first,
                ms[first : first + width],
                main[first : first + width],
                host[first : first + width],
                fetch[first : first + width],
                ssd[first : first + width],
                same_host=partition_by == PartitionByType.HOST.value and not row_cut,
                other_hosts=partition_by == PartitionByType.MULTI_HOST.value,
            )
            for first in range(0, len(ms), width)
        ]


class Placement:
    """Pieces on ranks, with what every rank has to do and has left.

    Args:
        cluster: the ranks.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ms_W = np.zeros(cluster.world_size)
        self.fetch_ms_W = np.zeros(cluster.world_size)
        self.left_W = cluster.main_bytes_W.copy()
        self.host_left_H = cluster.host_bytes_H.copy()
        self.files_left_H = cluster.file_bytes_H.copy()
        self.start: dict[Piece, int] = {}
        """The first rank of every piece."""
        self.of_table: dict[int, list[Piece]] = {}

    @property
    def busy_ms(self) -> Array:
        """Predicted time per rank: what takes longer, training or fetching rows for it."""
        return np.maximum(self.ms_W, self.fetch_ms_W)

    @property
    def step_ms(self) -> float:
        """Predicted time of the slowest rank."""
        return float(self.busy_ms.max())

    @property
    def fetches_hide(self) -> bool:
        """Whether no rank waits for rows of tiered tables."""
        return bool(self.fetch_ms_W.max() <= self.ms_W.max())

    def slowest_ms(self, piece: Piece) -> float:
        """Predicted time of the slowest rank that the piece is on."""
        start = self.start[piece]
        return float(self.busy_ms[start : start + piece.width].max())

    def add(
        self, pieces: Sequence[Piece], *, limit_ms: float | None = None, by_memory: bool = False
    ) -> bool:
        """Puts pieces where they fit, the longest (or largest) first, each on the least busy rank.

        Args:
            pieces: of any tables.
            limit_ms: what no rank may exceed; then each goes on the busiest rank that stays below,
                which fills ranks better when pieces are long.
            by_memory: take the rank with most memory left, to fit rather than to be fast.

        Returns:
            Whether all fit. If not, some are left out.
        """

        def importance(piece: Piece) -> tuple[float, float, int, int]:
            size = piece.most_bytes if by_memory else piece.slowest_ms
            return -piece.width, -size, piece.table, piece.first

        for piece in sorted(pieces, key=importance):
            start = self._best_start(piece, limit_ms, by_memory)
            if start is None:
                return False
            self.put(piece, start)
        return True

    def put(self, piece: Piece, start: int) -> None:
        self._charge(piece, start, 1)
        self.start[piece] = start
        self.of_table.setdefault(piece.table, []).append(piece)

    def take(self, piece: Piece) -> None:
        self._charge(piece, self.start.pop(piece), -1)
        self.of_table[piece.table].remove(piece)

    def _charge(self, piece: Piece, start: int, sign: int) -> None:
        ranks = slice(start, start + piece.width)
        self.ms_W[ranks] += sign * piece.ms_R
        self.fetch_ms_W[ranks] += sign * piece.fetch_ms_R
        self.left_W[ranks] -= sign * piece.main_bytes_R
        if piece.is_on_host:
            hosts = np.arange(start, start + piece.width) // self.cluster.ranks_per_host
            np.subtract.at(self.host_left_H, hosts, sign * piece.host_bytes_R)
            np.subtract.at(self.files_left_H, hosts, sign * piece.file_bytes_R)

    def _best_start(self, piece: Piece, limit_ms: float | None, by_memory: bool) -> int | None:
        width = piece.width
        rows = (self.cluster.world_size // width, width)
        left = self.left_W.reshape(rows)
        allowed = (left >= piece.main_bytes_R).all(axis=1) & self._on_allowed_hosts(piece)
        if by_memory:
            score = (piece.main_bytes_R - left).max(axis=1).astype(np.float64)
        else:
            ms = self.ms_W.reshape(rows) + piece.ms_R
            fetch_ms = self.fetch_ms_W.reshape(rows) + piece.fetch_ms_R
            score = np.maximum(ms, fetch_ms).max(axis=1)
            if limit_ms is not None:
                allowed &= score <= limit_ms
                score = -score
        if not allowed.any():
            return None
        score[~allowed] = np.inf
        return int(score.argmin()) * width

    def _on_allowed_hosts(self, piece: Piece) -> Array:
        """Per possible start: whether the hosts have the memory, and are not ruled out."""
        cluster, width = self.cluster, piece.width
        starts = np.arange(0, cluster.world_size, width)
        allowed = np.ones(len(starts), dtype=bool)
        if piece.is_on_host:
            for bytes_R, left_H in (
                (piece.host_bytes_R, self.host_left_H),
                (piece.file_bytes_R, self.files_left_H),
            ):
                allowed &= _hosts_have(bytes_R, left_H, cluster)
        placed = self.of_table.get(piece.table)
        if placed and (piece.same_host or piece.other_hosts):
            groups = np.array([self.start[other] // cluster.group for other in placed])
            is_used = np.isin(starts // cluster.group, groups)
            if piece.same_host:
                allowed &= is_used
            elif not is_used.all():
                allowed &= ~is_used
        return allowed


def _hosts_have(bytes_R: Array, left_H: Array, cluster: Cluster) -> Array:
    """Per possible start of a piece: whether the hosts that it would be on have the bytes left."""
    width, per_host = len(bytes_R), cluster.ranks_per_host
    starts = np.arange(0, cluster.world_size, width)
    if width == 1:
        return left_H[starts // per_host] >= bytes_R
    enough = np.ones(len(starts), dtype=bool)
    for i, start in enumerate(starts):
        hosts = np.arange(start, start + width) // per_host
        need = np.bincount(hosts - hosts[0], weights=bytes_R)
        enough[i] = bool((need <= left_H[hosts[0] : hosts[-1] + 1]).all())
    return enough


def improve(placement: Placement) -> None:
    """Moves single shards off the busiest rank, or exchanges them, while its time goes down."""
    movable = [
        piece
        for piece in placement.start
        if piece.width == 1 and not (piece.same_host or piece.is_on_host)
    ]
    if not movable:
        return
    exchange = _Exchange(placement, movable)
    for _ in range(_SEARCH_STEPS):
        if placement.step_ms <= _CLOSE_ENOUGH * max(placement.ms_W.mean(), exchange.largest_ms):
            return
        if not exchange.step():
            return


class _Exchange:
    """One step after the other of single-rank pieces off the busiest rank."""

    def __init__(self, placement: Placement, pieces: Sequence[Piece]) -> None:
        self.placement = placement
        self.pieces = pieces
        self.ms_P = np.array([piece.slowest_ms for piece in pieces])
        self.bytes_P = np.array([piece.most_bytes for piece in pieces])
        self.rank_P = np.array([placement.start[piece] for piece in pieces])
        self.largest_ms = float(max(piece.slowest_ms for piece in placement.start))

    def step(self) -> bool:
        """The move or exchange after which the two ranks' slower one is fastest, if it helps."""
        ms_W, left_W = self.placement.ms_W, self.placement.left_W
        busiest = int(ms_W.argmax())
        best = (float(ms_W[busiest]) * (1 - 1e-9), -1, -1, -1)
        here: list[int] = np.flatnonzero(self.rank_P == busiest).tolist()
        elsewhere = self.rank_P != busiest
        for i in here:
            after = np.maximum(ms_W[busiest] - self.ms_P[i], ms_W + self.ms_P[i])
            after[(left_W < self.bytes_P[i]) | (np.arange(len(ms_W)) == busiest)] = np.inf
            rank = int(after.argmin())
            if after[rank] < best[0]:
                best = (float(after[rank]), i, rank, -1)
            if not elsewhere.any():
                continue
            gain = self.ms_P[i] - self.ms_P
            more = self.bytes_P[i] - self.bytes_P
            after = np.maximum(ms_W[busiest] - gain, ms_W[self.rank_P] + gain)
            fits = (left_W[self.rank_P] >= more) & (left_W[busiest] >= -more)
            after[~fits | ~elsewhere | (gain <= 0)] = np.inf
            j = int(after.argmin())
            if after[j] < best[0]:
                best = (float(after[j]), i, int(self.rank_P[j]), j)
        _, i, rank, j = best
        if i < 0:
            return False
        self._move(i, rank)
        if j >= 0:
            self._move(j, busiest)
        return True

    def _move(self, position: int, rank: int) -> None:
        piece = self.pieces[position]
        self.placement.take(piece)
        self.placement.put(piece, rank)
        self.rank_P[position] = rank
