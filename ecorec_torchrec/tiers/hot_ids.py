"""The hottest ids of tables as a file: a NumPy archive, as `ecorec profile` writes it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_PREFIX = "table "  # a table may have a name that numpy.savez takes for an argument of its own


def save_hot_ids(
    ids_by_table: Mapping[str, NDArray[np.int64]], path: str | os.PathLike[str]
) -> None:
    """Writes the ids of each table, (H,), the most frequent one first.

    Raises:
        OSError: the file cannot be written.
    """
    arrays: dict[str, NDArray[np.int64]] = {_PREFIX + n: ids for n, ids in ids_by_table.items()}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # numpy takes `**` for its flag


def load_hot_ids(
    path: str | os.PathLike[str], table: str | None = None
) -> dict[str, NDArray[np.int64]]:
    """Reads what `save_hot_ids` wrote: of one table, as far as it is there, or of all of them.

    Raises:
        ValueError: it is not such a file, or is damaged.
        OSError: it cannot be read.
    """
    try:
        archive = np.load(path)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with archive:
            names = [key.removeprefix(_PREFIX) for key in archive.files]
            return {n: archive[_PREFIX + n] for n in names if table in (None, n)}
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not an archive of hot ids: {error}") from error
