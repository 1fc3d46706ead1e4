"""Profiles: curves between what was measured, files, and what the planner makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecorec_torchrec.planner import (
    DistinctCurve,
    EcoRecConstraints,
    EcoRecPlanner,
    HotRows,
    Profile,
    ReuseCurve,
    TableProfile,
    load_profile,
    save_profile,
)
from ecorec_torchrec.tt import TTSpec

ROWS = 20_000


def distinct_curve(ids_bl: np.ndarray, num_rows: int) -> DistinctCurve:
    """Of the first 1, 2, 4, .. samples."""
    sizes = tuple(2**k for k in range(len(ids_bl).bit_length()))
    blocks = range(math.ceil(math.log2(num_rows)) + 1)
    counts = tuple(tuple(float(np.unique(ids_bl[:b] >> k).size) for k in blocks) for b in sizes)
    return DistinctCurve(sizes, counts)


def ids_of(kind: str, samples: int, per_sample: int = 4) -> np.ndarray:
    random = np.random.default_rng(0)
    if kind == "uniform":
        return random.integers(0, ROWS, (samples, per_sample))
    weights = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    ranks = np.searchsorted(weights, random.random((samples, per_sample)) * weights[-1])
    return random.permutation(ROWS)[ranks]


def table_of(ids_bl: np.ndarray, num_rows: int = ROWS, name: str = "users") -> TableProfile:
    per_sample = (float(ids_bl.shape[1]),)
    return TableProfile(
        name, num_rows, (f"f_{name}",), per_sample, distinct_curve(ids_bl, num_rows)
    )


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_rows_and_prefixes_between_the_measured_points(kind):
    ids_bl = ids_of(kind, 4096)
    table = table_of(ids_bl)
    for batch_size in (90, 700, 1448, 3000, 4096):
        ids = ids_bl[:batch_size]
        assert table.unique_rows(batch_size) == pytest.approx(np.unique(ids).size, rel=0.08)
        for p in (3, 11, 27, 100):
            spec = TTSpec(ROWS, (10, -(-ROWS // (10 * p)), p), (4, 4, 4), (8, 8))
            expected = np.unique(ids // p).size
            assert table.unique_prefixes(batch_size, spec) == pytest.approx(expected, rel=0.08)
            block = p * spec.row_factors[1]
            of_one_digit = table.unique_prefixes(batch_size, spec, num_digits=1)
            assert of_one_digit == pytest.approx(np.unique(ids // block).size, rel=0.08)


def test_beyond_the_measured_batches_neither_more_than_rows_nor_than_lookups():
    table = table_of(ids_of("zipf", 512))
    assert 0 < table.unique_rows(0.5) < table.unique_rows(1) <= 4
    assert table.unique_rows(0) == 0
    grown = table.unique_rows(4096)
    assert table.unique_rows(512) < grown < 4 * 4096
    assert table.unique_rows(1e9) == ROWS
    once = replace(table, by_id=DistinctCurve((512,), ((512.0, 300.0),)))
    assert once.unique_rows(1024) == pytest.approx(1024)  # one point tells no slope


def test_traffic_counts_what_a_cache_leaves():
    table = replace(
        table_of(ids_of("uniform", 1024)),
        reuse=ReuseCurve(1024, (1000, ROWS), (0.5, 0.0), first_touch_rate=0.1),
    )
    rows_per_s = table.unique_rows(1024) * 1e6 / 1024
    assert table.gb_per_s(1e6, 1024, row_bytes=256) == pytest.approx(2 * 256 * rows_per_s / 1e9)
    cached = table.gb_per_s(1e6, 1024, row_bytes=256, cache_rows=1000)
    assert cached == pytest.approx(2 * 256 * rows_per_s / 1e9 * (0.1 + 0.9 * 0.5))
    with pytest.raises(ValueError, match="'users': the profile has no reuse curve"):
        replace(table, reuse=None).gb_per_s(1e6, 1024, 256, cache_rows=1000)


def full_profile() -> Profile:
    users = replace(
        table_of(ids_of("zipf", 256)),
        by_frequency=distinct_curve(np.sort(ids_of("zipf", 256), axis=0), ROWS),
        reuse=ReuseCurve(64, (1, 1000, ROWS), (1.0, 0.25, 0.0), 0.2, sampled_share=0.1, error=0.01),
        hot=HotRows((1, 100), (0.125, 0.5)),
        hot_ids=np.array([7, 3, 9]),
    )
    items = table_of(ids_of("uniform", 256) % 50, num_rows=50, name="items: all/of them")
    return Profile({table.name: table for table in (users, items)}, samples=256, source="drawn")


def test_file_holds_all_of_a_profile(tmp_path: Path):
    profile = full_profile()
    save_profile(profile, tmp_path / "profile.yaml")
    loaded = load_profile(tmp_path / "profile.yaml")
    assert loaded == profile
    assert loaded.tables["users"].hot_ids.tolist() == [7, 3, 9]
    text = (tmp_path / "profile.yaml").read_text()
    save_profile(loaded, tmp_path / "profile.yaml")
    assert (tmp_path / "profile.yaml").read_text() == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version: 1", "schema_version: 2", "`schema_version` is 2, this release reads 1"),
        ("samples: 256", "sample: 256", "unknown key 'sample' .did you mean 'samples'"),
        ("num_embeddings: 50", "num_embeddings: 0", "table items.*num_embeddings=0 must be at"),
        ("num_embeddings: 50", "num_embeddings: x", "`num_embeddings` must be an integer"),
        ("batch_sizes: [1, 2,", "batch_sizes: [2, 2,", "table users: batch_sizes=.2, 2, .*ascend"),
        ("batch_sizes: [1, 2,", "batch_sizes: [2,", "9 rows of counts for 8 batch_sizes"),
        ("first_touch_rate: 0.2", "first_touch_rate: 1.2", "reuse: first_touch_rate=.*within 0..1"),
        ("shares: [0.125, 0.5]", "shares: [a, 0.5]", "hot: `shares` must be a list of numbers"),
        ("features: [f_users]", "features: [f_users, g]", "1 lookups_per_sample for 2 features"),
    ],
)
def test_file_that_does_not_fit_is_refused(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "profile.yaml"
    save_profile(full_profile(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=f"profile.yaml.*{message}"):
        load_profile(path)


def test_file_without_its_archive_of_ids_is_refused(tmp_path: Path):
    save_profile(full_profile(), tmp_path / "profile.yaml")
    (tmp_path / "profile.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"profile\.npz"):
        load_profile(tmp_path / "profile.yaml")


def test_planner_takes_lookups_and_reuse_from_the_profile(model, topology, sharders):
    """Ids that repeat cost less than uniform ones; the user's own pooling factors go first."""

    def step_ms(profile: Profile | None, **constraint: object) -> float:
        planner = EcoRecPlanner(
            topology(1000),
            batch_size=2048,
            constraints={"users": EcoRecConstraints(tt="always", tt_ranks=(16,), **constraint)},
            profile=profile,
        )
        planner.plan(model(users=ROWS), sharders)
        assert planner.report is not None and planner.report.step_ms is not None
        return planner.report.step_ms

    uniform, skewed = (
        Profile({"users": table_of(ids_of(kind, 4096))}, samples=4096)
        for kind in ("uniform", "zipf")
    )
    drawn = step_ms(None, pooling_factors=[4.0])
    assert step_ms(uniform) == pytest.approx(drawn, rel=0.05)
    assert step_ms(skewed) < 0.8 * drawn
    assert step_ms(skewed, pooling_factors=[8.0]) > step_ms(skewed)
    assert step_ms(None) < drawn  # one lookup per sample where nobody says more


def test_profile_of_another_table_is_refused(model, topology, sharders):
    profile = Profile({"users": table_of(ids_of("zipf", 256))}, samples=256)
    planner = EcoRecPlanner(topology(1000), batch_size=8, profile=profile)
    with pytest.raises(ValueError, match="'users': the profile is of 20000 rows, the model has 50"):
        planner.plan(model(users=50), sharders)
    with pytest.raises(TypeError, match="profile must be a Profile, got str"):
        EcoRecPlanner(topology(1000), profile="profile.yaml")
