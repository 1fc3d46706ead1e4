"""Tiles of prefixes, and the parts (micro-batches) a batch is cut into, without the host's help.

The host knows only bounds: U and P stay on the device. Part m holds the tiles whose first row lies
in [m*S, (m+1)*S), which the device finds; the host launches as many parts as the bounds allow for,
with grids for the largest part possible, and programs without work return at once.

Legend: L lookups, U unique rows, P prefixes (i1, i2), G rows of core 1.
"""

# mypy: allow-untyped-defs
# Arguments of kernels are pointers and device scalars: they have no Python type.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = 512 * 2**20
"""When the caller sets no limit and one tile does not need more."""


class Bounds(NamedTuple):
    """What the host knows of a batch or of any of its parts: upper bounds."""

    rows: int
    prefixes: int
    tiles: int

    @classmethod
    def of(cls, plan: IndexPlan, cores: list[Tensor], tile_prefixes: int) -> Bounds:
        p1, p2, p3 = (core.shape[0] for core in cores)
        num_lookups = plan.num_lookups
        prefixes = min(num_lookups, p1 * p2)
        return cls(
            rows=min(num_lookups, p1 * p2 * p3),
            prefixes=prefixes,
            tiles=_max_tiles(prefixes, p2, tile_prefixes),
        )


class Cut(NamedTuple):
    """How a batch is cut: into `num_parts` parts of about `rows_per_part` rows."""

    num_parts: int
    rows_per_part: int
    largest: Bounds
    """Bounds of the largest part: buffers and grids have this size."""


class Parts(NamedTuple):
    """The tiles and parts of a batch, on the device."""

    tile_starts: Tensor
    """(tiles + 1,) tile -> first prefix; P from the last tile on."""
    group_tiles: Tensor
    """(G + 1,) row of core 1 -> first tile."""
    cuts: Tensor
    """(num_parts + 1, 3) part -> first tile, first prefix, first row."""
    cut: Cut


def choose_cut(
    bounds: Bounds,
    cores: list[Tensor],
    tile_prefixes: int,
    workspace_bytes: int | None,
    bytes_of: Callable[[Cut], int],
) -> Cut:
    """The fewest parts whose buffers fit; none is smaller than the largest tile possible.

    Raises:
        ValueError: not even the smallest parts fit; names the bytes that they need.
    """

    def cut(num_parts: int) -> Cut:
        rows_per_part = triton.cdiv(max(bounds.rows, 1), num_parts)
        num_parts = triton.cdiv(bounds.rows, rows_per_part)
        largest = bounds
        if num_parts > 1:
            # The last tile of a part reaches past its end by all but one of its rows.
            rows = min(bounds.rows, rows_per_part - 1 + tile_prefixes * cores[2].shape[0])
            prefixes = min(bounds.prefixes, rows)
            tiles = min(bounds.tiles, _max_tiles(prefixes, cores[1].shape[0], tile_prefixes))
            largest = Bounds(rows, prefixes, tiles)
        return Cut(num_parts, rows_per_part, largest)

    most_parts = max(triton.cdiv(bounds.rows, tile_prefixes * cores[2].shape[0]), 1)
    floor_bytes = min(bytes_of(cut(most_parts)), bytes_of(cut(1)))
    if workspace_bytes is None:
        workspace_bytes = max(floor_bytes, DEFAULT_WORKSPACE_BYTES)
    if workspace_bytes < floor_bytes:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} is below the floor of {floor_bytes} bytes"
        )
    fewest, most = 1, most_parts
    if bytes_of(cut(1)) <= workspace_bytes:
        most = 1
    while fewest < most:
        middle = (fewest + most) // 2
        if bytes_of(cut(middle)) <= workspace_bytes:
            most = middle
        else:
            fewest = middle + 1
    return cut(most)


def find_parts(plan: IndexPlan, bounds: Bounds, cut: Cut, tile_prefixes: int) -> Parts:
    """Tiles start at every `tile_prefixes`-th prefix of a group; parts start at tiles."""
    device = plan.counts.device
    sizes_G = (plan.group_starts.diff() + (tile_prefixes - 1)) // tile_prefixes
    group_tiles = torch.nn.functional.pad(sizes_G.cumsum(0, dtype=torch.int32), (1, 0))
    tile = torch.arange(bounds.tiles + 1, dtype=torch.int32, device=device)
    # The tile past the last one belongs to the end of the last group: it starts at P.
    group = torch.searchsorted(group_tiles, tile, right=True).clamp_(max=len(group_tiles) - 1) - 1
    tile_starts = plan.group_starts[group] + (tile - group_tiles[group]) * tile_prefixes
    tile_starts = torch.minimum(tile_starts, plan.counts[1])
    tile_rows = plan.prefix_starts[tile_starts]

    part_rows = torch.arange(cut.num_parts + 1, device=device) * cut.rows_per_part
    part_rows = part_rows.clamp_(max=bounds.rows).int()
    first_tile = torch.searchsorted(tile_rows, part_rows)
    first_tile = torch.minimum(first_tile, group_tiles[-1])
    cuts = torch.stack([first_tile.int(), tile_starts[first_tile], tile_rows[first_tile]], 1)
    return Parts(tile_starts, group_tiles, cuts, cut)


def index_bytes(bounds: Bounds, num_groups: int, cut: Cut) -> int:
    """Bytes of `find_parts`, its temporaries counted in full."""
    return 40 * (bounds.tiles + 1) + 24 * (num_groups + 1) + 64 * (cut.num_parts + 1)


def _max_tiles(prefixes: int, num_groups: int, tile_prefixes: int) -> int:
    return min(prefixes, triton.cdiv(prefixes, tile_prefixes) + min(num_groups, prefixes))


@triton.jit
def part_bounds(cuts, part):
    """First and end tile, first and end prefix, first and end row of a part."""
    begin = cuts + part * 3
    return (
        tl.load(begin),
        tl.load(begin + 3),
        tl.load(begin + 1),
        tl.load(begin + 4),
        tl.load(begin + 2),
        tl.load(begin + 5),
    )
