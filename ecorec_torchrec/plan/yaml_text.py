"""YAML as plan files use it: strict when read, byte for byte reproducible when written."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any

import yaml

# libyaml, with which PyYAML's wheels are built, reads long files 20 times faster.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """A safe loader that refuses a key given twice, where PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a name, not a list or mapping", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Mappings one key a line, lists in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ValueError: not UTF-8, not YAML, a key given twice or that is no name, or not a mapping; the
            message has the file and, where there is one, the line.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from error
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: {error.problem or 'not valid YAML'}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}:1: expected a mapping, found {_kind(content)}")
    return content


def write_mapping(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes YAML so that `path` is, at every moment, the old file or the whole new one."""
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class Section:
    """One mapping of a file, whose keys are taken by name and type.

    Args:
        content: the value found in the file, which ought to be a mapping.
        where: what to call it in errors, with the file's name.
        keys: the keys that may occur.
        noun: what a key is, for the error about an unknown one.

    Raises:
        ValueError: not a mapping, or a key that is not in `keys`; the message names the nearest.

    Example::

        table = Section({"kernel": "tt"}, "plan.yaml: table users", ("kernel", "sharding"))
        table.text("kernel")             # "tt"
        table.text("sharding")           # ValueError: plan.yaml: table users: `sharding` is missing
    """

    def __init__(self, content: Any, where: str, keys: Collection[str], noun: str = "key") -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.error(f"expected a mapping, found {_kind(content)}")
        for key in content:
            if key not in keys:
                raise self.error(f"unknown {noun} {unknown_name(key, keys)}")
        self._content = content

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.where}: {message}")

    def has(self, key: str) -> bool:
        return key in self._content

    def names(self) -> list[str]:
        return list(self._content)

    def raw(self, key: str) -> Any:
        if key not in self._content:
            raise self.error(f"`{key}` is missing")
        return self._content[key]

    def integer(self, key: str) -> int:
        return self._typed(key, int, "an integer")

    def number(self, key: str) -> float:
        return float(self._typed(key, (int, float), "a number"))

    def flag(self, key: str) -> bool:
        return self._typed(key, bool, "true or false")

    def text(self, key: str) -> str:
        return self._typed(key, str, "a text")

    def choice(self, key: str, names: Collection[str]) -> str:
        value = self.text(key)
        if value not in names:
            raise self.error(f"`{key}`: unknown value {unknown_name(value, names)}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.raw(key)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(f"`{key}` must be a list of integers, found {value!r}")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        return self._numbers(key, self.raw(key))

    def number_lists(self, key: str) -> tuple[tuple[float, ...], ...]:
        return tuple(self._numbers(key, row) for row in self.mappings(key))

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.raw(key)
        if not isinstance(value, list) or any(type(item) is not str for item in value):
            raise self.error(f"`{key}` must be a list of texts, found {value!r}")
        return tuple(value)

    def mappings(self, key: str) -> list[Any]:
        value = self.raw(key)
        if not isinstance(value, list):
            raise self.error(f"`{key}` must be a list, found {_kind(value)}")
        return value

    def _numbers(self, key: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
            raise self.error(f"`{key}` must be a list of numbers, found {value!r}")
        return tuple(map(float, value))

    def _typed(self, key: str, expected: type | tuple[type, ...], name: str) -> Any:
        value = self.raw(key)
        # bool is an int to Python, not to a user.
        if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            raise self.error(f"`{key}` must be {name}, found {value!r}")
        return value


def unknown_name(name: object, names: Collection[str]) -> str:
    """`'knel' (did you mean 'kernel'? known: ..)`, for an error about a name that is not there."""
    known = sorted(names)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    shown = ", ".join(known[:20]) + (", .." if len(known) > 20 else "")
    return f"{name!r} ({hint}known: {shown})"


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"
