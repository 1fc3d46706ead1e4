"""Options of a command: a configuration file first, flags over it."""

from __future__ import annotations

import dataclasses
import typing
from inspect import cleandoc
from typing import TypeVar

import docstring_parser
import tyro

from ecorec_torchrec.train.config_file import load_config, shipped_configs

T = TypeVar("T")
_FIELDS_HEADING = "\n\nAttributes:\n"


def parse_options(options_type: type[T], arguments: list[str], *, command: str) -> T:
    """Options from `--config FILE|NAME`, when given, overridden by the other arguments.

    Raises:
        ValueError: the file cannot be read or used, or an option has a value that does not fit.
        SystemExit: arguments that do not parse (the message is on stderr), and `--help`.
    """
    arguments = list(arguments)
    name = _pop_config(arguments)
    default = load_config(name, options_type) if name is not None else options_type()
    return parse_flags(
        options_type,
        arguments,
        command=f"{command} [--config FILE|NAME]",
        default=default,
        epilog=f"Names: {', '.join(shipped_configs())}.",
    )


def parse_flags(
    options_type: type[T],
    arguments: list[str],
    *,
    command: str,
    default: T | None = None,
    epilog: str = "",
) -> T:
    """Options from flags alone, over `default`; the docstrings of class and fields are the help.

    Raises:
        ValueError: an option has a value that does not fit.
        SystemExit: arguments that do not parse (the message is on stderr), and `--help`.
    """
    # One line per paragraph: tyro would keep some line breaks and break the line elsewhere too.
    paragraphs = _summary(options_type).split("\n\n") + [epilog]
    description = "\n\n".join(" ".join(text.split()) for text in paragraphs).strip()
    _describe_fields(options_type)
    result = tyro.cli(
        options_type,
        default=default,
        args=arguments,
        prog=f"ecorec {command}",
        description=description,
    )
    return typing.cast(T, result)


def _summary(options_type: type) -> str:
    return cleandoc(options_type.__doc__ or "").partition(_FIELDS_HEADING)[0]


def _describe_fields(options_type: type) -> None:
    """Repeats the docstrings of the fields, one line each, in the docstring of their class.

    Where a field's docstring has several lines, tyro takes their indentation for line breaks.
    """
    for part in options_type.__mro__:
        if dataclasses.is_dataclass(part) and _FIELDS_HEADING not in (part.__doc__ or ""):
            fields = docstring_parser.parse_from_object(part).params
            lines = [f"    {f.arg_name}: {' '.join((f.description or '').split())}" for f in fields]
            part.__doc__ = _summary(part) + _FIELDS_HEADING + "\n".join(lines)
    for field_type in typing.get_type_hints(options_type).values():
        if dataclasses.is_dataclass(field_type):
            _describe_fields(typing.cast(type, field_type))


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
