"""`ecorec bench lookup`."""

from __future__ import annotations

from pathlib import Path

from ecorec_torchrec.bench.lookup import LookupOptions, run_lookup
from ecorec_torchrec.bench.lookup_report import draw, print_cell, read_rows, write_report
from ecorec_torchrec.cli.options import parse_flags


def run(arguments: list[str]) -> None:
    options = parse_flags(LookupOptions, arguments, command="bench lookup")
    for results in run_lookup(options):
        print_cell(results)
    rows = read_rows(Path(options.csv))
    if options.report:
        write_report(rows, Path(options.report))
    if options.plot:
        draw(rows, Path(options.plot))
    print(f"written to {options.csv}")
