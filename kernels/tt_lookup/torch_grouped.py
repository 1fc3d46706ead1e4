"""The grouped lookup in plain PyTorch, on any device: forward and explicit backward.

Legend: U unique rows, P prefixes (i1, i2), S prefix slots (prefixes plus padding), T tiles,
M = q1*q2, t = M*r2. Cores here: G1 `(p1, q1*r1)`, G2 `(p2, r1, q2*r2)`, G3 `(p3, r2, q3)`.

A *tile* holds up to 16 neighbouring prefixes of one group, so that part 1 is one matrix product
per tile; its height is rounded up to a power of two, and tiles of equal height form one `bmm`.
A *part* is a run of whole tiles: the micro-batch.

Why the bits are the same whatever the neighbours, cuts and threads: a tile is cut from its own
group only; every product is an item of a `bmm` that gives each item to one thread; every sum over
rows is an `embedding_bag`, which adds the rows of a segment one after the other, and a sum that
goes on in the next part starts from the value reached so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor
from torch.nn.functional import embedding_bag

from .dtypes import accumulate_dtype
from .products import bmm

_TILE_HEIGHTS = (16, 8, 4, 2, 1)
_DEFAULT_WORKSPACE_BYTES = 256 * 2**20
_DOT_CHUNK_ELEMENTS = 2**14
_INDEX_BYTES_PER_ITEM = 128
"""Bound for the index temporaries per row, slot, tile or lookup (int64 in a dozen of arrays)."""


class _Shape(NamedTuple):
    q1: int
    q2: int
    q3: int
    r1: int
    r2: int

    @classmethod
    def of(cls, cores: list[Tensor]) -> _Shape:
        q1, q2, q3 = (core.shape[2] for core in cores)
        return cls(q1, q2, q3, cores[0].shape[3], cores[1].shape[3])

    @property
    def dim(self) -> int:
        return self.q1 * self.q2 * self.q3

    @property
    def prefix_size(self) -> int:
        return self.q1 * self.q2 * self.r2


class _Tiles(NamedTuple):
    """Per tile: first prefix, row and lookup (T + 1 entries each), row of core 1, height."""

    prefix_starts: Tensor
    row_starts: Tensor
    lookup_starts: Tensor
    i2_T: Tensor
    height_T: Tensor


class _TileClass(NamedTuple):
    """The tiles of one height in a part: Th tiles, whose slots are a range."""

    height: int
    i2_T: Tensor
    prefix_S: Tensor
    slots: slice


class _Part(NamedTuple):
    """A run of whole tiles. `slot_P`: where the product of each of its prefixes lies."""

    prefixes: slice
    rows: slice
    lookups: slice
    classes: list[_TileClass]
    slot_P: Tensor
    num_slots: int


def forward(
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
) -> Tensor:
    """Pooled rows `(B, F*D)`; arguments as in this folder's README.

    Raises:
        ValueError: `workspace_bytes` is below what one tile needs.
    """
    shape, dtype = _Shape.of(cores), accumulate_dtype(cores[0].dtype)
    num_bags = plan.num_bags
    tiles = _tiles(plan)
    fixed_bytes = _cast_bytes(cores, dtype) + num_bags * _INDEX_BYTES_PER_ITEM
    if num_features > 1 or output_dtype != dtype:
        fixed_bytes += num_bags * shape.dim * dtype.itemsize
    cost_T = _forward_bytes(tiles, shape, dtype.itemsize)
    bounds = _cut(cost_T, fixed_bytes, workspace_bytes)

    flat_cores = _flat(cores, dtype)
    pooled = torch.zeros(num_bags, shape.dim, dtype=dtype, device=cores[0].device)
    for part in _parts(plan, tiles, bounds):
        rows_UD = _rows(part, plan, flat_cores, shape)
        if len(bounds) == 2:
            weights = None if weights_L is None else weights_L[plan.pooled_occurrence_L]
            starts = plan.offsets[:-1]
            pooled = embedding_bag(
                plan.pooled_row_L, rows_UD, starts, mode="sum", per_sample_weights=weights
            )
        else:
            weights = None if weights_L is None else weights_L[plan.order_L[part.lookups]]
            source = _row_of_lookup(part, plan) - part.rows.start
            _add_to_segments_(pooled, rows_UD, source, plan.bag_L[part.lookups], weights)
    if mean:
        pooled /= plan.offsets.diff().clamp(min=1).unsqueeze(1)
    by_bag = pooled.view(num_features, num_bags // num_features, shape.dim)
    output = torch.empty(
        num_bags // num_features, num_features, shape.dim, dtype=output_dtype, device=pooled.device
    )
    return output.copy_(by_bag.transpose(0, 1)).flatten(1)


def backward(
    grad: Tensor,
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    needs_cores: bool,
    needs_weights: bool,
    workspace_bytes: int | None,
) -> tuple[list[Tensor] | None, Tensor | None]:
    """Gradients of the cores and of the weights; arguments as in this folder's README.

    Raises:
        ValueError: `workspace_bytes` is below what one tile needs.
    """
    shape, dtype = _Shape.of(cores), accumulate_dtype(cores[0].dtype)
    tiles = _tiles(plan)
    fixed_bytes = _cast_bytes(cores, dtype) * (2 if needs_cores else 1) + _cast_bytes([grad], dtype)
    fixed_bytes += plan.num_lookups * (8 + 3 * dtype.itemsize)
    fixed_bytes += plan.num_bags * (16 + 2 * dtype.itemsize)
    fixed_bytes += max(_DOT_CHUNK_ELEMENTS, shape.dim) * 4 * dtype.itemsize if needs_weights else 0
    cost_T = _backward_bytes(tiles, shape, dtype.itemsize, needs_cores)
    bounds = _cut(cost_T, fixed_bytes, workspace_bytes)

    flat_cores = _flat(cores, dtype)
    grad_BD = grad.to(dtype).view(-1, shape.dim)  # row b*F + f
    bag_of_sorted = _SortedBags.of(plan, weights_L, num_features, mean, dtype)
    core_grads = [torch.zeros_like(core) for core in flat_cores] if needs_cores else None
    weights_grad = None if weights_L is None or not needs_weights else torch.empty_like(weights_L)
    for part in _parts(plan, tiles, bounds):
        prefixes_ST = _prefix_products(part, plan, flat_cores, shape)
        if weights_grad is not None:
            rows_UD = _rows_of_prefixes(part, plan, prefixes_ST, flat_cores, shape)
            dots = _dots(rows_UD, grad_BD, part, plan, bag_of_sorted)
            weights_grad[plan.order_L[part.lookups]] = dots
            del rows_UD, dots
        if core_grads is not None:
            row_grads_UD = _row_grads(part, plan, grad_BD, bag_of_sorted)
            _add_core_grads_(core_grads, part, plan, prefixes_ST, row_grads_UD, flat_cores, shape)
    if core_grads is None:
        return None, weights_grad
    shaped = [g.view(c.shape).to(c.dtype) for g, c in zip(core_grads, cores, strict=True)]
    return shaped, weights_grad


# Tiles and parts


def _tiles(plan: IndexPlan) -> _Tiles:
    device, num_prefixes = plan.counts.device, int(plan.counts[1])
    group_P = torch.repeat_interleave(plan.group_starts[:-1], plan.group_starts.diff())
    position_P = torch.arange(num_prefixes, device=device) - group_P
    first_T = (position_P % _TILE_HEIGHTS[0] == 0).nonzero().squeeze(1)
    starts = torch.nn.functional.pad(first_T, (0, 1), value=num_prefixes)
    row_starts = plan.prefix_starts[starts]
    size_T = starts.diff()
    height_T = torch.ones_like(size_T)
    for height in reversed(_TILE_HEIGHTS[:-1]):
        height_T = torch.where(size_T > height // 2, height, height_T)
    return _Tiles(starts, row_starts, plan.row_starts[row_starts], plan.i2_P[first_T], height_T)


def _cut(cost_T: Tensor, fixed_bytes: int, workspace_bytes: int | None) -> list[int]:
    """First tile of every part, then T: parts as large as the workspace allows."""
    num_tiles = len(cost_T)
    if not num_tiles:
        return [0]
    floor_bytes = fixed_bytes + int(cost_T.max())
    if workspace_bytes is None:
        workspace_bytes = max(floor_bytes, _DEFAULT_WORKSPACE_BYTES)
    if workspace_bytes < floor_bytes:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} is below the floor of {floor_bytes} bytes: "
            f"{fixed_bytes} for the whole call and {floor_bytes - fixed_bytes} for its largest tile"
        )
    cost = torch.nn.functional.pad(cost_T.cumsum(0), (1, 0)).cpu()
    bounds = [0]
    while bounds[-1] < num_tiles:
        limit = int(cost[bounds[-1]]) + workspace_bytes - fixed_bytes
        bounds.append(int(torch.searchsorted(cost, limit, right=True)) - 1)
    return bounds


def _parts(plan: IndexPlan, tiles: _Tiles, bounds: list[int]) -> Iterator[_Part]:
    for first, end in zip(bounds, bounds[1:], strict=False):
        yield _part(tiles, first, end)


def _part(tiles: _Tiles, first: int, end: int) -> _Part:
    prefixes, rows, lookups = (
        slice(int(starts[first]), int(starts[end]))
        for starts in (tiles.prefix_starts, tiles.row_starts, tiles.lookup_starts)
    )
    num_prefixes = prefixes.stop - prefixes.start
    slot_P = torch.empty(num_prefixes, dtype=torch.int64, device=tiles.i2_T.device)
    classes, num_slots = [], 0
    for height in _TILE_HEIGHTS:
        tile_T = first + (tiles.height_T[first:end] == height).nonzero().squeeze(1)
        if not len(tile_T):
            continue
        within = torch.arange(height, device=tile_T.device)
        prefix_TH = tiles.prefix_starts[tile_T].unsqueeze(1) + within
        exists_TH = prefix_TH < tiles.prefix_starts[tile_T + 1].unsqueeze(1)
        slot_TH = torch.arange(num_slots, num_slots + prefix_TH.numel(), device=tile_T.device)
        slot_P[prefix_TH[exists_TH] - prefixes.start] = slot_TH[exists_TH.flatten()]
        prefix_TH = torch.where(exists_TH, prefix_TH, prefix_TH[:, :1])
        slots = slice(num_slots, num_slots + prefix_TH.numel())
        classes.append(_TileClass(height, tiles.i2_T[tile_T], prefix_TH.flatten(), slots))
        num_slots = slots.stop
    return _Part(prefixes, rows, lookups, classes, slot_P, num_slots)


# Forward


def _prefix_products(part: _Part, plan: IndexPlan, cores: list[Tensor], shape: _Shape) -> Tensor:
    """Part 1: `(S, t)`, one matrix product per tile. Padding slots repeat a prefix of the tile."""
    products_ST = cores[0].new_empty(part.num_slots, shape.prefix_size)
    for tiles in part.classes:
        num_tiles = len(tiles.i2_T)
        left = _take(cores[0], plan.i1_P[tiles.prefix_S]).view(num_tiles, -1, shape.r1)
        out = products_ST[tiles.slots].view(num_tiles, -1, shape.q2 * shape.r2)
        bmm(left, _take(cores[1], tiles.i2_T), out=out)
    return products_ST


def _rows_of_prefixes(
    part: _Part, plan: IndexPlan, prefixes_ST: Tensor, cores: list[Tensor], shape: _Shape
) -> Tensor:
    """Part 2: `(U, D)`, one product per unique row."""
    left = _take(prefixes_ST, _slot_of_row(part, plan)).view(-1, shape.q1 * shape.q2, shape.r2)
    return bmm(left, _take(cores[2], plan.i3_U[part.rows])).flatten(1)


def _rows(part: _Part, plan: IndexPlan, cores: list[Tensor], shape: _Shape) -> Tensor:
    prefixes_ST = _prefix_products(part, plan, cores, shape)
    return _rows_of_prefixes(part, plan, prefixes_ST, cores, shape)


# Backward


class _SortedBags(NamedTuple):
    """Per sorted lookup: its row of the gradient, its bag's scale, and both with its weight."""

    grad_row_L: Tensor
    scale_L: Tensor | None
    weight_L: Tensor | None

    @classmethod
    def of(
        cls,
        plan: IndexPlan,
        weights_L: Tensor | None,
        num_features: int,
        mean: bool,
        dtype: torch.dtype,
    ) -> _SortedBags:
        by_sample = torch.arange(plan.num_bags, dtype=torch.int32, device=plan.bag_L.device)
        grad_row_L = by_sample.view(-1, num_features).t().flatten()[plan.bag_L]
        scale_L = plan.offsets.diff().to(dtype).reciprocal()[plan.bag_L] if mean else None
        weight_L = scale_L
        if weights_L is not None:
            weight_L = weights_L[plan.order_L] * (1 if scale_L is None else scale_L)
        return cls(grad_row_L, scale_L, weight_L)


