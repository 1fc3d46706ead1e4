"""Whole profiles against brute force: of traces, data sets and drawn ids."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ecorec_torchrec.planner import TableProfile
from ecorec_torchrec.train.data import load_dataset
from ecorec_torchrec.train.data_config import DataConfig
from ecorec_torchrec.train.profiling import (
    DatasetIds,
    FeatureBatch,
    IdSource,
    ProfileSettings,
    TraceIds,
    measure_profile,
)
from ecorec_torchrec.train.profiling.counts import RowCounts
from ecorec_torchrec.tt import TTSpec


def trace(path: Path, ids: np.ndarray, **options: int) -> TraceIds:
    path.write_text("\n".join(map(str, ids.tolist())) + "\n")
    return TraceIds(str(path), **options)


def skewed(num_rows: int, draws: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return np.minimum(random.geometric(0.02, draws) * 7, num_rows - 1)


def test_small_trace_is_counted_exactly(tmp_path: Path):
    """Windows of one size lie evenly apart; 64 lookups make up the largest batch here."""
    ids = skewed(1000, 3 * 128 + 10)
    source = trace(tmp_path / "users.txt", ids, lookups_per_sample=2, num_embeddings=1000)
    settings = ProfileSettings(batch_size=32, largest_batch=64, hot_rows=5)
    profile = measure_profile(source, settings)
    users = profile.tables["users"]
    assert profile.samples == len(ids) // 2 == source.num_samples
    assert users.lookups_per_sample == (2.0,)
    assert users.num_embeddings == 1000 and users.features == ("users",)

    parts = [ids[start : start + 128] for start in (0, 128, 256)]  # the rest is shorter than 64
    assert users.by_id.batch_sizes == (1, 2, 4, 8, 16, 32, 64)
    assert users.unique_rows(64) == pytest.approx(np.mean([len(set(p)) for p in parts]), rel=1e-5)
    spec = TTSpec(1000, (10, 13, 8), (2, 2, 2), (4, 4))
    of_prefixes = np.mean([len(set(part // 8)) for part in parts])
    assert users.unique_prefixes(64, spec) == pytest.approx(of_prefixes, rel=1e-5)
    halves = [half for part in parts for half in (part[:64], part[64:])]
    assert users.unique_rows(32) == pytest.approx(np.mean([len(set(h)) for h in halves]), rel=1e-5)

    counts = Counter(ids.tolist())
    ranked = sorted(counts, key=lambda row: (-counts[row], row))
    assert users.hot_ids.tolist() == ranked[:5]
    assert users.hot.rows == (1, 2, 4, 5) and users.hot.error == 0.0
    share = sum(counts[row] for row in ranked[:5]) / len(ids)
    assert users.hot.share(5) == pytest.approx(share, rel=1e-5)
    assert users.hot.share(0) == 0.0

    rank_of = {row: rank for rank, row in enumerate(ranked)}
    renumbered = [len({rank_of[row] // 8 for row in part.tolist()}) for part in parts]
    by_frequency = users.unique_prefixes(64, spec, by_frequency=True)
    assert by_frequency == pytest.approx(np.mean(renumbered), rel=1e-5)
    assert by_frequency < of_prefixes
    assert users.reuse.batch_size == 32
    distinct = [len(set(ids[i : i + 64].tolist())) for i in range(0, len(ids), 64)]
    assert users.reuse.first_touch_rate == pytest.approx(len(counts) / sum(distinct))


def test_batches_of_samples_that_do_not_fill_the_last(tmp_path: Path):
    source = trace(tmp_path / "t.txt", np.arange(7), lookups_per_sample=2)
    sizes = [(len(batch["t"]), batch["t"].ids_L.tolist()) for batch in source.batches(3)]
    assert sizes == [(3, [0, 1, 2, 3, 4, 5]), (1, [6])]
    assert source.num_samples == 4 and source.num_embeddings == {"t": 7}


@pytest.mark.parametrize("limit", [1, 100, 130])
def test_no_more_samples_than_asked_for(tmp_path: Path, limit: int):
    ids = skewed(1000, 200)
    settings = ProfileSettings(batch_size=8, largest_batch=50, max_samples=limit)
    profile = measure_profile(trace(tmp_path / "t.txt", ids), settings)
    assert profile.samples == limit
    assert sorted(profile.tables["t"].hot_ids.tolist()) == np.unique(ids[:limit]).tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [("x", "'x' is no index in 0..9"), ("-3", "'-3' is no index"), ("10", "'10' is no index")],
)
def test_line_that_is_no_index_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "t.txt"
    path.write_text(f"1\n2\n{line}\n4\n")
    with pytest.raises(ValueError, match=rf"t\.txt:3: {message}"):
        TraceIds(str(path), num_embeddings=10)
    with pytest.raises(ValueError, match="no such file"):
        TraceIds(str(tmp_path / "none.txt"))


def test_features_of_a_data_set():
    """Bags of 0 to 4 ids, many of them empty; the mean counts every sample."""
    config = DataConfig()
    config.synthetic.num_rows, config.synthetic.num_embeddings = 3000, 500
    dataset = load_dataset(config, seed=0)
    profile = measure_profile(DatasetIds(dataset, "synthetic"), ProfileSettings(batch_size=256))
    assert list(profile.tables) == [feature.name for feature in dataset.schema.sparse]
    assert profile.samples == 2400 and profile.source == "synthetic"
    for batch in dataset.batches("train", batch_size=2048):
        values = batch.sparse_features["sparse_0"].values().numpy()
        break
    table = profile.tables["sparse_0"]
    assert table.unique_rows(2048) == pytest.approx(np.unique(values).size, rel=1e-5)
    assert table.lookups_per_sample[0] == pytest.approx(2.0, rel=0.05)


class DrawnIds(IdSource):
    """One feature with ids and one without."""

    name = "drawn"

    def __init__(self, ids: np.ndarray) -> None:
        self._ids = ids
        self.num_embeddings = {"users": 1000, "nobody": 10}

    def batches(self, batch_size: int) -> Iterator[dict[str, FeatureBatch]]:
        none = np.zeros(len(self._ids) + 1, np.int64)
        yield {
            "users": FeatureBatch(self._ids, np.arange(len(self._ids) + 1)),
            "nobody": FeatureBatch(self._ids[:0], none),
        }


def test_table_that_nobody_reads_is_left_out_and_a_wrong_id_refused():
    settings = ProfileSettings(batch_size=8)
    with pytest.warns(UserWarning, match="no ids for nobody"):
        profile = measure_profile(DrawnIds(skewed(1000, 64)), settings)
    assert list(profile.tables) == ["users"]
    with pytest.raises(ValueError, match="table 'users': id 1000 is no row of 0..999"):
        measure_profile(DrawnIds(np.array([3, 1000])), settings)


def test_counts_of_many_rows_are_short_by_no_more_than_they_say():
    """A stream of more distinct rows than are held: none counted too often, hot ones kept."""
    ids = np.concatenate([skewed(10_000, 20_000), np.arange(10_000, 40_000)])
    np.random.default_rng(0).shuffle(ids)
    truth = Counter(ids.tolist())
    counts = RowCounts(capacity=500)
    for part in np.array_split(ids, 50):
        counts.add(part)
    assert 0 < counts.most_missing <= counts.lookups / 500
    hottest = counts.hottest(20).tolist()
    exact = [row for row, _ in truth.most_common(20)]
    assert len(set(hottest) & set(exact)) >= 18
    coverage = counts.coverage(20)
    share = sum(truth[row] for row in exact) / len(ids)
    assert share - coverage.error <= coverage.share(20) * (1 + 1e-5) and coverage.share(20) <= share
    renumbered = counts.renumbered(np.arange(40_000))
    assert np.array_equal(np.sort(renumbered), np.arange(40_000))
    assert renumbered[hottest].tolist() == list(range(20))


@pytest.fixture(scope="module", params=["low", "medium"])
def public_trace(request: pytest.FixtureRequest) -> Path:
    beside_the_checkout = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("ECOREC_TEST_DATA", beside_the_checkout)) / "trace_meta_hotness"
    path = folder / f"reuse_{request.param}_table_500K.txt"
    if not path.is_file():
        pytest.skip(f"no {path}: set ECOREC_TEST_DATA to a folder with trace_meta_hotness")
    return path


def test_sampled_reuse_of_a_public_trace(public_trace: Path):
    def users(exact_rows: int) -> TableProfile:
        source = TraceIds(str(public_trace), num_embeddings=500_000)
        settings = ProfileSettings(batch_size=4096, largest_batch=32_768, exact_rows=exact_rows)
        return measure_profile(source, settings).tables[public_trace.stem]

    exact, sampled = users(500_000), users(50_000)
    assert exact.reuse.error == 0.0 and 0 < sampled.reuse.error < 0.05
    apart = [
        abs(sampled.reuse.miss_ratio(rows) - exact.reuse.miss_ratio(rows))
        for rows in (8192, 32_768, 131_072)
    ]
    assert max(apart) < 4 * sampled.reuse.error
    ids = np.loadtxt(public_trace, dtype=np.int64)
    batch = ids[:32_768]
    assert exact.unique_rows(32_768) == pytest.approx(np.unique(batch).size, rel=0.1)
