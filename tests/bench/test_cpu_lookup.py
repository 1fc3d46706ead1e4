"""`ecorec bench cpu-lookup`: figures that add up, and none for a wrong result."""

import csv

import pytest
import torch

from ecorec_torchrec.bench import cpu_lookup
from ecorec_torchrec.bench.cpu_lookup import (
    COLUMNS,
    CpuLookupCase,
    CpuLookupOptions,
    print_rows,
    run_cpu_lookup,
)
from ecorec_torchrec.tt import TTSpec

CASE = CpuLookupCase("small", TTSpec(900, (9, 10, 10), (2, 2, 4), (3, 5)), 600, 40)


def test_rows_add_up_and_are_appended(tmp_path, capsys):
    options = CpuLookupOptions(csv=str(tmp_path / "new" / "out.csv"), repeats=2, threads=(1, 2))
    rows = list(run_cpu_lookup(options, [CASE]))
    assert [(row["id_order"], row["threads"]) for row in rows] == [
        ("hashed", 1), ("hashed", 2), ("frequency", 1), ("frequency", 2)
    ]  # fmt: skip
    for row in rows:
        assert row["step_ms"] >= row["forward_ms"] + row["backward_ms"] - 0.01
        wanted = row["gflop"] / row["step_ms"] * 1e3 / row["sgemm_gflops"]
        assert row["fraction_of_peak"] == pytest.approx(wanted, rel=0.1, abs=1e-3)
        assert 0 < float(row["max_relative_error"]) < 1e-5
    list(run_cpu_lookup(options, [CASE]))
    with open(options.csv, newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 8 and tuple(written[0]) == COLUMNS
    print_rows(rows)
    assert "small" in capsys.readouterr().out


def test_flops_are_those_of_unique_rows_and_prefixes():
    step = cpu_lookup._Step(CASE, "hashed")
    unique = step.ids_L.unique()
    num_prefixes = len((unique // 10).unique())
    per_prefix, per_row = 2 * 2 * 3 * 2 * 5, 2 * 2 * 2 * 5 * 4
    assert step.flops() == 3 * (num_prefixes * per_prefix + len(unique) * per_row)


def test_a_wrong_result_is_an_error_and_no_figure(monkeypatch, tmp_path):
    def wrong(ids, offsets, cores, spec, **options):  # noqa: ANN001, ANN003, ANN202
        output = cpu_lookup_bag(ids, offsets, cores, spec, **options)
        return output * 1.001 if output.dtype == torch.float32 else output

    cpu_lookup_bag = cpu_lookup.tt_embedding_bag
    monkeypatch.setattr(cpu_lookup, "tt_embedding_bag", wrong)
    options = CpuLookupOptions(csv=str(tmp_path / "out.csv"), repeats=1)
    with pytest.raises(
        RuntimeError, match=r"small, hashed ids, 1 threads: .* differs from float64"
    ):
        list(run_cpu_lookup(options, [CASE]))
    assert not (tmp_path / "out.csv").exists()


def test_a_file_of_another_benchmark_is_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("seed,variant\n")
    with pytest.raises(ValueError, match="other columns"):
        list(run_cpu_lookup(CpuLookupOptions(csv=str(path)), [CASE]))
    assert path.read_text() == "seed,variant\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [({"threads": (0,)}, "threads"), ({"repeats": 0}, "repeats"), ({"configs": ("x",)}, "'x'")],
)
def test_options_are_checked(option, message):
    with pytest.raises(ValueError, match=message):
        CpuLookupOptions(**option)
