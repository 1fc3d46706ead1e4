"""Profiles as files: YAML for the numbers, and a NumPy archive beside it for the hottest ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.plan.yaml_text import Section, read_mapping, write_mapping
from ecorec_torchrec.tiers import load_hot_ids, save_hot_ids

from .profile import DistinctCurve, HotRows, Profile, ReuseCurve, TableProfile

_SCHEMA_VERSION = 1
_FILE_KEYS = ("schema_version", "source", "samples", "hot_ids", "tables")
_TABLE_KEYS = (
    "num_embeddings",
    "features",
    "lookups_per_sample",
    "batch_sizes",
    "distinct_by_id",
    "distinct_by_frequency",
    "reuse",
    "hot",
)
_REUSE_KEYS = (
    "batch_size",
    "cache_rows",
    "miss_ratios",
    "first_touch_rate",
    "sampled_share",
    "error",
)
_HOT_KEYS = ("rows", "shares", "error")

T = TypeVar("T")


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a profile; the hottest ids, where there are any, to the same name with `.npz`.

    Raises:
        OSError: the files cannot be written.
    """
    hot_ids = {name: table.hot_ids for name, table in profile.tables.items() if len(table.hot_ids)}
    content: dict[str, Any] = {
        "schema_version": _SCHEMA_VERSION,
        "source": profile.source,
        "samples": profile.samples,
    }
    if hot_ids:
        archive = Path(path).with_suffix(".npz")
        save_hot_ids(hot_ids, archive)
        content["hot_ids"] = archive.name
    content["tables"] = {name: _table_mapping(table) for name, table in profile.tables.items()}
    write_mapping(content, path)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads what `save_profile` wrote.

    Raises:
        ValueError: another version, an unknown, missing or wrong key, or numbers that do not fit
            together; with file, table and key.
        OSError: the file cannot be read, or the archive that it names is not beside it.
    """
    section = Section(read_mapping(path), str(path), _FILE_KEYS)
    version = section.integer("schema_version")
    if version != _SCHEMA_VERSION:
        raise section.error(f"`schema_version` is {version}, this release reads {_SCHEMA_VERSION}")
    hot_ids: dict[str, NDArray[np.int64]] = {}
    if section.has("hot_ids"):
        hot_ids = load_hot_ids(Path(path).with_name(section.text("hot_ids")))
    content = section.raw("tables")
    tables = Section(content, f"{path}: tables", content if isinstance(content, dict) else ())
    return Profile(
        {
            name: _table(name, tables.raw(name), f"{path}: table {name}", hot_ids)
            for name in tables.names()
        },
        samples=section.integer("samples"),
        source=section.text("source"),
    )


def _table_mapping(table: TableProfile) -> dict[str, Any]:
    mapping: dict[str, Any] = {
        "num_embeddings": table.num_embeddings,
        "features": list(table.features),
        "lookups_per_sample": list(table.lookups_per_sample),
        "batch_sizes": list(table.by_id.batch_sizes),
        "distinct_by_id": [list(row) for row in table.by_id.counts],
    }
    if table.by_frequency is not None:
        mapping["distinct_by_frequency"] = [list(row) for row in table.by_frequency.counts]
    if table.reuse is not None:
        mapping["reuse"] = _fields(table.reuse, _REUSE_KEYS)
    if table.hot is not None:
        mapping["hot"] = _fields(table.hot, _HOT_KEYS)
    return mapping


def _fields(part: object, keys: tuple[str, ...]) -> dict[str, Any]:
    values = {key: getattr(part, key) for key in keys}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _table(
    name: str, content: Any, where: str, hot_ids: Mapping[str, NDArray[np.int64]]
) -> TableProfile:
    section = Section(content, where, _TABLE_KEYS)
    return _built(
        section,
        TableProfile,
        name=name,
        num_embeddings=section.integer("num_embeddings"),
        features=section.texts("features"),
        lookups_per_sample=section.numbers("lookups_per_sample"),
        by_id=_curve(section, "distinct_by_id"),
        by_frequency=_curve(section, "distinct_by_frequency")
        if section.has("distinct_by_frequency")
        else None,
        reuse=_reuse(section) if section.has("reuse") else None,
        hot=_hot(section) if section.has("hot") else None,
        hot_ids=hot_ids.get(name, np.zeros(0, np.int64)),
    )


def _curve(table: Section, key: str) -> DistinctCurve:
    sizes, counts = table.integers("batch_sizes"), table.number_lists(key)
    return _built(table, DistinctCurve, batch_sizes=sizes, counts=counts)


def _reuse(table: Section) -> ReuseCurve:
    section = Section(table.raw("reuse"), f"{table.where}: reuse", _REUSE_KEYS)
    return _built(
        section,
        ReuseCurve,
        batch_size=section.integer("batch_size"),
        cache_rows=section.integers("cache_rows"),
        miss_ratios=section.numbers("miss_ratios"),
        first_touch_rate=section.number("first_touch_rate"),
        sampled_share=section.number("sampled_share"),
        error=section.number("error"),
    )


def _hot(table: Section) -> HotRows:
    section = Section(table.raw("hot"), f"{table.where}: hot", _HOT_KEYS)
    return _built(
        section,
        HotRows,
        rows=section.integers("rows"),
        shares=section.numbers("shares"),
        error=section.number("error"),
    )


def _built(section: Section, part: Callable[..., T], **fields: Any) -> T:
    """A part of the profile; numbers that do not fit together are an error of the file."""
    try:
        return part(**fields)
    except ValueError as error:
        raise section.error(str(error)) from error
