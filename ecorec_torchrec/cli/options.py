"""Options of a command: a configuration file first, flags over it."""

from __future__ import annotations

from inspect import cleandoc
from typing import TypeVar

import tyro

from ecorec_torchrec.train.config_file import load_config, shipped_configs

T = TypeVar("T")


def parse_options(options_type: type[T], arguments: list[str], *, command: str) -> T:
    """Options from `--config FILE|NAME`, when given, overridden by the other arguments.

    Raises:
        ValueError: the file cannot be read or used, or an option has a value that does not fit.
        SystemExit: arguments that do not parse (the message is on stderr), and `--help`.
    """
    arguments = list(arguments)
    name = _pop_config(arguments)
    default = load_config(name, options_type) if name is not None else options_type()
    summary = cleandoc(options_type.__doc__ or "")
    return tyro.cli(
        options_type,
        default=default,
        args=arguments,
        prog=f"ecorec {command} [--config FILE|NAME]",
        description=f"{summary}\n\nNames: {', '.join(shipped_configs())}.",
    )


def _pop_config(arguments: list[str]) -> str | None:
    """Takes `--config X` or `--config=X` out of the arguments."""
    name = None
    for position, argument in enumerate(arguments):
        if argument == "--config":
            if position + 1 == len(arguments):
                raise ValueError("--config needs a file or a name")
            name = arguments[position + 1]
            del arguments[position : position + 2]
            break
        if argument.startswith("--config="):
            name = argument.partition("=")[2]
            del arguments[position]
            break
    if name is not None and any(a.split("=")[0] == "--config" for a in arguments):
        raise ValueError("--config is given twice")
    return name
