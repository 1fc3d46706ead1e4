"""`ecorec bench pipeline`."""

from __future__ import annotations

from ecorec_torchrec.bench.pipeline import PipelineBenchOptions, run_pipeline
from ecorec_torchrec.cli.options import parse_flags
from ecorec_torchrec.train.report import print_table

_SHOWN = ("variant", "dist_groups", "step_ms", "exposed_comm_ms", "ideal_step_ms")


def run(arguments: list[str]) -> None:
    options = parse_flags(PipelineBenchOptions, arguments, command="bench pipeline")
    for rows in run_pipeline(options):
        shown = [[str(row[column]) for column in _SHOWN] for row in rows]
        print_table(f"link {rows[0]['link']}", _SHOWN, shown)
    print(f"written to {options.csv}")
