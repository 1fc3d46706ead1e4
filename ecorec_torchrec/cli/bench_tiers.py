"""`ecorec bench tiers`."""

from __future__ import annotations

from ecorec_torchrec.bench.tiers import TiersOptions, print_rows, run_tiers
from ecorec_torchrec.cli.options import parse_flags


def run(arguments: list[str]) -> None:
    options = parse_flags(TiersOptions, arguments, command="bench tiers")
    print_rows(run_tiers(options))
    if options.csv:
        print(f"written to {options.csv}")
