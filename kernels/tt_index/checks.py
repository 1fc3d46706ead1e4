"""Checks of what a caller hands to a lookup. Nothing is changed before all of them have passed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .table_batch import TableBatch

BOUNDS_CHECKS = ("fatal", "warning", "ignore", "none")
_INDEX_DTYPES = (torch.int32, torch.int64)
_MAX_LOOKUPS = 2**31 - 1


def check_layout(indices: Tensor, offsets: Tensor, batch: TableBatch, bounds_check: str) -> None:
    """Dtypes, shapes, devices and the mode: all that is known without reading the data.

    Raises:
        TypeError: ids or offsets are not int32 or int64.
        ValueError: a shape, the devices or the mode do not fit.
    """
    if bounds_check not in BOUNDS_CHECKS:
        raise ValueError(f"bounds_check must be one of {BOUNDS_CHECKS}, got {bounds_check!r}")
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in _INDEX_DTYPES:
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    if indices.device != offsets.device:
        raise ValueError(f"indices are on {indices.device}, offsets on {offsets.device}")
    num_features = batch.num_features
    if offsets.shape[0] < 1 or (offsets.shape[0] - 1) % num_features:
        raise ValueError(
            f"offsets must have F*B + 1 entries for the F={num_features} features "
            f"{_shorten(batch.feature_names)}, got {offsets.shape[0]}"
        )


def check_offsets(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> None:
    """Offsets start at 0, never decrease and end at L.

    Raises:
        ValueError: they do not; names the feature, the bag and the numbers.
    """
    num_lookups, num_bags = indices_L.shape[0], offsets.shape[0] - 1
    if num_lookups > _MAX_LOOKUPS:
        raise ValueError(f"{num_lookups} lookups in one call, the limit is {_MAX_LOOKUPS}")
    lengths = offsets.diff()
    first, last = int(offsets[0]), int(offsets[-1])
    if first == 0 and last == num_lookups and not bool((lengths < 0).any()):
        return
    bags_per_feature = max(num_bags // batch.num_features, 1)
    if first != 0:
        raise ValueError(f"offsets must start at 0, got {first}")
    falls = (lengths < 0).nonzero()
    if len(falls):
        bag = int(falls[0])
        raise ValueError(
            f"feature {batch.feature_names[bag // bags_per_feature]!r}: offsets decrease from "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])} at bag {bag % bags_per_feature}"
        )
    beyond = (offsets[1:] > num_lookups).nonzero()
    bag = int(beyond[0]) if len(beyond) else max(num_bags - 1, 0)
    raise ValueError(
        f"feature {batch.feature_names[bag // bags_per_feature]!r}: the lengths of all bags sum to "
        f"{last}, but there are {num_lookups} indices"
    )


def report_out_of_range(
    position: int, indices_L: Tensor, offsets: Tensor, batch: TableBatch, bounds_check: str
) -> None:
    """Raises or warns about the id at `position`, or does nothing, as `bounds_check` asks."""
    if bounds_check in ("ignore", "none"):
        return
    bag = int(torch.searchsorted(offsets, position, right=True)) - 1
    feature = bag // ((offsets.shape[0] - 1) // batch.num_features)
    table = batch.feature_tables[feature]
    message = (
        f"feature {batch.feature_names[feature]!r}: id {int(indices_L[position])} is out of range "
        f"for table {batch.table_names[table]!r} with num_embeddings="
        f"{batch.num_embeddings[table]} (position {position} of the batch)"
    )
    if bounds_check == "fatal":
        raise ValueError(message)
    warnings.warn(f"{message}; this and all other ids out of range become 0", stacklevel=2)


def _shorten(names: tuple[str, ...], limit: int = 8) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return f"[{shown}{', ...' if len(names) > limit else ''}]"
