"""The checks of the planner: what they draw, measure and conclude."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ecorec_torchrec.bench.machine import write_hardware
from ecorec_torchrec.bench.measure import append_rows
from ecorec_torchrec.bench.plan import (
    CHOSEN,
    PREDICTION_COLUMNS,
    REGRET_COLUMNS,
    PlanBenchOptions,
    prediction_summary,
    regret,
)
from ecorec_torchrec.bench.plan_prediction import draw_configuration
from ecorec_torchrec.bench.plan_regret import draw_workload
from ecorec_torchrec.bench.plan_report import MARKER, write_report
from ecorec_torchrec.cli import main
from ecorec_torchrec.train.hardware import HostHardware
from ecorec_torchrec.train.machine import describe_machine

SMALL_COSTS = {
    name: {"calls": 1e5}
    for name in ("dense_forward", "dense_backward", "tt_forward", "tt_backward", "step")
} | {"all_to_all": {"bytes": 1.0}, "copy": {"bytes": 0.1}, "gemm": {"flops": 0.01}}


@pytest.fixture(autouse=True)
def _hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine.yaml`: costs of this machine, not measured but made up."""
    monkeypatch.chdir(tmp_path)
    hardware = HostHardware(
        ranks_per_host=2,
        device="cpu",
        host_dram_gib=8,
        host_dram_gb_per_s=10,
        intra_host_gb_per_s=1,
        fp32_tflops=0.1,
        machine=describe_machine(2),
        costs_ns=SMALL_COSTS,
    )
    write_hardware(hardware, Path("machine.yaml"))


def test_configurations_follow_from_seed_and_number() -> None:
    first = draw_configuration(0, 3)
    assert draw_configuration(0, 3) == first
    assert draw_configuration(0, 4) != first != draw_configuration(1, 3)
    assert set(first.tt_tables) <= set(first.workload.names())
    ids = first.workload.batches(rank=0, count=1)[0].sparse_features
    assert ids.stride() == first.workload.local_batch_size
    profile = first.workload.profile(world_size=2).tables["t0"]
    values = first.workload.batches(0, 4)
    counted = [batch.sparse_features["t0"].values().unique().numel() for batch in values]
    mean = sum(counted) / len(counted)
    assert profile.unique_rows(first.workload.local_batch_size) == pytest.approx(mean, rel=0.15)


def test_a_configuration_is_predicted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "plan", "--csv", "p.csv", "--first", "5", "--last", "5", "--steps", "1"])
    (row,) = csv.DictReader(Path("p.csv").read_text().splitlines())
    assert list(row) == list(PREDICTION_COLUMNS)
    assert float(row["measured_ms"]) > 0 and float(row["predicted_ms"]) > 0
    assert float(row["measured_mib"]) > 0 and row["number"] == "5"
    assert "step error, median" in capsys.readouterr().out


@pytest.mark.long
def test_eight_plans_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "plan", "--check", "regret", "--csv", "r.csv", "--steps", "1"])
    rows = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert list(rows[0]) == list(REGRET_COLUMNS)
    assert len({row["plan"] for row in rows}) == 8
    assert 0 < int(rows[0]["tt_tables"]) < int(rows[0]["tables"]) == 40
    assert f"{regret(rows):.1%} longer" in capsys.readouterr().out


@pytest.mark.long  # drawing the list takes ten seconds
def test_tables_of_the_regret_check_are_cut_to_fit() -> None:
    tables = draw_workload(seed=1).tables
    assert len(tables) == 40 and tables == draw_workload(seed=1).tables
    assert max(table.num_embeddings for table in tables) <= 100_000


def test_summaries() -> None:
    rows = [
        {"predicted_ms": p, "measured_ms": m, "predicted_mib": "12", "measured_mib": "10"}
        for p, m in (("11", "10"), ("22", "20"), ("60", "40"), ("90", "100"))
    ]
    summary = prediction_summary(rows)
    assert summary["step error, median"] == pytest.approx(0.1)
    assert summary["step error, 90th percentile"] == pytest.approx(0.38)
    assert summary["Spearman"] == pytest.approx(1.0)
    assert summary["memory ratio, least"] == pytest.approx(1.2)
    plans = [{"plan": CHOSEN, "measured_ms": "11"}, {"plan": "random_0", "measured_ms": "10"}]
    assert regret(plans) == pytest.approx(0.1)


def test_the_report_replaces_what_is_below_its_marker() -> None:
    shown = {**dict.fromkeys(PREDICTION_COLUMNS, "1"), "predicted_ms": "12", "measured_ms": "10"}
    append_rows(Path("planner_prediction.csv"), PREDICTION_COLUMNS, [shown])
    row = dict.fromkeys(REGRET_COLUMNS, "7")
    plans = [row | {"plan": CHOSEN, "measured_ms": "11"}, row | {"plan": "torchrec"}]
    append_rows(Path("planner_regret.csv"), REGRET_COLUMNS, plans)
    Path("page.md").write_text(f"# Mine\n\n{MARKER}\nold\n")
    write_report(Path(), Path("page.md"))
    text = Path("page.md").read_text()
    assert text.startswith("# Mine\n\n<!--") and "old" not in text
    assert "| step error, median | 0.2 |" in text
    assert "The chosen plan's step is 57.1% longer than the best." in text
    write_report(Path(), Path("page.md"))
    assert Path("page.md").read_text() == text


def test_a_data_sheet_cannot_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "plan", "--hardware", "h100", "--csv", "p.csv"])
    assert "h100: no costs measured on CPU ranks" in capsys.readouterr().err
    with pytest.raises(ValueError, match="0 <= first <= last"):
        PlanBenchOptions(first=3, last=2)
