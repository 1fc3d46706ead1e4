"""`ecorec bench cpu-lookup`."""

from __future__ import annotations

import tyro

from ecorec_torchrec.bench.cpu_lookup import CpuLookupOptions, print_rows, run_cpu_lookup


def run(arguments: list[str]) -> None:
    options = tyro.cli(CpuLookupOptions, args=arguments, prog="ecorec bench cpu-lookup")
    print_rows(run_cpu_lookup(options))
    print(f"written to {options.csv}")
