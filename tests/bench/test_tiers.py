"""`ecorec bench tiers` at a tiny size: figures that add up, and none for a wrong result."""

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecorec_torchrec.bench import tiers
from ecorec_torchrec.bench.raw_file import RawFile
from ecorec_torchrec.bench.tiers import COLUMNS, TiersOptions, Workload, print_rows, run_tiers
from ecorec_torchrec.cli import main


def small(tmp_path: Path, **wishes: object) -> TiersOptions:
    settings = {
        "csv": str(tmp_path / "out.csv"),
        "folder": str(tmp_path),
        "rows": 3000,
        "dim": 8,
        "lookups": 256,
        "bag_size": 4,
        "cache_fractions": (0.2,),
        "prefetch": (0, 2),
        "steps": 4,
        "warmup_steps": 3,
    }
    return TiersOptions(**{**settings, **wishes})  # type: ignore[arg-type]


def test_every_combination_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(run_tiers(small(tmp_path)))
    assert [(row["file_mode"], row["policy"], row["prefetch_depth"]) for row in rows] == [
        (mode, policy, depth)
        for mode in ("mapped", "direct")
        for policy in ("lfu", "lru")
        for depth in (0, 2)
    ]
    for row in rows:
        assert 0 < row["hit_rate"] < 1
        if not row["prefetch_depth"]:  # else other batches are counted than those timed
            # Every row is in the file: each miss is a read.
            misses = (1 - row["hit_rate"]) * row["unique_rows"]
            assert row["rows_read"] == pytest.approx(misses, abs=1)
        assert row["io_ms"] > 0 and 0 < row["lookup_share"] < 1
        bound = max(row["dram_ms"], row["io_ms"])
        assert row["step_over_bound"] == pytest.approx(row["step_ms"] / bound, rel=0.05)
    with open(tmp_path / "out.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) and tuple(written[0]) == COLUMNS
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    print_rows(rows)
    assert "zipf_1.05, 3000 rows" in capsys.readouterr().out


def test_a_trace_is_looked_up_in_its_order(tmp_path: Path) -> None:
    trace = tmp_path / "ads.txt"
    trace.write_text("\n".join(str(37 * k % 500) for k in range(1024)))
    options = small(tmp_path, trace=str(trace), rows=None, lookups=128, prefetch=(1,))
    workload = Workload.of(options)
    assert (workload.name, workload.num_rows, len(workload.batches)) == ("ads", 500, 8)
    assert workload.batches[1][:2].tolist() == [37 * 128 % 500, 37 * 129 % 500]
    with pytest.raises(ValueError, match="has 1024 ids, 2048 are needed"):
        Workload.of(small(tmp_path, trace=str(trace), rows=None, prefetch=(1,)))
    with pytest.raises(ValueError, match="is no index in 0..399"):
        Workload.of(small(tmp_path, trace=str(trace), rows=400, lookups=128, prefetch=(1,)))


def test_a_wrong_result_is_an_error_and_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that gives one wrong slot in a batch."""

    class Wrong(tiers.TieredTable):
        def remap(self, ticket: object) -> Tensor:
            slots_L = super().remap(ticket).clone()  # type: ignore[arg-type]
            slots_L[0] = (slots_L[0] + 1) % self.spec.cache_rows
            return slots_L

    monkeypatch.setattr(tiers, "TieredTable", Wrong)
    options = small(tmp_path, policies=("lru",), prefetch=(1,), file_modes=("mapped",))
    with pytest.raises(RuntimeError, match=r"lru, cache 0.2, prefetch 1, mapped: loss .* differs"):
        list(run_tiers(options))
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("direct", [False, True])
def test_raw_file_times_reads_and_writes(tmp_path: Path, direct: bool) -> None:
    file = RawFile(tmp_path / "raw", num_rows=50_000, record_bytes=100, direct=direct)
    assert (tmp_path / "raw").stat().st_size == 5_000_000
    few, many = file.time_ms(4, 4), file.time_ms(1200, 1200)
    assert 0 < few < many
    file.close()
    assert not (tmp_path / "raw").exists()


def test_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    flags = {"rows": 2000, "dim": 4, "lookups": 64, "bag-size": 2, "steps": 2, "warmup-steps": 1}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    out = tmp_path / "tiers.csv"
    once = ["--policies", "lfu", "--prefetch", "1", "--file-modes", "mapped"]
    main(["bench", "tiers", *arguments, *once, "--csv", str(out), "--folder", str(tmp_path)])
    assert f"written to {out}" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"bag_size": 3}, "no multiple of --bag-size 3"),
        ({"cache_fractions": (0.0,)}, "--cache-fractions 0.0"),
        ({"prefetch": (-1,)}, "--prefetch"),
        ({"warmup_steps": 0}, "--warmup-steps 0: at least 1"),
        ({"folder": "/nowhere"}, "--folder /nowhere: no such folder"),
    ],
)
def test_options_are_checked(tmp_path: Path, option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(tmp_path, **option)
