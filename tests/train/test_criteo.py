"""Criteo click logs, streamed."""

import gzip
from pathlib import Path

import pytest
import torch

from ecorec_torchrec.train.data import SPLITS, load_dataset
from ecorec_torchrec.train.data_config import CriteoConfig, DataConfig

LARGEST_HASH = "ffffffff"


def line(label: int = 0, integers: str = "1", hashes: str = LARGEST_HASH) -> str:
    return "\t".join([str(label), *[integers] * 13, *[hashes] * 26])


def config(path: Path, **options: object) -> DataConfig:
    criteo = CriteoConfig(**({"num_embeddings": 1000, "shuffle_buffer_rows": 50} | options))  # type: ignore[arg-type]
    return DataConfig(name="criteo", path=str(path), criteo=criteo)


def write_lines(file: Path, num_rows: int) -> None:
    """Rows whose first integer is their number."""
    rows = [line().split("\t") for _ in range(num_rows)]
    for number, fields in enumerate(rows):
        fields[1] = str(number)
    file.write_text("".join("\t".join(fields) + "\n" for fields in rows))


def row_numbers(dataset: object, split: str, **options: int) -> list[int]:
    batches = dataset.batches(split, **({"batch_size": 16} | options))  # type: ignore[attr-defined]
    return [round(float(x)) - 3 for b in batches for x in b.dense_features[:, 0].exp()]


@pytest.mark.parametrize("num_embeddings", [1, 7, 1000, 2**31 + 11])
def test_raw_hashes_never_reach_beyond_their_table(tmp_path: Path, num_embeddings: int) -> None:
    """Rows prepared for tables of one size used to address rows that a smaller table lacks."""
    (tmp_path / "f").write_text(
        "".join(line(hashes=h) + "\n" for h in (LARGEST_HASH, "0", "a1")) * 20
    )
    dataset = load_dataset(config(tmp_path, num_embeddings=num_embeddings), seed=0)
    for split in SPLITS:
        for batch in dataset.batches(split, batch_size=16):
            ids = batch.sparse_features.values()
            assert ids.min() >= 0
            assert ids.max() < num_embeddings


def test_integers_and_missing_fields(tmp_path: Path) -> None:
    """A missing integer counts as 0, a missing hash is an empty bag; log(x + 3) as in TorchRec."""
    (tmp_path / "f").write_text((line(1, "", "") + "\n") * 100 + (line(0, "-2", "1f") + "\n") * 100)
    dataset = load_dataset(config(tmp_path), seed=0)
    for batch in dataset.batches("train", batch_size=1000):
        positive = batch.labels == 1
        dense = batch.dense_features
        assert torch.allclose(dense[positive], torch.tensor(3.0).log())
        assert torch.allclose(dense[~positive], torch.tensor(0.0))
        lengths = batch.sparse_features.lengths().view(26, -1)
        assert not lengths[:, positive].any() and lengths[:, ~positive].all()
        assert set(batch.sparse_features.values().tolist()) == {0x1F}


def test_streamed_splits_are_disjoint_and_complete(tmp_path: Path) -> None:
    write_lines(tmp_path / "day_0", 700)
    write_lines(tmp_path / "day_1", 300)
    dataset = load_dataset(config(tmp_path), seed=0)
    seen = {split: row_numbers(dataset, split) for split in SPLITS}
    everything = [*range(700), *range(300)]
    assert sorted(number for numbers in seen.values() for number in numbers) == sorted(everything)
    sizes = ", ".join(f"{split} {len(numbers)}" for split, numbers in seen.items())
    assert dataset.describe() == f"1,000 rows: {sizes}"
    assert 60 < len(seen["val"]) < 140 and 60 < len(seen["test"]) < 140


def test_shuffling_and_shares_of_a_stream(tmp_path: Path) -> None:
    write_lines(tmp_path / "f", 500)
    dataset = load_dataset(config(tmp_path), seed=0)
    first, second = (row_numbers(dataset, "train", epoch=epoch) for epoch in range(2))
    assert first != second and sorted(first) == sorted(second)
    assert first == row_numbers(dataset, "train", epoch=0)
    assert row_numbers(dataset, "train", start_batch=2) == first[32:]
    shares = [row_numbers(dataset, "train", rank=rank, world_size=3) for rank in range(3)]
    assert sorted(number for share in shares for number in share) == sorted(first)
    batches = [
        len(list(dataset.batches("train", batch_size=16, rank=r, world_size=3))) for r in (0, 2)
    ]
    assert batches[0] == batches[1] == dataset.num_batches("train", 16)


def test_gzipped_files(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "day_0.gz", "wt") as file:
        file.write((line() + "\n") * 60)
    assert load_dataset(config(tmp_path), seed=0).describe().startswith("60 rows")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0\t1\n", r"f:31: not a Criteo row: 2 fields instead of 40"),
        (line(hashes="xyz") + "\n", r"f:31: not a Criteo row: invalid literal for int.*'xyz'"),
        (line(integers="1.5") + "\n", r"f:31: not a Criteo row: .*'1.5'"),
        (line(label=7) + "\n", r"f:31: not a Criteo row: the label is '7', not 0 or 1"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "f").write_text((line() + "\n") * 30 + content)
    dataset = load_dataset(config(tmp_path), seed=0)
    with pytest.raises(ValueError, match=message):
        for split in SPLITS:
            list(dataset.batches(split, batch_size=8))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(config(tmp_path / "nowhere"), seed=0)
    with pytest.raises(ValueError, match="holds no file to train on"):
        load_dataset(config(tmp_path), seed=0)
    with pytest.raises(ValueError, match="pass the folder of the Criteo files"):
        load_dataset(DataConfig(name="criteo"), seed=0)
    write_lines(tmp_path / "f", 30)
    with pytest.raises(ValueError, match=r"val_files: 'dev\*' matches no file"):
        load_dataset(config(tmp_path, val_files=("dev*",)), seed=0)
    with pytest.raises(ValueError, match="is in both the train and the test split"):
        load_dataset(config(tmp_path, train_files=("f",), test_files=("f",)), seed=0)


def test_real_rows(criteo_folder: Path) -> None:
    """8,000 rows of Criteo Kaggle in the files of their three splits."""
    files = {"train_files": ("train.csv",), "val_files": ("dev.csv",), "test_files": ("test.csv",)}
    dataset = load_dataset(config(criteo_folder, **files), seed=0)
    assert dataset.describe() == "8,000 rows: train 7,200, val 409, test 391"
    labels = [b.labels for split in SPLITS for b in dataset.batches(split, batch_size=512)]
    assert float(torch.cat(labels).mean()) == pytest.approx(0.216, abs=0.001)
