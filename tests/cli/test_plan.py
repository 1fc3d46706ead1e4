"""`ecorec plan` of a list of tables: what if there were more ranks, less memory, other machines."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from ecorec_torchrec.cli import main
from ecorec_torchrec.train.data_config import DrawnTablesConfig
from ecorec_torchrec.train.drawn_tables import (
    draw_tables,
    drawn_profile,
    expected_unique_ids,
    zipf_reuse_curve,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration of 30 tables, drawn like those of `meta788`."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(788)
    pooling = np.clip(draw.lognormal(np.log(3.0), 1.55, 30), 0.05, 400)
    rows = np.clip((draw.lognormal(0.0, 2.1, 30) * 200_000).astype(np.int64), 10, 10_000_000)
    lines = ["table,num_embeddings,pooling_factor,unique_4096"]
    lines += [
        f"t{i},{n},{p:.4f},{n // 10}" for i, (n, p) in enumerate(zip(rows, pooling, strict=True))
    ]
    Path("tables.csv").write_text("\n".join(lines) + "\n")
    settings = {
        "data": {"name": "tables", "path": "tables.csv"},
        "model": {"embedding_dim": 128},
        "tt": {"tables": ["*"], "choice": "auto", "rank": 16},
        "plan": {"hardware": "h100", "local_batch_size": 512},
    }
    Path("plan30.yaml").write_text(yaml.safe_dump(settings))
    return "plan30.yaml"


def planned(config: str, *arguments: str) -> dict:
    main(["plan", "--config", config, *arguments, "--json", "figures.json", "--out", "plan.yaml"])
    return json.loads(Path("figures.json").read_text())


def test_what_if(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = planned(config, "--world-size", "8")
    shown = capsys.readouterr().out
    assert "EcoRec: table-wise, greedy by unique ids" in shown and "TorchRec: " in shown
    assert "times the mean rank; bottleneck: " in shown
    assert small["tt_tables"] == 0 and len(small["ranks"]) == 8
    assert small["imbalance"] < min(baseline["imbalance"] for baseline in small["baselines"])
    first = Path("plan.yaml").read_bytes()
    planned(config, "--world-size", "8")
    assert Path("plan.yaml").read_bytes() == first

    large = planned(config, "--world-size", "32")
    assert "(16 faster ranks are not shown)" in capsys.readouterr().out
    assert large["step_ms"] < large["world_size"] / 8 * small["step_ms"]
    assert (
        planned(config, "--world-size", "8", "--batch-size", "2048")["step_ms"] > small["step_ms"]
    )
    assert planned(config, "--world-size", "8", "--hardware", "a100")["step_ms"] > small["step_ms"]
    tight = planned(config, "--world-size", "8", "--hbm", "1.5")
    assert tight["tt_tables"] > 0
    assert all(rank["needed_bytes"] <= rank["cap_bytes"] < 1.5 * 2**30 for rank in tight["ranks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hbm", "0.01"], r"do not fit.*Cures, each of them enough:\n  1\) "),
        (["--hbm", "0"], r"--hbm 0.0 must be > 0"),
        (["--hardware", "h1000"], r"no hardware of that name.*a100, h100, h200"),
        (["--world-size", "12"], r"world size 12 does not fill hosts of 8 ranks"),
        (["--tt.tables", "x*"], r"tt.tables: no table 'x\*' among the 30"),
        (["--data.path", "nope.csv"], r"data.path='nope.csv': no such file"),
    ],
)
def test_mistakes_are_messages(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:

    with pytest.raises(SystemExit) as caught:
        main(["plan", "--config", config, "--nproc", "8", *arguments])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("t0,5,1.0", "4: table 't0' is listed twice"),
        ("t2,0,1.0", "4: num_embeddings=0 must be at least 1"),
        ("t2,9,nan", "4: pooling_factor=nan must be > 0"),
        ("t2,9", "4: "),
    ],
)
def test_bad_lines_are_named(config: str, line: str, message: str) -> None:
    from ecorec_torchrec.train.table_list import read_tables

    head = "table,num_embeddings,pooling_factor\nt0,10,1.0\nt1,10,2.0\n"
    Path("tables.csv").write_text(head + line + "\n")
    with pytest.raises(ValueError, match=f"tables.csv:{message}"):
        read_tables("tables.csv")


def test_drawn_tables_add_up_to_their_totals() -> None:
    totals = DrawnTablesConfig(
        count=50, samples=8192, lookups=9_000_000, unique_ids=1_500_000, seed=3
    )
    tables = draw_tables(totals)
    assert len({table.name for table in tables}) == 50
    lookups = sum(8192 * table.pooling_factor for table in tables)
    unique = sum(
        expected_unique_ids(table.num_embeddings, a, 8192 * table.pooling_factor)
        for table, a in zip(tables, _exponents(totals), strict=True)
    )
    assert lookups == pytest.approx(totals.lookups, rel=1e-3)
    assert unique == pytest.approx(totals.unique_ids, rel=1e-2)
    assert draw_tables(totals) == tables


def _exponents(totals: DrawnTablesConfig) -> np.ndarray:
    draw = np.random.default_rng(totals.seed)
    draw.lognormal(size=totals.count)
    return draw.uniform(0.75, 1.25, totals.count)


def test_expected_unique_ids_is_that_of_drawn_ids() -> None:
    weights = np.arange(1, 5001.0) ** -0.9
    ids = np.random.default_rng(0).choice(5000, size=(20, 3000), p=weights / weights.sum())
    counted = np.mean([len(set(draw)) for draw in ids.tolist()])
    assert expected_unique_ids(5000, 0.9, 3000) == pytest.approx(counted, rel=0.02)


def test_lists_are_not_trained(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--config", config])
    assert "list of tables without data" in capsys.readouterr().err


def test_drawn_tables_have_a_profile() -> None:
    drawn = DrawnTablesConfig(count=12, samples=4096, lookups=60_000, unique_ids=30_000, seed=1)
    profile = drawn_profile(drawn)
    for table in draw_tables(drawn):
        unique = profile.tables[table.name].unique_rows(65_536)
        assert unique == pytest.approx(table.unique_ids[65_536], abs=1)


@pytest.mark.parametrize("cache_rows", [600, 1500, 3000])
def test_reuse_of_zipf_ids_is_that_of_a_simulated_cache(cache_rows: int) -> None:
    draw = np.random.default_rng(7)
    weights = 1 / np.arange(1, 5001)
    cache: dict[int, None] = {}  # in the order of use
    asked = missed = 0
    for batch in range(200):
        ids = np.unique(draw.choice(5000, 512, p=weights / weights.sum()))
        if batch >= 50:
            asked += len(ids)
            missed += sum(row not in cache for row in ids.tolist())
        for row in ids.tolist():
            cache.pop(row, None)
            cache[row] = None
        for row in list(cache)[: max(0, len(cache) - cache_rows)]:
            del cache[row]
    curve = zipf_reuse_curve(5000, 1.0, lookups_per_sample=1.0, batch_size=512)
    assert curve.miss_ratio(cache_rows) == pytest.approx(missed / asked, abs=0.04)


HOSTS = {
    "ranks_per_host": 2,
    "device": "cuda",
    "hbm_gib": 4,
    "hbm_gb_per_s": 2000,
    "host_dram_gib": 8,
    "host_dram_gb_per_s": 400,
    "pcie_gb_per_s": 32,
    "intra_host_gb_per_s": 300,
    "inter_host_gb_per_s": 25,
    "fp32_tflops": 20,
    "storage_gib": 1000,
    "storage_read_gb_per_s": 20,
    "storage_write_gb_per_s": 10,
    "storage_iops": 4e6,
    "storage_write_iops": 1e6,
    "tier_lookup_ns": 10,
    "tier_row_ns": 10,
    "tier_moved_row_ns": 100,
}


def test_hosts_needed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hosts.yaml").write_text(yaml.safe_dump(HOSTS))
    settings = yaml.safe_load(Path(config).read_text())
    del settings["tt"]
    Path(config).write_text(yaml.safe_dump(settings))
    arguments = ["--hardware", "hosts.yaml", "--tier-folder", "/nvme", "--nodes-needed"]
    arguments += ["--json", "n"]
    main(["plan", "--config", config, *arguments])
    assert "hosts needed, as predicted" in capsys.readouterr().out
    dense, uvm, tiered = json.loads(Path("n").read_text())
    assert [way["forms"] for way in (dense, uvm, tiered)] == ["dense", "dense or UVM", "tiered"]
    assert tiered["to_hold"] < dense["to_hold"] and tiered["tiered_tables"] > 0
    assert tiered["written_tb_per_day"] > 0 == dense["written_tb_per_day"]

    rate = 1.2 * tiered["to_hold_samples_per_s"]
    main(["plan", "--config", config, *arguments, "--samples-per-second", str(rate)])
    *_, faster = json.loads(Path("n").read_text())
    assert faster["to_hold"] == tiered["to_hold"] < faster["to_reach"]
    assert faster["samples_per_s"] >= rate


def test_values_for_tiers_come_together(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {name: value for name, value in HOSTS.items() if name != "storage_iops"}
    Path("hosts.yaml").write_text(yaml.safe_dump(hosts))
    with pytest.raises(SystemExit):
        main(["plan", "--config", config, "--hardware", "hosts.yaml"])
    assert "storage_iops missing: values for tiers come together" in capsys.readouterr().err
