"""Reuse curves against caches that are played through, and sampled ones against exact ones."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from ecorec_torchrec.train.profiling.reuse import FIRST_TOUCH, LruDistances, ReuseMeter


def played_through(ids: np.ndarray, cache_rows: int) -> tuple[int, int]:
    """First touches and misses of other requests of a cache that drops what was used last."""
    cache: OrderedDict[int, None] = OrderedDict()
    seen: set[int] = set()
    first_touches = misses = 0
    for row in ids.tolist():
        first_touches += row not in seen
        misses += row in seen and row not in cache
        seen.add(row)
        cache.pop(row, None)
        cache[row] = None
        if len(cache) > cache_rows:
            cache.popitem(last=False)
    return first_touches, misses


def zipf(num_rows: int, draws: int, exponent: float = 1.05, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, num_rows + 1) ** -exponent)
    return random.permutation(num_rows)[
        np.searchsorted(weights, random.random(draws) * weights[-1])
    ]


@pytest.mark.parametrize("num_parts", [1, 2, 7, 400])
def test_distances_however_the_stream_is_cut(num_parts: int):
    ids = zipf(50, 400)
    expected, stack = [], []
    for row in ids.tolist():
        expected.append(stack.index(row) if row in stack else FIRST_TOUCH)
        stack = [row, *(other for other in stack if other != row)]
    distances = LruDistances()
    found = [distances.add(part) for part in np.array_split(ids, num_parts)]
    assert np.concatenate(found).tolist() == expected
    assert len(distances) == len(stack)


def test_no_request_and_one_request():
    distances = LruDistances()
    assert distances.add(np.zeros(0, np.int64)).tolist() == []
    assert distances.add(np.array([3])).tolist() == [FIRST_TOUCH]
    assert distances.add(np.array([3])).tolist() == [0]
    assert ReuseMeter(10, batch_size=1, exact_rows=10).curve() is None


def test_curve_of_a_small_table_is_that_of_caches(monkeypatch: pytest.MonkeyPatch):
    """Batches come one by one and are counted in parts; the sum is that of one stream."""
    monkeypatch.setattr("ecorec_torchrec.train.profiling.reuse._REQUESTS_AT_ONCE", 100)
    batches = [np.unique(ids) for ids in np.array_split(zipf(300, 4000), 40)]
    meter = ReuseMeter(300, batch_size=25, exact_rows=300)
    for batch in batches:
        meter.add(batch)
    curve = meter.curve()
    requests = np.concatenate(batches)
    assert curve.batch_size == 25 and curve.sampled_share == 1.0 and curve.error == 0.0
    assert curve.cache_rows == (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
    for cache_rows in curve.cache_rows:
        first_touches, misses = played_through(requests, cache_rows)
        assert curve.first_touch_rate == pytest.approx(first_touches / len(requests))
        known = len(requests) - first_touches
        assert curve.miss_ratio(cache_rows) == pytest.approx(misses / known, rel=1e-5)
    assert curve.miss_ratio(0) == 1.0 and curve.miss_ratio(300) == 0.0
    assert curve.miss_ratio(48) == pytest.approx((curve.miss_ratio(32) + curve.miss_ratio(64)) / 2)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05])
def test_sampled_curve_is_as_close_as_it_says(exponent: float):
    """Sampled by row, a table's hottest rows are in or out as a whole; totals are known exactly."""
    num_rows, batches = 60_000, np.array_split(zipf(60_000, 400_000, exponent), 100)
    exact = ReuseMeter(num_rows, 1, exact_rows=num_rows)
    sampled = ReuseMeter(num_rows, 1, exact_rows=num_rows // 10)
    for batch in batches:
        exact.add(np.unique(batch))
        sampled.add(np.unique(batch))
    truth, estimate = exact.curve(), sampled.curve()
    assert estimate.sampled_share == pytest.approx(0.1)
    assert 0 < estimate.error < 0.05
    assert estimate.first_touch_rate == pytest.approx(truth.first_touch_rate, rel=0.1)
    apart = [
        abs(estimate.miss_ratio(rows) - truth.miss_ratio(rows))
        for rows in truth.cache_rows
        if rows >= 1000  # far fewer rows are none in a sample
    ]
    assert max(apart) < 4 * estimate.error
