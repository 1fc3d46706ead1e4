"""`ecorec bench cpu-lookup`."""

from __future__ import annotations

from ecorec_torchrec.bench.cpu_lookup import CpuLookupOptions, print_rows, run_cpu_lookup
from ecorec_torchrec.cli.options import parse_flags


def run(arguments: list[str]) -> None:
    options = parse_flags(CpuLookupOptions, arguments, command="bench cpu-lookup")
    print_rows(run_cpu_lookup(options))
    print(f"written to {options.csv}")
