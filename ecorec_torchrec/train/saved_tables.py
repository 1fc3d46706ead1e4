"""The embedding tables of a saved state: dense weights or TT cores, and what they take."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ecorec_torchrec.train.checkpoint import read_table_rows
from ecorec_torchrec.train.saved_state import SavedState, TensorInfo, open_state
from ecorec_torchrec.tt import TTSpec

# The start of a weight's or core's name, or of what an optimizer keeps of it.
_TABLE = re.compile(
    r"(?P<path>(?:.*\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+))"
    r"\.(?:weight|tt_cores\.(?P<core>\d+))(?=\.|$)"
)


@dataclass(frozen=True)
class SavedTable:
    """A table of a saved state.

    Attributes:
        name: the table's.
        path: its key without `.weight` or `.tt_cores.0`.
        tensors: the weight `(N, D)`, or the cores `(p_k, r_{k-1}, q_k, r_k)` in order, by key.
        num_rows: N where it is known; the cores of a TT table only tell that N <= prod(p).
    """

    name: str
    path: str
    tensors: dict[str, TensorInfo]
    num_rows: int | None

    @property
    def is_tt(self) -> bool:
        return len(self.tensors) > 1

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def stored_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def max_rows(self) -> int:
        """N of a dense table; of a TT table the most that its cores can stand for, prod(p)."""
        return math.prod(info.shape[0] for info in self.tensors.values())

    @property
    def shape(self) -> tuple[int, int]:
        """(N, D).

        Raises:
            ValueError: N is not known.
        """
        if self.num_rows is None:
            raise ValueError(
                f"table {self.name!r}: its cores do not tell how many rows it has, at most "
                f"{self.max_rows}, and the checkpoint has no tables.json: give num_embeddings "
                f"(--num-embeddings {self.name} ROWS)"
            )
        shapes = [info.shape for info in self.tensors.values()]
        columns = math.prod(shape[2] for shape in shapes) if self.is_tt else shapes[0][1]
        return self.num_rows, columns

    @property
    def dense_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def spec(self) -> TTSpec | None:
        """The shape of its cores; None for a dense table."""
        if not self.is_tt:
            return None
        cores = [info.shape for info in self.tensors.values()]
        return TTSpec(
            self.shape[0],
            row_factors=tuple(core[0] for core in cores),
            col_factors=tuple(core[2] for core in cores),
            ranks=tuple(core[3] for core in cores[:-1]),
        )


def saved_tables(
    state: SavedState, num_embeddings: Mapping[str, int] | None = None
) -> list[SavedTable]:
    """The tables of a state: 2-d `...embedding_bags.<table>.weight` and `...embeddings.<table>
    .weight`, and cores under `.tt_cores.<k>` in their place. Optimizer state is none.

    Args:
        state: the saved state.
        num_embeddings: rows of TT tables by name or path, where no `tables.json` lies beside the
            state.

    Raises:
        ValueError: `num_embeddings` names no TT table of the state, or more rows than its cores
            can stand for.
    """
    rows = {**read_table_rows(state.path), **(num_embeddings or {})}
    found: dict[str, dict[int, str]] = defaultdict(dict)
    names = {}
    for key in model_names(state):
        match = _TABLE.fullmatch(key)
        if match is None or (match["core"] is None and len(state.tensors[key].shape) != 2):
            continue
        found[match["path"]][int(match["core"] or 0)] = key
        names[match["path"]] = match["table"]
    tables = []
    for path, keys in found.items():
        tensors = {key: state.tensors[key] for _, key in sorted(keys.items())}
        first = next(iter(tensors.values()))
        num_rows = first.shape[0] if len(tensors) == 1 else rows.get(path, rows.get(names[path]))
        tables.append(SavedTable(names[path], path, tensors, num_rows))
    _check_rows(tables, num_embeddings or {})
    return tables


def _check_rows(tables: Sequence[SavedTable], num_embeddings: Mapping[str, int]) -> None:
    tt_tables = [table for table in tables if table.is_tt]
    known = {key for table in tt_tables for key in (table.name, table.path)}
    if unknown := [key for key in num_embeddings if key not in known]:
        there_are = ", ".join(sorted(table.name for table in tt_tables)) or "none"
        raise ValueError(
            f"num_embeddings: no TT table {', '.join(unknown)} in the checkpoint ({there_are})"
        )
    for table in tt_tables:
        if table.num_rows is not None and not 1 <= table.num_rows <= table.max_rows:
            raise ValueError(
                f"table {table.name!r}: num_embeddings={table.num_rows} must lie in "
                f"1..{table.max_rows}, the rows that its cores can stand for"
            )


def rows_of(tables: Sequence[SavedTable]) -> dict[str, int]:
    """The known rows of tables, for a `tables.json`: by name, or by path where two have one name.

    Collections of one model may call a table of each by the same name.
    """
    counts = Counter(table.name for table in tables)
    return {
        table.name if counts[table.name] == 1 else table.path: table.num_rows
        for table in tables
        if table.num_rows is not None
    }


def table_of(name: str) -> str | None:
    """The table that a parameter, or its optimizer's state, belongs to; None for all else.

    Example::

        table_of("model.sparse_arch.ebc.embedding_bags.user_id.tt_cores.0")  # "user_id"
        table_of("model.over_arch.model.1.weight")                            # None
    """
    match = _TABLE.match(name)
    return match["table"] if match else None


def model_names(state: SavedState) -> list[str]:
    """The names of all tensors but those of optimizers: `[root.]state.<parameter>.<what>`.

    A parameter goes by its name, or by a number where `[root.]param_groups` is there as well.
    """
    numbered = {
        name.partition("param_groups")[0] for name in state.other_names if "param_groups" in name
    }
    parts = {name: name.split(".") for name in state.tensors}
    endings = {".".join(part[i:]) for part in parts.values() for i in range(len(part))}

    def is_of_optimizer(part: list[str]) -> bool:
        if "param_groups" in part:
            return True
        if "state" not in part[:-2]:
            return False
        start = part.index("state")
        root, rest = "".join(f"{key}." for key in part[:start]), part[start + 1 :]
        if rest[0].isdigit() and root in numbered:
            return True
        return any(".".join(rest[:end]) in endings for end in range(1, len(rest)))

    return [name for name, part in parts.items() if not is_of_optimizer(part)]


def read_tt_specs(
    checkpoint: str | Path, num_embeddings: Mapping[str, int] | None = None
) -> dict[str, TTSpec]:
    """The shapes of the TT tables of a checkpoint, as a `TTEmbeddingBagCollection` takes them.

    Args:
        checkpoint: as `open_state` takes it.
        num_embeddings: rows of the tables, for a checkpoint that has no `tables.json`.

    Example::

        ebc = TTEmbeddingBagCollection(tables, tt=read_tt_specs("converted"), device="meta")
    """
    tables = saved_tables(open_state(Path(checkpoint)), num_embeddings)
    return {table.name: table.spec for table in tables if table.spec is not None}
