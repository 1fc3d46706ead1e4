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
    """The run folder, such as runs/movielens-100k."""

    table: str
    """The table."""

    out: str | None = None
    """A .npy or .pt file; without it TABLE.npy in the run folder."""

    def __post_init__(self) -> None:
        if self.out is not None and Path(self.out).suffix not in _FORMATS:
            raise ValueError(f"--out {self.out}: the file must end in {' or '.join(_FORMATS)}")


def run(arguments: list[str]) -> None:
    options = parse_flags(ExportOptions, arguments, command="export")
    from ecorec_torchrec.train.checkpoint import Checkpoints
    from ecorec_torchrec.train.export import export_table

    folder = Path(options.run)
    checkpoint = Checkpoints(folder / "checkpoints", keep=1).newest()
    if checkpoint is None:
        raise ValueError(f"--run {options.run}: no checkpoint in {folder / 'checkpoints'}")
    out = Path(options.out) if options.out else folder / f"{options.table}.npy"
    out.parent.mkdir(parents=True, exist_ok=True)
    shape = export_table(checkpoint, options.table, out)
    print(f"{out}: {shape[0]:,} rows x {shape[1]} columns, from {checkpoint}")
