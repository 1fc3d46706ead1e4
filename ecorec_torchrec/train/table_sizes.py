"""What tables take, dense and as cores, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from ecorec_torchrec.train.report import print_table
from ecorec_torchrec.tt import TTSpec


@dataclass(frozen=True)
class TableSize:
    """A line of the report.

    Attributes:
        name: the table's.
        num_embeddings, embedding_dim: N and D.
        spec: the shape of its cores; None where it is dense.
        dense_bytes: of the dense table.
        stored_bytes: of what is stored.
        relative_error: ||TT - dense|| / ||dense||, where cores were made from a dense table.
        note: why it is dense although it was to become TT.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    spec: TTSpec | None
    dense_bytes: int
    stored_bytes: int
    relative_error: float | None = None
    note: str = ""


def print_sizes(title: str, sizes: Sequence[TableSize]) -> None:
    """Rows, bytes and ratio of every table and of all together, and what was lost."""
    rows = [
        [
            size.name,
            f"{size.num_embeddings:,}",
            str(size.embedding_dim),
            "dense" if size.spec is None else f"TT r={'x'.join(map(str, size.spec.ranks))}",
            "" if size.relative_error is None else f"{size.relative_error:.4g}",
            *_bytes_and_ratio(size.dense_bytes, size.stored_bytes),
        ]
        for size in sizes
    ]
    dense = sum(size.dense_bytes for size in sizes)
    stored = sum(size.stored_bytes for size in sizes)
    rows.append(["total", "", "", "", "", *_bytes_and_ratio(dense, stored)])
    columns = ("table", "rows", "dim", "kind", "error", "dense bytes", "stored bytes", "ratio")
    print_table(title, columns, rows)
    for size in sizes:
        if size.note:
            print(f"{size.name} stays dense: {size.note}")


def _bytes_and_ratio(dense_bytes: int, stored_bytes: int) -> list[str]:
    ratio = f"{dense_bytes / stored_bytes:,.1f}" if stored_bytes else ""
    return [f"{dense_bytes:,}", f"{stored_bytes:,}", ratio]


def config_of_shapes(sizes: Sequence[TableSize]) -> str:
    """The shapes of the TT tables as the `tt` section of a configuration."""
    specs = {size.name: size.spec for size in sizes if size.spec is not None}
    if not specs:
        return ""
    shapes = {
        name: {part: list(getattr(spec, part)) for part in ("row_factors", "col_factors", "ranks")}
        for name, spec in specs.items()
    }
    section = {"tt": {"tables": list(specs), "shapes": shapes}}
    return yaml.safe_dump(section, sort_keys=False, default_flow_style=None)
