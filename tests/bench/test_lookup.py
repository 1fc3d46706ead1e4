"""`ecorec bench lookup`: every contender is right, and nothing is claimed without its row."""

import csv
from pathlib import Path

import pytest
import torch

from ecorec_torchrec.bench import lookup
from ecorec_torchrec.bench.lookup import COLUMNS, CellResults, LookupOptions, run_lookup
from ecorec_torchrec.bench.lookup_cases import contenders
from ecorec_torchrec.bench.lookup_report import (
    MARKER,
    draw,
    last_runs,
    print_cell,
    ratio,
    read_rows,
    write_report,
)
from ecorec_torchrec.bench.measure import PeakMemory, zipf_ids

ECO_REC, OURS = ("eco_rec", "torch"), ("grouped", "numba")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[CellResults], Path]:
    path = tmp_path_factory.mktemp("bench") / "lookup.csv"
    options = LookupOptions(
        quick=True, keep_freed_memory=False, csv=str(path), id_orders=("hashed",)
    )
    return list(run_lookup(options)), path


def test_every_contender_is_measured_and_right(measured: tuple[list[CellResults], Path]) -> None:
    [cell], _ = measured
    names = [(r.contender.pattern, r.contender.engine) for r in cell.results]
    assert names == [(c.pattern, c.engine) for c in contenders(torch.device("cpu"))]
    for result in cell.results:
        assert result.relative_error is not None and result.relative_error < 1e-5, result
        assert len(result.runs) == 3 and result.step_ms > 0


def test_rows_have_exactly_the_columns(measured: tuple[list[CellResults], Path]) -> None:
    [cell], path = measured
    with open(path, newline="") as file:
        assert next(csv.reader(file)) == list(COLUMNS)
    rows = read_rows(path)
    assert len(rows) == len(cell.results)
    first = rows[0]
    assert (first["pattern"], first["engine"], first["device"]) == ("grouped", "numba", "cpu")
    assert (first["lookups"], first["rows"], first["dim"], first["rank"]) == (
        "2000", "20000", "16", "8",
    )  # fmt: skip
    assert float(first["step_ms"]) >= float(first["forward_ms"]) > 0
    assert 0 < float(first["fraction_of_peak"]) < 1


def test_a_wrong_result_gives_no_ratio(
    measured: tuple[list[CellResults], Path], capsys: pytest.CaptureFixture
) -> None:
    [cell], path = measured
    [run] = last_runs(read_rows(path))
    assert ratio(run, ECO_REC, OURS) == pytest.approx(
        float(next(r["step_ms"] for r in run if (r["pattern"], r["engine"]) == ECO_REC))
        / float(run[0]["step_ms"])
    )
    wrong = [dict(row, max_relative_error="0.1") if row is run[0] else row for row in run]
    assert ratio(wrong, ECO_REC, OURS) is None
    not_a_number = [dict(row, max_relative_error="nan") if row is run[0] else row for row in run]
    assert ratio(not_a_number, ECO_REC, OURS) is None

    right_error, cell.results[0].relative_error = cell.results[0].relative_error, 0.1
    try:
        print_cell(cell)
    finally:
        cell.results[0].relative_error = right_error
    printed = capsys.readouterr().out
    assert "WRONG" in printed and "1.00" not in printed.split("WRONG")[0].splitlines()[-1]


