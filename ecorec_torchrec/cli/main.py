"""Choice of the command, and how its errors look."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_COMMANDS = {
    "train": "train a DLRM with tensor-train tables",
    "plan": "show or save the plan of a configuration, without training",
    "profile": "measure what a data set asks of its tables, for the planner",
    "export": "write the dense weights of a table of a run",
    "convert": "turn dense tables of a checkpoint into TT cores, and back",
    "bench": "measure quality or speed",
    "env": "versions and hardware, for bug reports",
}
_USER_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; exits with 2 after a mistake of the user, with 1 after a failed run, with
    130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    if arguments[0] == "--version":
        print(importlib.metadata.version("ecorec-torchrec"))
        return
    command = arguments[0]
    if command not in _COMMANDS:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?\n\n" if near else "\n"
        print(f"ecorec: no command `{command}`; {hint}{_usage()}", file=sys.stderr)
        sys.exit(_USER_ERROR)
    module = importlib.import_module(f"ecorec_torchrec.cli.{command}")
    run_command(module.run, arguments[1:])


def run_command(run: object, arguments: list[str]) -> None:
    """Calls `run(arguments)`; what the user can mend is a message, not a traceback."""
    from ecorec_torchrec.train.launch import RunFailedError

    assert callable(run)
    try:
        run(arguments)
    except KeyboardInterrupt:
        _exit(_INTERRUPTED, "interrupted")
    except RunFailedError as error:
        _exit(1, f"the run failed: {error}")
    except FloatingPointError as error:
        _exit(1, str(error))
    except ValueError as error:
        _exit(_USER_ERROR, str(error))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        if error.filename is None:  # not a path that the user gave
            raise
        _exit(_USER_ERROR, f"{error.filename}: {error.strerror}")


def _exit(code: int, message: str) -> NoReturn:
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""  # under torchrun
    print(f"ecorec: {rank}{message}", file=sys.stderr)
    sys.exit(code)


def _usage() -> str:
    lines = [f"  {name:<8} {summary}" for name, summary in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: ecorec COMMAND [OPTIONS]",
            "",
            "Tensor-train embedding tables for TorchRec.",
            "",
            "commands:",
            *lines,
            "",
            "`ecorec COMMAND --help` lists the options. A first run:",
            "  ecorec train --config movielens_100k --nproc 2 --compare-dense",
        ]
    )
