"""The quality benchmark, on tiny synthetic data."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ecorec_torchrec.bench.quality import (
    COLUMNS,
    VARIANTS,
    QualityBench,
    gaps,
    write_rows,
)
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import load_config
from ecorec_torchrec.train.launch import process_group


@pytest.fixture
def config() -> TrainConfig:
    config = load_config("synthetic_tiny", TrainConfig)
    config.data.synthetic.num_rows = 640
    config.train = replace(config.train, epochs=1)
    return config


def test_all_variants_over_two_seeds(config: TrainConfig, tmp_path: Path) -> None:
    with process_group("cpu") as cpu:
        bench = QualityBench(config, cpu, factors=(0.5, 2.0))
        bench.tune(VARIANTS, report=lambda line: None)
        rows = write_rows(tmp_path / "q.csv", COLUMNS, bench.measure(VARIANTS, seeds=range(2)))
    names = [variant.name for variant in VARIANTS]
    assert [(row["seed"], row["variant"]) for row in rows] == [
        (seed, name) for seed in range(2) for name in names
    ]
    num_bytes = {row["variant"]: row["embedding_bytes"] for row in rows}
    assert num_bytes["tt_r8"] < num_bytes["tt_r16"] < num_bytes["tt_r32"]
    # Frozen cores need no optimizer state; the hashing tables take what trained ones take.
    assert num_bytes["tt_r16_frozen"] < num_bytes["tt_r16"]
    assert 0 <= num_bytes["tt_r16"] - num_bytes["hash_equal_bytes_r16"] < 2 * 17 * 4
    assert num_bytes["dense"] == 3 * 1000 * 17 * 4
    with open(tmp_path / "q.csv", newline="") as file:
        assert [list(row) for row in csv.DictReader(file)] == [list(COLUMNS)] * 12

    tuned = {row["variant"]: row["option"] for row in bench.tuning}
    assert tuned["tt_r8"] == "optim.tt.learning_rate"
    assert tuned["dense"] == tuned["tt_r16_frozen"] == "optim.embedding.learning_rate"
    for name in names:
        tried = [row for row in bench.tuning if row["variant"] == name]
        [chosen] = [row for row in tried if row["chosen"]]
        assert chosen["auc_val"] == max(row["auc_val"] for row in tried)  # type: ignore[type-var]


def test_gaps_are_paired_by_seed() -> None:
    rows = [
        {"seed": seed, "variant": variant, "auc_test": auc}
        for seed, variant, auc in [
            (0, "dense", 0.80), (0, "tt", 0.79), (1, "dense", 0.70), (1, "tt", 0.67),
        ]
    ]  # fmt: skip
    mean, error = gaps(rows, "dense", "tt")
    assert mean == pytest.approx(0.02)
    assert error == pytest.approx(0.01)
    assert math.isnan(gaps(rows[:2], "dense", "tt")[1])
