"""`ecorec export`: a table of a run as one dense matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ecorec_torchrec.cli.options import parse_flags

_FORMATS = (".npy", ".pt")


@dataclass(kw_only=True, slots=True)
class ExportOptions:
    """Write the dense weights of one table of the newest checkpoint of a run.

    TT tables are multiplied out; every row that exists is written, as float32.
    """

    run: str
    """The run folder, such as runs/movielens-100k, or one of its checkpoints."""

    table: str
    """The table."""

    out: str | None = None
    """A .npy or .pt file; without it TABLE.npy in the run folder."""

    def __post_init__(self) -> None:
        if self.out is not None and Path(self.out).suffix not in _FORMATS:
            raise ValueError(f"--out {self.out}: the file must end in {' or '.join(_FORMATS)}")


def run(arguments: list[str]) -> None:
    options = parse_flags(ExportOptions, arguments, command="export")
    from ecorec_torchrec.train.export import export_table
    from ecorec_torchrec.train.saved_state import find_checkpoint
    from ecorec_torchrec.train.table_sizes import print_sizes

    folder = Path(options.run)
    checkpoint = find_checkpoint(folder)
    out = Path(options.out) if options.out else folder / f"{options.table}.npy"
    out.parent.mkdir(parents=True, exist_ok=True)
    export = export_table(checkpoint, options.table, out)
    print_sizes(str(checkpoint), [export.table])
    rows, columns = export.table.num_embeddings, export.table.embedding_dim
    print(f"{out}: {rows:,} rows x {columns} columns, float32, {export.file_bytes:,} bytes")
