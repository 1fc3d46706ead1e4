"""Which data a run reads: the section `data` of its config.

Nothing heavy is imported here, so that `ecorec train --help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro


def require(condition: bool, option: str, value: object, rule: str) -> None:
    """Raises the `ValueError` of an option that breaks a rule, as every config section does."""
    if not condition:
        raise ValueError(f"{option}={value!r} {rule}")


@dataclass(kw_only=True, slots=True)
class CriteoConfig:
    """Files of the Criteo Kaggle or Terabyte click logs (used with `data.name: criteo`)."""

    train_files: tuple[str, ...] = ()
    """Files or glob patterns, relative to `data.path`; empty: every file below `data.path`."""

    val_files: tuple[str, ...] = ()
    """Validation files. Without them, `data.val_fraction` of the rows of `train_files`."""

    test_files: tuple[str, ...] = ()
    """Test files. Without them, `data.test_fraction` of the rows of `train_files`."""

    num_embeddings: int = 1_000_000
    """Rows of each of the 26 tables that `data.num_embeddings` does not name."""

    shuffle_buffer_rows: int = 65_536
    """Rows held in memory to shuffle the training stream; 1 keeps the order of the files."""

    def __post_init__(self) -> None:
        require(
            self.num_embeddings >= 1,
            "data.criteo.num_embeddings",
            self.num_embeddings,
            "must be >= 1",
        )
        require(
            self.shuffle_buffer_rows >= 1,
            "data.criteo.shuffle_buffer_rows",
            self.shuffle_buffer_rows,
            "must be >= 1",
        )


@dataclass(kw_only=True, slots=True)
class SyntheticConfig:
    """Rows drawn from a planted model (used with `data.name: synthetic`)."""

    num_rows: int = 20_000
    """Rows of all three splits together."""

    num_sparse_features: int = 4
    """Sparse features, one table each, called `sparse_0`, `sparse_1`, ..."""

    num_dense_features: int = 4
    """Dense features; the first one carries signal."""

    num_embeddings: int = 10_000
    """Rows of each table that `data.num_embeddings` does not name."""

    max_bag_size: int = 4
    """Ids in a bag: 0 to this many, evenly."""

    zipf_exponent: float = 1.05
    """Popularity of ids: the k-th most popular id has weight k^-exponent."""

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_sparse_features", "num_dense_features", "num_embeddings"):
            value = getattr(self, name)
            require(value >= 1, f"data.synthetic.{name}", value, "must be >= 1")
        require(
            self.max_bag_size >= 1, "data.synthetic.max_bag_size", self.max_bag_size, "must be >= 1"
        )
        require(
            self.zipf_exponent >= 0,
            "data.synthetic.zipf_exponent",
            self.zipf_exponent,
            "must be >= 0",
        )


@dataclass(kw_only=True, slots=True)
class DrawnTablesConfig:
    """Tables to plan for, drawn so that they add up to known totals (`data.name: tables`)."""

    count: int = 788
    """Tables."""

    samples: int = 131_072
    """Samples that the totals are of."""

    lookups: int = 1_405_163_864
    """Lookups of all tables in these samples."""

    unique_ids: int = 110_259_238
    """Distinct ids of all tables in these samples."""

    seed: int = 788
    """Sizes, lookups and skews of the tables follow from it."""

    def __post_init__(self) -> None:
        for name in ("count", "samples", "lookups", "unique_ids"):
            value = getattr(self, name)
            require(value >= 1, f"data.tables.{name}", value, "must be >= 1")
        require(self.seed >= 0, "data.tables.seed", self.seed, "must be >= 0")


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which rows to train on, and how they are split."""

    name: Literal["movielens-100k", "criteo", "synthetic", "tables"] = "synthetic"
    """The data set. tables: none, for `ecorec plan`: tables of a CSV file in `path`, or drawn."""

    path: Annotated[str | None, tyro.conf.arg(aliases=["--data"])] = None
    """Folder (or file) of your own copy. MovieLens-100K is found without it where the `recbole`
    distribution, which ships the files, is installed."""

    num_embeddings: dict[str, int] = field(default_factory=dict)
    """Rows of single tables by feature name; raw ids are hashed into them."""

    val_fraction: float = 0.1
    """Share of the rows held out to choose the epoch."""

    test_fraction: float = 0.1
    """Share of the rows held out for the reported figure."""

    criteo: CriteoConfig = field(default_factory=CriteoConfig)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    tables: DrawnTablesConfig = field(default_factory=DrawnTablesConfig)

    def __post_init__(self) -> None:
        for table, rows in self.num_embeddings.items():
            require(rows >= 1, f"data.num_embeddings.{table}", rows, "must be >= 1")
        for name in ("val_fraction", "test_fraction"):
            value = getattr(self, name)
            require(0 < value < 1, f"data.{name}", value, "must lie between 0 and 1")
        held_out = self.val_fraction + self.test_fraction
        require(held_out < 1, "data.val_fraction + data.test_fraction", held_out, "must be < 1")
