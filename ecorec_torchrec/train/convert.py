"""A trained checkpoint with dense tables as one with TT tables, and back.

One table is in memory at a time. Optimizer state belongs to parameters that are no more, and is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ecorec_torchrec.train.saved_state import SavedState, TensorInfo, open_state, write_state
from ecorec_torchrec.train.saved_tables import SavedTable, model_names, rows_of, saved_tables
from ecorec_torchrec.train.table_sizes import TableSize
from ecorec_torchrec.tt import TTSpec, from_dense, to_dense

_RANK_STEP = 8  # from there on ranks are multiples of it, as `TTSpec.suggest` makes them


@dataclass(frozen=True)
class RankChoice:
    """How the rank of a table is found; exactly one of the first three is given.

    Args:
        rank: the rank, cut to what the table's shape can use.
        max_error: the smallest rank whose relative error ||TT - dense|| / ||dense|| is not larger:
            1, 2, .., 8 and the multiples of 8 are searched by bisection, each tried by TT-SVD.
        max_bytes: the largest rank whose cores take no more bytes, table by table.
        num_cores: K.
    """

    rank: int | None = None
    max_error: float | None = None
    max_bytes: int | None = None
    num_cores: int = 3

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("rank", "max_error", "max_bytes")}
        if sum(value is not None for value in given.values()) != 1:
            raise ValueError(f"give exactly one of rank, max_error and max_bytes, got {given}")
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise ValueError(f"max_error={self.max_error} must lie between 0 and 1")


@dataclass(frozen=True)
class Conversion:
    """What a conversion has written.

    Attributes:
        tables: one by one.
        tensor_bytes: of everything that is written.
        file_bytes: what the files of the checkpoint take.
        dropped: tensors of optimizers, which are left out.
    """

    tables: list[TableSize]
    tensor_bytes: int
    file_bytes: int
    dropped: int


def compress(
    checkpoint: str | Path,
    out: str | Path,
    choice: RankChoice,
    *,
    tables: Sequence[str] = (),
    min_bytes: int = 1 << 20,
) -> Conversion:
    """Writes a checkpoint in which large dense tables are TT cores, found by TT-SVD.

    `...embedding_bags.<table>.weight` becomes `...embedding_bags.<table>.tt_cores.<k>`, likewise
    below `embeddings`; all else stays. Needs no process group, and memory for about four times the
    largest of the tables.

    Args:
        checkpoint: a folder of torch.distributed.checkpoint, saved on any number of ranks, a run
            folder, or a file of `torch.save`.
        out: the folder to make.
        choice: of the ranks.
        tables: names of the tables to convert; without it all dense ones of `min_bytes` or more.
        min_bytes: see `tables`.

    Raises:
        ValueError: no such table, a budget below the cores of rank 1, `out` exists, or the
            checkpoint cannot be read.

    Example::

        compress("runs/dense", "runs/dense-tt", RankChoice(max_error=0.1))
        ebc = TTEmbeddingBagCollection(tables, tt=read_tt_specs("runs/dense-tt"), device="meta")
    """
    source = open_state(Path(checkpoint))
    found = saved_tables(source)
    chosen = _choose([table for table in found if not table.is_tt], tables, min_bytes, "dense")
    _check_free(out)
    cores: dict[str, Tensor] = {}
    replaced: set[str] = set()
    report = []
    for table in found:
        if table.path in chosen:
            table_cores, row = _compress_table(source, table, choice)
            report.append(row)
            cores |= {f"{table.path}.tt_cores.{k}": core for k, core in enumerate(table_cores)}
            replaced |= table.tensors.keys() if table_cores else set()
        elif table.num_rows is not None:
            report.append(_unchanged(table))
    kept = {name: source.tensors[name] for name in model_names(source) if name not in replaced}
    written = kept | {name: TensorInfo(tuple(c.shape), c.dtype) for name, c in cores.items()}

    def read(name: str) -> Tensor:
        return cores[name] if name in cores else source.read([name])[name]

    write_state(Path(out), written, read, rows_of(found))
    return _conclude(Path(out), written, report, source)


def decompress(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tables: Sequence[str] = (),
    num_embeddings: Mapping[str, int] | None = None,
) -> Conversion:
    """Writes a checkpoint in which TT tables are dense weights: the way back from `compress`.

    Args:
        checkpoint, out: as for `compress`.
        tables: names of the tables to convert; without it all TT tables.
        num_embeddings: rows of the tables, where no `tables.json` lies beside the checkpoint.

    Raises:
        ValueError: as for `compress`, or the rows of a table are not known.
    """
    source = open_state(Path(checkpoint))
    found = saved_tables(source, num_embeddings)
    chosen = _choose([table for table in found if table.is_tt], tables, 0, "TT")
    _check_free(out)
    weights = {f"{path}.weight": table for path, table in chosen.items()}
    replaced = {key for table in chosen.values() for key in table.tensors}
    kept = {name: source.tensors[name] for name in model_names(source) if name not in replaced}
    written = kept | {name: TensorInfo(t.shape, t.dtype) for name, t in weights.items()}

    def read(name: str) -> Tensor:
        if name not in weights:
            return source.read([name])[name]
        spec = weights[name].spec
        assert spec is not None
        return to_dense(list(source.read(weights[name].tensors).values()), spec)

    report = [
        TableSize(t.name, *t.shape, None, t.dense_bytes, t.dense_bytes)
        if t.path in chosen
        else _unchanged(t)
        for t in found
        if t.num_rows is not None
    ]
    write_state(Path(out), written, read, rows_of(found))
    return _conclude(Path(out), written, report, source)


def _choose(
    candidates: Sequence[SavedTable], names: Sequence[str], min_bytes: int, kind: str
) -> dict[str, SavedTable]:
    """The tables to convert, by path."""
    known = {table.name for table in candidates}
    if unknown := [name for name in names if name not in known]:
        there_are = ", ".join(sorted(known)) or "none"
        raise ValueError(f"no {kind} table {', '.join(unknown)} in the checkpoint ({there_are})")
    return {
        table.path: table
        for table in candidates
        if (table.name in names if names else table.stored_bytes >= min_bytes)
    }


def _check_free(out: str | Path) -> None:
    if Path(out).exists():
        raise ValueError(f"{out} exists already")


def _unchanged(table: SavedTable, note: str = "") -> TableSize:
    return TableSize(
        table.name,
        *table.shape,
        table.spec,
        table.dense_bytes,
        table.stored_bytes,
        note=note,
    )


def _compress_table(
    source: SavedState, table: SavedTable, choice: RankChoice
) -> tuple[list[Tensor], TableSize]:
    """The cores of a table, none where it stays dense, and its line of the report."""
    [weight] = source.read(table.tensors).values()
    try:
        found, note = _best_cores(weight, choice)
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {table.name!r}: {error}") from error
    if found is None:
        return [], _unchanged(table, note)
    spec, cores, relative_error = found
    row = TableSize(
        table.name, *table.shape, spec, table.dense_bytes, spec.nbytes(table.dtype), relative_error
    )
    return cores, row


def _best_cores(
    weight: Tensor, choice: RankChoice
) -> tuple[tuple[TTSpec, list[Tensor], float] | None, str]:
    """Shape, cores and relative error as chosen; or None, and why the table stays dense."""
    num_rows, dim = weight.shape

    def spec_of(**size: int) -> TTSpec:
        return TTSpec.suggest(num_rows, dim, num_cores=choice.num_cores, dtype=weight.dtype, **size)

    if choice.max_error is not None:
        return _within_error(weight, choice.max_error, spec_of)
    if choice.max_bytes is not None:
        spec = spec_of(max_bytes=choice.max_bytes)
    else:
        assert choice.rank is not None
        spec = spec_of(rank=choice.rank)
    if spec.nbytes(weight.dtype) >= weight.nbytes:
        ranks = "x".join(map(str, spec.ranks))
        return None, f"cores of rank {ranks} would take no fewer bytes"
    return (spec, *from_dense(weight, spec)), ""


def _within_error(
    weight: Tensor, max_error: float, spec_of: Callable[..., TTSpec]
) -> tuple[tuple[TTSpec, list[Tensor], float] | None, str]:
    ranks = _smaller_than_dense(weight, spec_of)
    if not ranks:
        return None, "cores of rank 1 would take no fewer bytes"
    largest = spec_of(rank=ranks[-1])
    cores, error = from_dense(weight, largest)
    if error > max_error:
        return None, f"the error is {error:.3g} at rank {ranks[-1]}, the largest that saves bytes"
    best, fits, too_few = (largest, cores, error), len(ranks) - 1, -1
    while fits - too_few > 1:
        middle = (fits + too_few) // 2
        spec = spec_of(rank=ranks[middle])
        cores, error = from_dense(weight, spec)
        if error <= max_error:
            best, fits = (spec, cores, error), middle
        else:
            too_few = middle
    return best, ""


def _smaller_than_dense(weight: Tensor, spec_of: Callable[..., TTSpec]) -> list[int]:
    """The ranks to search, ascending."""
    ranks: list[int] = []
    rank = 1
    seen: set[tuple[int, ...]] = set()
    while True:
        spec = spec_of(rank=rank)
        if spec.nbytes(weight.dtype) >= weight.nbytes or spec.ranks in seen:
            return ranks
        seen.add(spec.ranks)
        ranks.append(rank)
        rank += 1 if rank < _RANK_STEP else _RANK_STEP


def _conclude(
    out: Path,
    written: Mapping[str, TensorInfo],
    report: list[TableSize],
    source: SavedState,
) -> Conversion:
    return Conversion(
        tables=report,
        tensor_bytes=sum(info.nbytes for info in written.values()),
        file_bytes=sum(file.stat().st_size for file in out.iterdir()),
        dropped=len(source.tensors) - len(model_names(source)),
    )
