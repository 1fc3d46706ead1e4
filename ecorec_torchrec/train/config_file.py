"""Strict YAML for configuration dataclasses: a key or type that does not fit stops the run.

Every error names the file and the line. A configuration is never "mostly" read.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


def load_config(name_or_path: str, config_type: type[T]) -> T:
    """Reads a configuration by file name, or by the name of one that ships with the package.

    Args:
        name_or_path: a YAML file, or a name such as `movielens_100k`.
        config_type: the dataclass to fill.

    Returns:
        The filled dataclass; keys that the file leaves out keep their defaults.

    Raises:
        ValueError: no such file or name, YAML that does not parse, an unknown or repeated key, or
            a value of the wrong type; the message holds file and line.
    """
    text, source = _read(name_or_path)
    return parse_config(text, config_type, source)


def parse_config(text: str, config_type: type[T], source: str = "<text>") -> T:
    """Fills `config_type` from YAML text; `source` names the text in errors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{line}: not valid YAML: {problem}") from error
    if node is None:
        return config_type()
    return typing.cast(T, _Reader(source).read(node, config_type, ""))


def dump_config(config: Any) -> str:
    """YAML text from which `parse_config` makes an equal configuration."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML knows."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def shipped_configs() -> list[str]:
    """Names of the configurations that ship with the package."""
    folder = importlib.resources.files("ecorec_torchrec.configs")
    return sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml"))


def _read(name_or_path: str) -> tuple[str, str]:
    path = Path(name_or_path)
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    if path.is_dir():
        raise ValueError(f"--config {name_or_path}: a folder, not a file")
    names = shipped_configs()
    if name_or_path in names:
        file = importlib.resources.files("ecorec_torchrec.configs") / f"{name_or_path}.yaml"
        return file.read_text(encoding="utf-8"), f"{name_or_path}.yaml"
    raise ValueError(
        f"--config {name_or_path}: no such file, and no configuration of that name ships with "
        f"the package (there are: {', '.join(names)})"
    )


class _Reader:
    """Turns YAML nodes, which know their lines, into values of the annotated types."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._constructor = yaml.SafeLoader("")

    def read(self, node: yaml.Node, expected: Any, key: str) -> Any:
        if get_origin(expected) is typing.Annotated:
            expected = get_args(expected)[0]
        origin = get_origin(expected)
        if dataclasses.is_dataclass(expected):
            return self._read_dataclass(node, typing.cast(type, expected), key)
        if origin in (Union, types.UnionType):
            return self._read_union(node, expected, key)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                raise self._wrong_type(node, key, "a list")
            item_type = get_args(expected)[0]
            return tuple(
                self.read(item, item_type, f"{key}[{i}]") for i, item in enumerate(node.value)
            )
        if origin is dict:
            item_type = get_args(expected)[1]
            return {
                name: self.read(value, item_type, f"{key}.{name}")
                for name, _, value in self._items(node, key)
            }
        return self._read_scalar(node, expected, key)

    def _read_dataclass(self, node: yaml.Node, expected: type, key: str) -> Any:
        hints = get_type_hints(expected, include_extras=True)
        values = {}
        for name, key_node, value_node in self._items(node, key):
            full_name = f"{key}.{name}" if key else name
            if name not in hints:
                near = difflib.get_close_matches(name, hints, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(hints)}"
                raise self._error(key_node, f"unknown key `{full_name}`; {hint}")
            values[name] = self.read(value_node, hints[name], full_name)
        try:
            return expected(**values)
        except (TypeError, ValueError) as error:
            raise self._error(node, str(error)) from error

    def _read_union(self, node: yaml.Node, expected: Any, key: str) -> Any:
        *choices, last = (c for c in get_args(expected) if c is not type(None))
        is_null = self._scalar(node) is None and isinstance(node, yaml.ScalarNode)
        if is_null and type(None) in get_args(expected):
            return None
        for choice in choices:
            try:
                return self.read(node, choice, key)
            except ValueError:
                continue
        return self.read(node, last, key)

    def _read_scalar(self, node: yaml.Node, expected: Any, key: str) -> Any:
        value = self._scalar(node)
        if get_origin(expected) is Literal:
            options = get_args(expected)
            if value not in options:
                raise self._wrong_type(node, key, f"one of {', '.join(map(str, options))}")
            return value
        if expected is float:
            return self._read_float(node, value, key)
        if type(value) is not expected:
            raise self._wrong_type(node, key, {str: "text"}.get(expected, f"{expected.__name__}"))
        return value

    def _read_float(self, node: yaml.Node, value: Any, key: str) -> float:
        # YAML 1.1 reads 1e-3 (without a dot) as text, which nobody who writes it means.
        is_plain_text = isinstance(node, yaml.ScalarNode) and node.style is None
        if type(value) in (int, float) or (isinstance(value, str) and is_plain_text):
            try:
                return float(value)
            except ValueError:
                pass
        raise self._wrong_type(node, key, "a number")

    def _items(self, node: yaml.Node, key: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong_type(node, key or "the file", "keys with values")
        items: list[tuple[str, yaml.Node, yaml.Node]] = []
        seen: set[str] = set()
        for key_node, value_node in node.value:
            name = str(self._scalar(key_node))
            if name in seen:
                raise self._error(key_node, f"key `{name}` is given twice")
            seen.add(name)
            items.append((name, key_node, value_node))
        return items

    def _scalar(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return None
        try:
            return self._constructor.construct_object(node)
        except yaml.YAMLError as error:
            raise self._error(node, f"cannot read {node.value!r}: {error}") from error

    def _wrong_type(self, node: yaml.Node, key: str, wanted: str) -> ValueError:
        if isinstance(node, yaml.ScalarNode):
            got = repr(self._scalar(node))
        else:
            got = "a list" if isinstance(node, yaml.SequenceNode) else "keys with values"
        return self._error(node, f"`{key}` must be {wanted}, got {got}")

    def _error(self, node: yaml.Node, message: str) -> ValueError:
        return ValueError(f"{self._source}:{node.start_mark.line + 1}: {message}")
