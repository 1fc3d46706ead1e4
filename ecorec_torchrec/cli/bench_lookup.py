"""`ecorec bench lookup`."""

from __future__ import annotations

from pathlib import Path

import tyro

from ecorec_torchrec.bench.lookup import LookupOptions, run_lookup
from ecorec_torchrec.bench.lookup_report import draw, print_cell, read_rows, write_report


def run(arguments: list[str]) -> None:
    options = tyro.cli(LookupOptions, args=arguments, prog="ecorec bench lookup")
    for results in run_lookup(options):
        print_cell(results)
    rows = read_rows(Path(options.csv))
    if options.report:
        write_report(rows, Path(options.report))
    if options.plot:
        draw(rows, Path(options.plot))
    print(f"written to {options.csv}")
