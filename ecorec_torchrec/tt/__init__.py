"""Tensor-train maths: the shape of a table, initial cores, conversion from and to dense tables."""

from .spec import TTSpec

__all__ = ["TTSpec"]
