"""Which tables a lookup reads, and where their rows lie in the group's flat cores."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class TableBatch:
    """T tables of equal column factors and ranks that are looked up by one kernel.

    Core k of all tables is one flat tensor `(sum_t p_tk, r_{k-1}, q_k, r_k)`, the tables one after
    the other; `core_offsets[k][t]` is the first row of table t. Replaces the table offsets of
    FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`.

    Args:
        table_names: T names, used in messages.
        num_embeddings: N per table; ids at or above it are out of range, padding rows included.
        row_factors: per table its K row factors, prod(p) >= N.
        col_factors: q, K integers with prod(q) = D.
        ranks: the K - 1 inner ranks.
        feature_names: F names, used in messages.
        feature_tables: the table that each feature reads; features may share a table.

    Raises:
        ValueError: lengths, signs or products do not fit; the message names the table or feature.

    Example::

        batch = TableBatch(("user", "item"), (90, 50), ((4, 5, 5), (3, 4, 5)), (2, 2, 2), (8, 8),
                           feature_names=("u", "i", "last_i"), feature_tables=(0, 1, 1))
        batch.core_shapes     # ((7, 1, 2, 8), (9, 8, 2, 8), (10, 8, 2, 1))
        batch.core_offsets    # ((0, 4), (0, 5), (0, 5))
    """

    table_names: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    row_factors: tuple[tuple[int, ...], ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    feature_names: tuple[str, ...]
    feature_tables: tuple[int, ...]
    key: str = field(init=False, repr=False, compare=False)
    """The batch as text: what the operators, which take no Python objects, are given."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        self._check_tables()
        self._check_features()
        object.__setattr__(self, "key", _text(tuple(getattr(self, name) for name in _FIELDS)))

    def _check_tables(self) -> None:
        num_cores = len(self.col_factors)
        if num_cores < 2 or len(self.ranks) != num_cores - 1:
            raise ValueError(
                f"K cores have K column factors and K - 1 inner ranks (K >= 2), got "
                f"col_factors={self.col_factors} and ranks={self.ranks}"
            )
        if min(*self.col_factors, *self.ranks) < 1:
            raise ValueError(f"not positive: col_factors={self.col_factors}, ranks={self.ranks}")
        lengths = len(self.table_names), len(self.num_embeddings), len(self.row_factors)
        if len(set(lengths)) != 1 or not self.table_names:
            raise ValueError(
                "table_names, num_embeddings and row_factors must have one entry per table, got "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        tables = zip(self.table_names, self.num_embeddings, self.row_factors, strict=True)
        for name, num_rows, factors in tables:
            if len(factors) != num_cores or min(factors) < 1:
                raise ValueError(
                    f"table {name!r}: row_factors={factors} must be {num_cores} positive integers"
                )
            if not 1 <= num_rows <= math.prod(factors):
                raise ValueError(
                    f"table {name!r}: num_embeddings={num_rows} must lie in "
                    f"1..{math.prod(factors)}, the product of row_factors={factors}"
                )
        for k, factors_T in enumerate(zip(*self.row_factors, strict=True)):
            if sum(factors_T) > _MAX_INT32:
                raise ValueError(f"core {k} has {sum(factors_T)} rows, the limit is {_MAX_INT32}")

    def _check_features(self) -> None:
        if len(self.feature_names) != len(self.feature_tables) or not self.feature_names:
            raise ValueError(
                f"feature_names and feature_tables must have one entry per feature, got "
                f"{len(self.feature_names)} and {len(self.feature_tables)}"
            )
        for name, table in zip(self.feature_names, self.feature_tables, strict=True):
            if not 0 <= table < len(self.table_names):
                raise ValueError(
                    f"feature {name!r}: table {table} is not within 0..{len(self.table_names) - 1}"
                )

    @classmethod
    def from_key(cls, key: str) -> TableBatch:
        """The batch whose `key` this is (cached)."""
        return _from_key(key)

    @property
    def num_tables(self) -> int:
        return len(self.table_names)

    @property
    def num_features(self) -> int:
        return len(self.feature_names)

    @property
    def num_cores(self) -> int:
        return len(self.col_factors)

    @property
    def embedding_dim(self) -> int:
        return math.prod(self.col_factors)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of the flat cores."""
        rows = tuple(sum(factors_T) for factors_T in zip(*self.row_factors, strict=True))
        return tuple(zip(rows, (1, *self.ranks), self.col_factors, (*self.ranks, 1), strict=True))

    @property
    def core_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per core, the first flat row of every table."""
        return tuple(
            tuple(accumulate(factors_T, initial=0))[:-1]
            for factors_T in zip(*self.row_factors, strict=True)
        )

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Per table, the first key of its rows: the padded rows prod(p) of the tables before it."""
        return tuple(accumulate((math.prod(p) for p in self.row_factors), initial=0))[:-1]


_FIELDS = (
    "table_names",
    "num_embeddings",
    "row_factors",
    "col_factors",
    "ranks",
    "feature_names",
    "feature_tables",
)


def _tuples(value: list | tuple) -> tuple:
    return tuple(_tuples(x) if isinstance(x, list | tuple) else x for x in value)


def _text(value: tuple | int | str) -> str:
    """A literal of nested tuples. Written out, because compilers cannot trace `repr` of a tuple."""
    if isinstance(value, tuple):
        return "(" + "".join([_text(x) + "," for x in value]) + ")"
    return repr(value) if isinstance(value, str) else format(value, "d")


@lru_cache(maxsize=4096)  # unsharded collections have one batch per feature
def _from_key(key: str) -> TableBatch:
    return TableBatch(*ast.literal_eval(key))
