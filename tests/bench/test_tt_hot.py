"""`ecorec bench tt-hot`: the prototype gives the right rows, and the comparison is a fair one."""

import csv
import importlib.util
from pathlib import Path

import pytest
import torch

from ecorec_torchrec.bench import tt_hot
from ecorec_torchrec.bench.tt_hot import COLUMNS, TIME_COLUMNS, TTHotOptions
from ecorec_torchrec.bench.tt_hot_quality import CrossedData, crossed_movielens
from ecorec_torchrec.bench.tt_hot_table import (
    HotTTBag,
    TableShape,
    hottest,
    shapes_of_equal_bytes,
)
from ecorec_torchrec.cli import main
from ecorec_torchrec.tt import TTSpec, to_dense

needs_movielens = pytest.mark.skipif(
    importlib.util.find_spec("recbole") is None,
    reason="recbole, whose wheel ships MovieLens-100K, is not installed",
)


def test_hot_rows_are_dense_and_all_others_tensor_train() -> None:
    spec = TTSpec.suggest(100, 8, rank=4)
    seen = torch.tensor([7, 7, 7, 42, 42, 3, 9, 9, 9, 9])
    generator = torch.Generator().manual_seed(0)
    table = HotTTBag(TableShape("tt_hot", 8, spec, hot_rows=3), seen, generator)
    assert table.hot_ids_H.tolist() == [7, 9, 42]
    rows = to_dense([core.detach() for core in table.cores], spec)
    rows[table.hot_ids_H] = table.rows.detach()
    ids_L, offsets = torch.tensor([42, 3, 99, 7, 7, 0]), torch.tensor([0, 2, 2, 5, 6])
    sums = table(ids_L, offsets)
    torch.testing.assert_close(
        sums, torch.stack([rows[[42, 3]].sum(0), torch.zeros(8), rows[[99, 7, 7]].sum(0), rows[0]])
    )
    sums.sum().backward()
    assert table.rows.grad.sum(1).tolist() == [16, 0, 8]


def test_equal_bytes_are_equal() -> None:
    shapes = list(shapes_of_equal_bytes(100_000, 16, rank=8, hot_ranks=(4, 2)))
    assert [shape.name for shape in shapes] == ["tt", "hashing", "tt_hot_r4", "tt_hot_r2"]
    for shape in shapes[1:]:
        assert 0 <= shapes[0].nbytes - shape.nbytes < 16 * 4 + 8
    assert shapes[3].hot_rows > shapes[2].hot_rows > 0


def test_hottest_are_by_count() -> None:
    assert hottest(torch.tensor([5, 1, 5, 2, 2, 5, 8]), 2).tolist() == [2, 5]
    assert hottest(torch.tensor([5, 1]), 9).tolist() == [1, 5]


@needs_movielens
def test_crosses_keep_both_halves() -> None:
    """Hashed or not, two ratings share a cross exactly if they share user and genre."""
    plain, hashed = crossed_movielens(None, 0, None), crossed_movielens(None, 0, 1 << 40)
    assert plain.num_rows[0] == 943 * plain.plain_sizes[-2]
    for split in ("train", "val", "test"):
        for cross in range(2):
            same = plain.cross_ids(split, cross).unique(return_inverse=True)[1]
            other = hashed.cross_ids(split, cross).unique(return_inverse=True)[1]
            assert same.max() == other.max()
            assert len(torch.stack([same, other]).unique(dim=1)[0]) == same.max() + 1


@needs_movielens
def test_rows_of_all_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_ratings(path: str | None, seed: int, hashed_rows: int | None) -> CrossedData:
        data = crossed_movielens(path, seed, hashed_rows)
        for columns in data.splits.values():
            columns.dense, columns.labels = columns.dense[:1500], columns.labels[:1500]
        return data

    monkeypatch.setattr(tt_hot, "crossed_movielens", first_ratings)
    trace = tmp_path / "ads.txt"
    trace.write_text("\n".join(str(k * k % 700) for k in range(600)))
    out = tmp_path / "hot.csv"
    sizes = "--seeds 2 --epochs 1 --factors 1 --rank 4 --hot-ranks 2 --dim 8 --hashed-rows 5000"
    times = f"--traces {trace} --lookups 100 --trace-dim 8 --repeats 2"
    main(["bench", "tt-hot", "--csv", str(out), *sizes.split(), *times.split()])
    printed = capsys.readouterr().out
    assert "hashed ids: tt_hot_r2 - tt:" in printed and str(out) in printed
    rows = _read(out, COLUMNS)
    names = ["dense", "tt", "hashing", "tt_hot_r2"]
    assert [(row["ids"], row["seed"], row["variant"]) for row in rows] == [
        (ids, seed, name) for ids in ("hashed", "crossed") for seed in "01" for name in names
    ]
    assert all(0.3 < float(row["auc_test"]) < 0.9 for row in rows)
    hits = {row["variant"]: float(row["hit_rate"]) for row in rows}
    assert hits["tt"] == hits["hashing"] == 0 < hits["tt_hot_r2"] < hits["dense"] < 1
    timed = _read(tmp_path / "hot_times.csv", TIME_COLUMNS)
    assert [row["variant"] for row in timed] == names[1:]
    assert 0 < float(timed[2]["hit_rate"]) < 1


def _read(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == columns
    return rows


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"csv": "x.txt"}, "must end in .csv"),
        ({"hot_ranks": (16,)}, "--hot-ranks 16: from 1 to below --rank 16"),
        ({"seeds": -1}, "--seeds -1"),
    ],
)
def test_options_are_checked(option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTHotOptions(**option)
