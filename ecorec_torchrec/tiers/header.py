"""The first page of a row file and of a checkpoint: what it holds, under a checksum."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HEADER_BYTES = 4096
FORMAT_VERSION = 1
_MAGIC = b"ECORECTT"
_PREFIX = struct.Struct("<8sI")  # magic, checksum of all that follows in the page
_TEXT_BYTES = HEADER_BYTES - _PREFIX.size


@dataclass(frozen=True)
class Header:
    """What a file says of itself, as one line of JSON.

    Attributes:
        kind: "rows" for a row file, "checkpoint".
        table: the table's name.
        num_embeddings: N.
        columns: name, width and dtype of each column of a record.
        init: the distribution and seed of the rows that were never written.
        order: number and checksum of the rows that come first in a row file.
        num_rows: rows in a checkpoint.
        num_blocks: blocks in a checkpoint.
        version: of the format.
    """

    kind: str
    table: str
    num_embeddings: int
    columns: list[list[Any]]
    init: dict[str, Any]
    order: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_blocks: int = 0
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        assert len(text) <= _TEXT_BYTES, f"a header of {len(text)} bytes"
        text = text.ljust(_TEXT_BYTES)
        return _PREFIX.pack(_MAGIC, zlib.crc32(text)) + text

    @classmethod
    def read(cls, fd: int, path: Path) -> Header:
        """The header of an open file.

        Raises:
            ValueError: the file is of another kind or format version, or its header is damaged.
        """
        page = os.pread(fd, HEADER_BYTES, 0)
        if page[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} is not a file of ours: it does not begin with {_MAGIC!r}")
        if len(page) < HEADER_BYTES:
            raise ValueError(
                f"{path} is damaged: its header ends after {len(page)} of {HEADER_BYTES} bytes"
            )
        _, checksum = _PREFIX.unpack_from(page)
        text = page[_PREFIX.size :]
        if zlib.crc32(text) != checksum:
            raise ValueError(f"{path} is damaged: the checksum of its header does not fit")
        values = json.loads(text)
        if values["version"] != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {values['version']}, this program reads "
                f"version {FORMAT_VERSION}"
            )
        return cls(**values)