def test_the_check_sees_a_wrong_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that loses one prefix in backward is marked, not timed into a claim."""
    from ecorec_torchrec.kernels.baselines import EcoRec

    right = EcoRec.backward

    def forgetful(self, grad, lookups, cores, shape):  # noqa: ANN001, ANN202
        grads = right(self, grad, lookups, cores, shape)
        grads[1][int(lookups.i2_P[0])] = 0
        return grads

    monkeypatch.setattr(EcoRec, "backward", forgetful)
    options = LookupOptions(
        quick=True,
        keep_freed_memory=False,
        csv=str(tmp_path / "x.csv"),
        patterns=("eco_rec",),
        id_orders=("frequency",),
    )
    [cell] = run_lookup(options)
    by_engine = {r.contender.engine: r.is_right for r in cell.results}
    assert by_engine == {"numba": True, "torch": False}


def test_what_does_not_fit_is_skipped_with_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lookup.csv"
    options = {
        "quick": True,
        "keep_freed_memory": False,
        "csv": str(path),
        "id_orders": ("hashed",),
    }
    list(run_lookup(LookupOptions(max_seconds=1e-9, patterns=("tt_rec",), **options)))
    monkeypatch.setattr(lookup, "available_bytes", lambda device: 1_000_000)
    list(run_lookup(LookupOptions(patterns=("dense_sgd",), **options)))
    tt_rec, *dense = read_rows(path)
    assert tt_rec["step_ms"].startswith("skipped: needs") and tt_rec["step_ms"].endswith(" s")
    for row in dense:
        assert row["step_ms"].startswith("skipped: needs") and row["step_ms"].endswith(" GiB")
    assert ratio(dense, ("dense_sgd", "torch"), ("dense_sgd", "fbgemm")) is None


def test_the_last_run_of_a_cell_is_reported_and_prose_is_kept(
    measured: tuple[list[CellResults], Path], tmp_path: Path
) -> None:
    _, path = measured
    rows = read_rows(path)
    newer = [dict(row, git_sha="newer", step_ms="1000") for row in rows]
    report = tmp_path / "lookup.md"
    report.write_text("# Prose\n\n" + MARKER + "\nold table\n")
    write_report(rows + newer, report)
    text = report.read_text()
    assert text.startswith("# Prose\n") and "old table" not in text
    assert text.count("## hashed, 2,000 lookups") == 1 and "git newer" in text


def test_plot(measured: tuple[list[CellResults], Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    draw(read_rows(measured[1]), tmp_path / "lookup.png")
    assert (tmp_path / "lookup.png").read_bytes()[1:4] == b"PNG"


def test_a_benchmark_is_done_in_pieces(tmp_path: Path) -> None:
    """`cells` chooses, `minutes` ends, `resume` goes on where rows are missing."""

    def run(**options) -> list[tuple[int, str]]:  # noqa: ANN003
        options = LookupOptions(
            quick=True, keep_freed_memory=False, csv=str(tmp_path / "lookup.csv"),
            patterns=("grouped",), **options,
        )  # fmt: skip
        options.lookups = (500, 1_000)
        results = run_lookup(options)
        return [(len(r.cell.ids_L), r.cell.id_order) for r in results]

    assert run(cells=(2,)) == [(1_000, "hashed")]
    assert run(resume=True, minutes=1e-9) == []
    others = [(500, "hashed"), (500, "frequency"), (1_000, "frequency")]
    assert run(resume=True) == others
    assert run(resume=True) == []
    with pytest.raises(ValueError, match=r"cells: \[5\] not in 1..4"):
        run(cells=(5,))


def test_a_long_step_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_estimate_seconds", lambda *_: 7.0)
    options = LookupOptions(
        quick=True, keep_freed_memory=False, csv=str(tmp_path / "x.csv"),
        patterns=("grouped",), id_orders=("hashed",),
    )  # fmt: skip
    [cell] = run_lookup(options)
    assert all(len(result.runs) == 1 and result.is_right for result in cell.results)
    options.max_seconds = 6.5
    [cell] = run_lookup(options)
    assert all(result.skipped == "needs 7 s" for result in cell.results)


def test_trace_file(tmp_path: Path) -> None:
    trace, path = tmp_path / "ids.txt", tmp_path / "lookup.csv"
    trace.write_text("\n".join(str(i * 37 % 500) for i in range(101)))
    options = LookupOptions(
        quick=True,
        keep_freed_memory=False,
        csv=str(path),
        trace=(str(trace),),
        patterns=("grouped",),
        bag_length=10,
    )
    [cell] = run_lookup(options)
    assert (cell.cell.id_order, len(cell.cell.ids_L)) == ("trace:ids", 100)
    assert cell.cell.spec.num_embeddings == 500
    trace.write_text("1\n-2\n")
    with pytest.raises(ValueError, match="line 2: '-2' is not an id"):
        list(run_lookup(options))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sorted"):
        LookupOptions(id_orders=("sorted",))
    with pytest.raises(ValueError, match="patterns: x is not one of grouped"):
        list(run_lookup(LookupOptions(quick=True, keep_freed_memory=False, patterns=("x",))))
    other = tmp_path / "other.csv"
    other.write_text("a,b\n")
    with pytest.raises(ValueError, match="other columns"):
        list(
            run_lookup(
                LookupOptions(
                    quick=True, keep_freed_memory=False, csv=str(other), patterns=("dense_sgd",)
                )
            )
        )


def test_zipf_ids() -> None:
    """Both orders draw the same frequencies; only in one are hot rows neighbours."""
    frequency = zipf_ids(20_000, 100_000, id_order="frequency")
    hashed = zipf_ids(20_000, 100_000, id_order="hashed")
    assert torch.equal(
        frequency.bincount().sort(descending=True).values[:5000],
        hashed.bincount().sort(descending=True).values[:5000],
    )
    assert (frequency // 10).unique().numel() < 0.8 * (hashed // 10).unique().numel()
    assert frequency.bincount().argmax() == 0


def test_peak_memory_sees_what_is_freed_again() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        for _ in range(3):
            torch.ones(2**24)
    if memory.peak_bytes is None:
        pytest.skip("resident memory is measured on Linux only")
    assert 0.9 * 2**26 < memory.peak_bytes < 1.5 * 2**26
