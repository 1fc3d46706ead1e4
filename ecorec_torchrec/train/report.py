"""Tables on the screen: rich where somebody watches, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH = 120
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table to stdout: with rules and colour on a terminal, in plain columns elsewhere."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else _PLAIN_WIDTH)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD if terminal else box.ASCII2
    )
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def human_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def print_figures(title: str, figures: Mapping[str, Mapping[str, str]]) -> None:
    """A table of `{row: {column: text}}`."""
    columns = list(next(iter(figures.values())))
    rows = [[name, *(row[column] for column in columns)] for name, row in figures.items()]
    print_table(title, ["", *columns], rows)