def _row_grads(part: _Part, plan: IndexPlan, grad_BD: Tensor, bags: _SortedBags) -> Tensor:
    starts = plan.row_starts[part.rows] - part.lookups.start
    weight_L = None if bags.weight_L is None else bags.weight_L[part.lookups]
    return embedding_bag(
        bags.grad_row_L[part.lookups],
        grad_BD,
        starts,
        mode="sum",
        per_sample_weights=weight_L,
    )


def _dots(
    rows_UD: Tensor, grad_BD: Tensor, part: _Part, plan: IndexPlan, bags: _SortedBags
) -> Tensor:
    """`(lookups of the part,)`: row times gradient of the bag, in chunks."""
    row_L = _row_of_lookup(part, plan) - part.rows.start
    grad_row_L = bags.grad_row_L[part.lookups]
    chunk = max(_DOT_CHUNK_ELEMENTS // rows_UD.shape[1], 1)
    chunks = zip(row_L.split(chunk), grad_row_L.split(chunk), strict=True)
    dots_L = torch.cat([(rows_UD[r] * grad_BD[g]).sum(1) for r, g in chunks])
    return dots_L if bags.scale_L is None else dots_L * bags.scale_L[part.lookups]


def _add_core_grads_(
    core_grads: list[Tensor],
    part: _Part,
    plan: IndexPlan,
    prefixes_ST: Tensor,
    row_grads_UD: Tensor,
    cores: list[Tensor],
    shape: _Shape,
) -> None:
    grad1, grad2, grad3 = core_grads
    row_grads = row_grads_UD.view(-1, shape.q1 * shape.q2, shape.q3)
    slot_U, i3_U = _slot_of_row(part, plan), plan.i3_U[part.rows]

    left = _take(prefixes_ST, slot_U).view(-1, shape.q1 * shape.q2, shape.r2)
    _add_to_segments_(grad3.flatten(1), bmm(left.mT, row_grads).flatten(1), None, i3_U)
    del left
    by_row = bmm(row_grads, _take(cores[2], i3_U).mT).flatten(1)
    order_U = torch.argsort(slot_U, stable=True)
    starts = torch.searchsorted(slot_U[order_U], torch.arange(part.num_slots, device=i3_U.device))
    prefix_grads_ST = embedding_bag(order_U, by_row, starts, mode="sum")
    del by_row

    left_grads = cores[0].new_empty(part.num_slots, shape.q1 * shape.r1)
    for tiles in part.classes:  # high tiles first, so that a group's tiles come in their order
        num_tiles = len(tiles.i2_T)
        left = _take(cores[0], plan.i1_P[tiles.prefix_S]).view(num_tiles, -1, shape.r1)
        grads = prefix_grads_ST[tiles.slots].view(num_tiles, -1, shape.q2 * shape.r2)
        _add_to_segments_(grad2.flatten(1), bmm(left.mT, grads).flatten(1), None, tiles.i2_T)
        out = left_grads[tiles.slots].view(num_tiles, -1, shape.r1)
        bmm(grads, _take(cores[1], tiles.i2_T).mT, out=out)
    _add_to_segments_(grad1, left_grads, part.slot_P, plan.i1_P[part.prefixes])


# Building blocks


def _add_to_segments_(
    sums_SD: Tensor,
    values_ND: Tensor,
    source_L: Tensor | None,
    segment_L: Tensor,
    weights_L: Tensor | None = None,
) -> None:
    """`sums[segment[l]] += weights[l] * values[source[l]]`, one after the other in the order of l.

    The sum reached so far is the first addend, so cutting l into several calls changes no bit.
    """
    order_L = torch.argsort(segment_L, stable=True)
    segment_G, count_G = torch.unique_consecutive(segment_L[order_L], return_counts=True)
    source_L = order_L if source_L is None else source_L[order_L]
    num_segments, num_entries = len(segment_G), len(order_L) + len(segment_G)
    starts_G = torch.nn.functional.pad((count_G + 1).cumsum(0), (1, 0))[:-1]
    entry_L = torch.arange(len(order_L), device=order_L.device)
    entry_L += torch.repeat_interleave(count_G.new_tensor(range(1, num_segments + 1)), count_G)
    source = source_L.new_empty(num_entries)
    source[starts_G] = torch.arange(num_segments, device=source.device, dtype=source.dtype)
    source[entry_L] = source_L + num_segments
    weights = None
    if weights_L is not None:
        weights = weights_L.new_ones(num_entries)
        weights[entry_L] = weights_L[order_L]
    addends = torch.cat([sums_SD[segment_G], values_ND])
    sums_SD[segment_G] = embedding_bag(
        source.long(), addends, starts_G, mode="sum", per_sample_weights=weights
    )


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Copies of whole rows: `x[index]` copies element by element on the CPU."""
    return x.flatten(1).index_select(0, index).view(len(index), *x.shape[1:])


def _row_of_lookup(part: _Part, plan: IndexPlan) -> Tensor:
    rows = torch.arange(part.rows.start, part.rows.stop, device=plan.row_starts.device)
    starts = plan.row_starts[part.rows.start : part.rows.stop + 1]
    return torch.repeat_interleave(rows, starts.diff())


def _slot_of_row(part: _Part, plan: IndexPlan) -> Tensor:
    starts = plan.prefix_starts[part.prefixes.start : part.prefixes.stop + 1]
    return torch.repeat_interleave(part.slot_P, starts.diff())


def _flat(cores: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    shape = _Shape.of(cores)
    views = (
        (-1, shape.q1 * shape.r1),
        (-1, shape.r1, shape.q2 * shape.r2),
        (-1, shape.r2, shape.q3),
    )
    return [core.to(dtype).view(view) for core, view in zip(cores, views, strict=True)]


# What a call may use beside its results


def _cast_bytes(tensors: list[Tensor], dtype: torch.dtype) -> int:
    return sum(x.numel() * dtype.itemsize for x in tensors if x.dtype != dtype)


def _forward_bytes(tiles: _Tiles, shape: _Shape, itemsize: int) -> Tensor:
    rows_T, lookups_T = tiles.row_starts.diff().long(), tiles.lookup_starts.diff().long()
    per_slot = shape.q1 * shape.r1 + shape.prefix_size
    per_tile = shape.r1 * shape.q2 * shape.r2
    per_row = shape.prefix_size + shape.r2 * shape.q3 + 2 * shape.dim
    elements_T = tiles.height_T * per_slot + rows_T * per_row + lookups_T * 2 * shape.dim
    items_T = 1 + tiles.height_T + rows_T + 2 * lookups_T
    return (elements_T + per_tile) * itemsize + items_T * _INDEX_BYTES_PER_ITEM


def _backward_bytes(tiles: _Tiles, shape: _Shape, itemsize: int, needs_cores: bool) -> Tensor:
    if not needs_cores:
        return _forward_bytes(tiles, shape, itemsize)
    rows_T, lookups_T = tiles.row_starts.diff().long(), tiles.lookup_starts.diff().long()
    per_slot = 5 * shape.q1 * shape.r1 + 2 * shape.prefix_size
    per_tile = 5 * shape.r1 * shape.q2 * shape.r2
    per_row = 2 * shape.prefix_size + 5 * shape.r2 * shape.q3 + 2 * shape.dim
    elements_T = tiles.height_T * per_slot + rows_T * per_row
    items_T = 1 + tiles.height_T + rows_T + lookups_T
    return (elements_T + per_tile) * itemsize + items_T * _INDEX_BYTES_PER_ITEM
