"""`ecorec bench compile`."""

from __future__ import annotations

import sys

from ecorec_torchrec.bench.compile_check import CompileOptions, compile_check
from ecorec_torchrec.cli.options import parse_flags


def run(arguments: list[str]) -> None:
    options = parse_flags(CompileOptions, arguments, command="bench compile")
    problems = compile_check(options)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print("no spills, shared memory within the limits")
