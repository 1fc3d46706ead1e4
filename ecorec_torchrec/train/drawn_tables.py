"""Lists of tables drawn at random, to plan for models of which only totals are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecorec_torchrec.planner import DistinctCurve, Profile, ReuseCurve, TableProfile
from ecorec_torchrec.train.data_config import DrawnTablesConfig
from ecorec_torchrec.train.table_list import ListedTable

_BATCH_SIZES = (4096, 16384, 65536, 131072)
_POOLING_RANGE = (0.05, 400.0)
_ROWS_RANGE = (10, 100_000_000)
# Spreads of lookups and rows over tables (of the logarithm), and the range of Zipf exponents.
_POOLING_SPREAD, _ROWS_SPREAD = 1.55, 2.1
_MEDIAN_POOLING = 3.0
_EXPONENTS = (0.75, 1.25)
_REUSE_BATCH_SIZE = 65536
_REUSE_BATCHES = tuple(2**k for k in range(0, 21, 2))  # for which a cache holds a row unused


@dataclass(frozen=True)
class _DrawnTable:
    name: str
    num_embeddings: int
    exponent: float
    pooling_factor: float


def draw_tables(config: DrawnTablesConfig) -> list[ListedTable]:
    """Tables whose lookups and distinct ids add up to the totals of `config`.

    Pooling factors and rows are log-normal, ids of a table follow Zipf's law with an exponent of
    its own. Rows are scaled until the expected number of distinct ids is the wanted one.

    Example::

        draw_tables(DrawnTablesConfig(count=788, samples=131_072, lookups=1_405_163_864,
                                      unique_ids=110_259_238, seed=788))[0]
        # ListedTable("t000", 229831, 0.106.., {4096: 266, ..})
    """
    return [
        ListedTable(
            table.name,
            table.num_embeddings,
            table.pooling_factor,
            {size: round(_unique_rows(table, size)) for size in _BATCH_SIZES},
        )
        for table in _draw(config)
    ]


def drawn_profile(config: DrawnTablesConfig) -> Profile:
    """What batches ask of the tables of `draw_tables`, expected from the same distributions.

    Ids of a table are drawn independently and hashed over its rows.
    """
    tables = {table.name: _table_profile(table) for table in _draw(config)}
    return Profile(tables, samples=config.samples, source=f"drawn with seed {config.seed}")


def _table_profile(table: _DrawnTable) -> TableProfile:
    counts = tuple(
        _distinct_blocks(table.num_embeddings, _unique_rows(table, size)) for size in _BATCH_SIZES
    )
    return TableProfile(
        table.name,
        table.num_embeddings,
        (table.name,),
        (table.pooling_factor,),
        by_id=DistinctCurve(_BATCH_SIZES, counts),
        reuse=zipf_reuse_curve(
            table.num_embeddings, table.exponent, table.pooling_factor, _REUSE_BATCH_SIZE
        ),
    )


def _distinct_blocks(num_embeddings: int, unique: float) -> tuple[float, ...]:
    """Blocks of 1, 2, 4, .. rows, up to the whole table, that so many scattered rows lie in."""
    absent = 1 - min(1.0, unique / num_embeddings)
    counts = [unique]
    for k in range(1, (num_embeddings - 1).bit_length() + 1):
        blocks = -(-num_embeddings // 2**k)
        counts.append(min(counts[-1], blocks * (1 - absent ** (2**k))))
    return tuple(counts)


def zipf_reuse_curve(
    num_embeddings: int, exponent: float, lookups_per_sample: float, batch_size: int
) -> ReuseCurve:
    """What a cache of the rows used last does for independent ids that follow Zipf's law.

    By Che's approximation: a row stays for as many batches as fill the cache (Che, Tung, Wang:
    "Hierarchical Web caching systems", IEEE JSAC 20, 2002).
    """
    probability, width = _zipf(num_embeddings, exponent)
    asked = -np.expm1(-batch_size * lookups_per_sample * probability)  # for, in a batch
    requests = float(asked @ width)
    misses: dict[int, float] = {}
    for batches in _REUSE_BATCHES:
        gone = (1 - asked) ** batches  # not asked for in all of them
        rows = max(1, round(float((1 - gone) @ width)))
        misses[rows] = float((asked * gone) @ width) / requests
    return ReuseCurve(batch_size, tuple(misses), tuple(misses.values()), first_touch_rate=0.0)


def _unique_rows(table: _DrawnTable, batch_size: int) -> float:
    lookups = batch_size * table.pooling_factor
    return expected_unique_ids(table.num_embeddings, table.exponent, lookups)


def _draw(config: DrawnTablesConfig) -> list[_DrawnTable]:
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
        _DrawnTable(f"t{table:03d}", int(n), float(a), round(float(p), 4))
        for table, (n, a, p) in enumerate(zip(rows, exponents, pooling, strict=True))
    ]


def expected_unique_ids(num_embeddings: int, exponent: float, lookups: float) -> float:
    """Distinct ids among so many lookups of ids whose frequency follows Zipf's law."""
    probability, width = _zipf(num_embeddings, exponent)
    return float((width * -np.expm1(-lookups * probability)).sum())


def _zipf(num_embeddings: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probability of an id, and how many ids have it; the n-th has weight n**-exponent.

    The first 1,000 ids are taken one by one, later ones in about 400 bins of equal frequency.
    """
    single = np.arange(1, min(num_embeddings, 1000) + 1)
    edges = np.concatenate([single, np.geomspace(1, num_embeddings + 1, 400)]).astype(np.int64)
    edges = np.sort(edges[edges <= num_embeddings])
    edges = np.append(edges[np.append(True, edges[1:] != edges[:-1])], num_embeddings + 1)
    low, high = edges[:-1].astype(float), edges[1:].astype(float)
    width = high - low
    weight = np.sqrt(low * np.maximum(high - 1, low)) ** -exponent
    return weight / (weight * width).sum(), width


def _largest_below(limit: float, growing: Callable[[float], float]) -> float:
    low, high = 1e3, 1e7
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if growing(middle) < limit else (low, middle)
    return low
