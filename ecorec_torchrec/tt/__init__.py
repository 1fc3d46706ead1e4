"""Tensor-train maths: the shape of a table, initial cores, conversion from and to dense tables."""

from .dense import from_dense, to_dense
from .init import default_entry_std, entry_moments, init_cores_
from .spec import TTSpec

__all__ = [
    "TTSpec",
    "default_entry_std",
    "entry_moments",
    "from_dense",
    "init_cores_",
    "to_dense",
]
