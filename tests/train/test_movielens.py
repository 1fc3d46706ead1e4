"""MovieLens-100K, in both of its file formats."""

import importlib.metadata
from pathlib import Path

import pytest

from ecorec_torchrec.train.data import SPLITS, InMemoryDataset, load_dataset
from ecorec_torchrec.train.data_config import DataConfig

GENRE_FLAGS = ["0"] * 19


@pytest.fixture
def grouplens_folder(tmp_path: Path) -> Path:
    """Three users, two films and twelve ratings in the files that GroupLens gives out."""
    users = ["1|24|M|technician|85711", "2|53|F|other|94043", "3|33|F|writer|V3N4P"]
    films = [
        ["1", "Toy Story (1995)", "01-Jan-1995", "", "url", *GENRE_FLAGS],
        ["2", "Unknown", "", "", "", *GENRE_FLAGS],
    ]
    films[0][5 + 4] = films[0][5 + 5] = "1"  # Children's, Comedy
    ratings = [f"{u}\t{i}\t{1 + (u + i) % 5}\t0" for u in (1, 2, 3) for i in (1, 2)] * 2
    (tmp_path / "u.user").write_text("\n".join(users))
    (tmp_path / "u.item").write_text("\n".join("|".join(film) for film in films))
    (tmp_path / "u.data").write_text("\n".join(ratings))
    return tmp_path


def load(path: Path | None, **options: object) -> InMemoryDataset:
    config = DataConfig(name="movielens-100k", path=None if path is None else str(path), **options)  # type: ignore[arg-type]
    dataset = load_dataset(config, seed=0)
    assert isinstance(dataset, InMemoryDataset)
    return dataset


def test_grouplens_files(grouplens_folder: Path) -> None:
    dataset = load(grouplens_folder, num_embeddings={"user_id": 1_000_000, "item_id": 1_000_000})
    assert dataset.describe() == "12 rows: train 10, val 1, test 1"
    occurring = dataset.rows_that_occur()
    assert occurring["user_id"] == 3 and occurring["item_id"] == 2
    assert occurring["gender"] == 2 and occurring["genres"] == 2
    assert occurring["year"] == 1, "a film without a year has an empty bag"
    for split in SPLITS:
        for batch in dataset.batches(split, batch_size=4):
            values = batch.sparse_features.to_dict()
            for feature in dataset.schema.sparse:
                ids = values[feature.name].values()
                assert not ids.numel() or int(ids.max()) < feature.num_embeddings
            # A bag of both genres for Toy Story, an empty one for the other film.
            assert set(values["genres"].lengths().tolist()) <= {0, 2}


def test_the_files_that_a_wheel_ships() -> None:
    try:
        importlib.metadata.distribution("recbole")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("recbole, whose wheel ships MovieLens-100K, is not installed")
    dataset = load(None)
    assert dataset.describe() == "100,000 rows: train 80,000, val 10,000, test 10,000"
    labels = [dataset.split_rows(split).labels for split in SPLITS]
    assert sum(float(part.sum()) for part in labels) == 55_375, "ratings of 4 and 5"
    occurring = dataset.rows_that_occur()
    assert occurring["occupation"] == 21 and occurring["gender"] == 2


def test_a_folder_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither u.data .* nor ml-100k.inter"):
        load(tmp_path)


def test_a_rating_of_an_unknown_film(grouplens_folder: Path) -> None:
    with open(grouplens_folder / "u.data", "a") as file:
        file.write("\n1\t99\t5\t0")
    with pytest.raises(ValueError, match="unknown user or film 99"):
        load(grouplens_folder)
