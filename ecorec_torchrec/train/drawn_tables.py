"""Lists of tables drawn at random, to plan for models of which only totals are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.train.config import DrawnTablesConfig
from ecorec_torchrec.train.table_list import ListedTable

_BATCH_SIZES = (4096, 16384, 65536, 131072)
_POOLING_RANGE = (0.05, 400.0)
_ROWS_RANGE = (10, 100_000_000)
# Spreads of lookups and rows over tables (of the logarithm), and the range of Zipf exponents.
_POOLING_SPREAD, _ROWS_SPREAD = 1.55, 2.1
_MEDIAN_POOLING = 3.0
_EXPONENTS = (0.75, 1.25)


def draw_tables(config: DrawnTablesConfig) -> list[ListedTable]:
    """Tables whose lookups and distinct ids add up to the totals of `config`.

    Pooling factors and rows are log-normal, ids of a table follow Zipf's law with an exponent of
    its own. Rows are scaled until the expected number of distinct ids is the wanted one.

    Example::

        draw_tables(DrawnTablesConfig(count=788, samples=131_072, lookups=1_405_163_864,
                                      unique_ids=110_259_238, seed=788))[0]
        # ListedTable("t000", 229831, 0.106.., {4096: 266, ..})
    """
    random = np.random.default_rng(config.seed)
    pooling = random.lognormal(np.log(_MEDIAN_POOLING), _POOLING_SPREAD, config.count)
    exponents = random.uniform(*_EXPONENTS, config.count)
    sizes = random.lognormal(0.0, _ROWS_SPREAD, config.count)
    pooling = np.clip(pooling, *_POOLING_RANGE)
    for _ in range(60):  # clipping moves the total, so scaling is repeated
        scale = config.lookups / (config.samples * pooling.sum())
        pooling = np.clip(pooling * scale, *_POOLING_RANGE)

    def rows_at(scale: float) -> NDArray[np.int64]:
        return np.clip((sizes * scale).astype(np.int64), *_ROWS_RANGE)

    def unique_at(scale: float) -> float:
        tables = zip(rows_at(scale), exponents, pooling, strict=True)
        return sum(expected_unique_ids(int(n), a, config.samples * p) for n, a, p in tables)

    rows = rows_at(_largest_below(config.unique_ids, unique_at))
    return [
        ListedTable(
            f"t{table:03d}",
            int(n),
            round(float(p), 4),
            {b: round(expected_unique_ids(int(n), a, b * p)) for b in _BATCH_SIZES},
        )
        for table, (n, a, p) in enumerate(zip(rows, exponents, pooling, strict=True))
    ]


def expected_unique_ids(num_embeddings: int, exponent: float, lookups: float) -> float:
    """Distinct ids among so many lookups, where the n-th most frequent id has weight n**-exponent.

    The first 1,000 ids are taken one by one, later ones in about 400 bins of equal frequency.
    """
    single = np.arange(1, min(num_embeddings, 1000) + 1)
    edges = np.concatenate([single, np.geomspace(1, num_embeddings + 1, 400)]).astype(np.int64)
    edges = np.sort(edges[edges <= num_embeddings])
    edges = np.append(edges[np.append(True, edges[1:] != edges[:-1])], num_embeddings + 1)
    low, high = edges[:-1].astype(float), edges[1:].astype(float)
    width = high - low
    weight = np.sqrt(low * np.maximum(high - 1, low)) ** -exponent
    probability = weight / (weight * width).sum()
    return float((width * -np.expm1(-lookups * probability)).sum())


def _largest_below(limit: float, growing: Callable[[float], float]) -> float:
    low, high = 1e3, 1e7
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if growing(middle) < limit else (low, middle)
    return low
