"""`ecorec bench compile`."""

from __future__ import annotations

import sys

import tyro

from ecorec_torchrec.bench.compile_check import CompileOptions, compile_check


def run(arguments: list[str]) -> None:
    options = tyro.cli(CompileOptions, args=arguments, prog="ecorec bench compile")
    problems = compile_check(options)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print("no spills, shared memory within the limits")
