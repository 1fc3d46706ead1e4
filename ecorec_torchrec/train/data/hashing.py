"""Hashing of raw ids into tables of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hash_ids(raw: NDArray[np.integer], num_embeddings: int) -> NDArray[np.int64]:
    """Spreads raw ids over the rows [0, num_embeddings) by the splitmix64 finaliser.

    Raises:
        ValueError: `num_embeddings` is below 1.

    Example::

        hash_ids(np.arange(3), 1000)  # three scattered ids below 1000, the same on every machine
    """
    if num_embeddings < 1:
        raise ValueError(f"num_embeddings={num_embeddings} must be >= 1")
    x = raw.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(num_embeddings)).astype(np.int64)
