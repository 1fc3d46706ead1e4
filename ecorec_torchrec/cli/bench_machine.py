"""`ecorec bench machine`."""

from __future__ import annotations

from pathlib import Path

from ecorec_torchrec.bench.machine import (
    MachineBenchOptions,
    measure_machine,
    still_valid,
    write_hardware,
)
from ecorec_torchrec.cli.options import parse_flags
from ecorec_torchrec.train.report import print_table


def run(arguments: list[str]) -> None:
    options = parse_flags(MachineBenchOptions, arguments, command="bench machine")
    reason = still_valid(options)
    if reason is None:
        print(f"{options.out} was measured on this machine; --renew measures again")
        return
    print(f"measuring: {reason}")
    hardware, errors = measure_machine(options)
    rows = [
        [operation, ", ".join(f"{unit} {cost:g}" for unit, cost in costs.items() if cost),
         f"{errors[operation]:.0%}"]
        for operation, costs in hardware.costs_ns.items()
    ]  # fmt: skip
    print_table("costs", ("operation", "ns per unit", "median error"), rows)
    write_hardware(hardware, Path(options.out))
    print(f"written to {options.out}")
