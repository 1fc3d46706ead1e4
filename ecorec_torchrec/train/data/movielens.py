"""MovieLens-100K: 100,000 ratings; the label is whether a rating is 4 or 5."""

from __future__ import annotations

import csv
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ecorec_torchrec.train.data.batch import EMPTY_SLOT, Rows, Schema, SparseFeature
from ecorec_torchrec.train.data.dataset import InMemoryDataset
from ecorec_torchrec.train.data.hashing import hash_ids
from ecorec_torchrec.train.data_config import DataConfig

_LIKED = 4
_NUM_AGES = 100
_FIRST_YEAR, _NUM_YEARS, _MEDIAN_YEAR = 1900, 128, 1995
_NUM_ID_ROWS = 10_000
_NUM_ZIP_ROWS = 1000
_GROUPLENS_GENRES = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]


@dataclass
class _User:
    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass
class _Item:
    year: int | None
    genres: list[str]


@dataclass
class _Tables:
    users: dict[int, _User]
    items: dict[int, _Item]
    ratings: list[tuple[int, int, float]]  # user id, item id, rating


def movielens_100k(config: DataConfig, seed: int) -> InMemoryDataset:
    """Reads the ratings from `config.path`, or from the `recbole` distribution, which ships them.

    Raises:
        ValueError: the files are not there, or a rating names an unknown user or film.
    """
    folder = Path(config.path) if config.path is not None else _shipped_folder()
    tables = _read_tables(folder)
    rows, schema = _encode(tables, config.num_embeddings)
    return InMemoryDataset(
        rows,
        schema,
        val_fraction=config.val_fraction,
        test_fraction=config.test_fraction,
        seed=seed,
    )


def _shipped_folder() -> Path:
    """The folder inside the recbole wheel; recbole itself is never imported."""
    cure = "pass your own copy with --data FOLDER, or `pip install --no-deps recbole==1.2.1`"
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"MovieLens-100K is not on this machine: {cure}") from None
    for file in files:
        if file.name == "ml-100k.inter":
            return Path(str(file.locate())).parent
    raise ValueError(f"the installed recbole does not ship MovieLens-100K: {cure}")


def _read_tables(folder: Path) -> _Tables:
    if (folder / "ml-100k.inter").is_file():
        return _read_atomic_files(folder)
    if (folder / "u.data").is_file():
        return _read_grouplens_files(folder)
    raise ValueError(
        f"data.path={str(folder)!r} holds neither u.data (GroupLens) nor ml-100k.inter (RecBole)"
    )


def _read_atomic_files(folder: Path) -> _Tables:
    def lines(name: str) -> list[list[str]]:
        with open(folder / name, encoding="utf-8", newline="") as file:
            return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]

    return _Tables(
        users={
            int(u): _User(int(age), sex, job, z) for u, age, sex, job, z in lines("ml-100k.user")
        },
        items={
            int(i): _Item(int(year) if year.isdigit() else None, genres.split())
            for i, _, year, genres in lines("ml-100k.item")
        },
        ratings=[(int(u), int(i), float(rating)) for u, i, rating, _ in lines("ml-100k.inter")],
    )


def _read_grouplens_files(folder: Path) -> _Tables:
    def lines(name: str, delimiter: str) -> list[list[str]]:
        with open(folder / name, encoding="latin-1", newline="") as file:
            return list(csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE))

    def item(fields: list[str]) -> _Item:
        year = fields[2][-4:]  # 01-Jan-1995
        flags = fields[5:24]
        genres = [g for g, flag in zip(_GROUPLENS_GENRES, flags, strict=True) if flag == "1"]
        return _Item(int(year) if year.isdigit() else None, genres)

    return _Tables(
        users={
            int(u): _User(int(age), sex, job, z) for u, age, sex, job, z in lines("u.user", "|")
        },
        items={int(fields[0]): item(fields) for fields in lines("u.item", "|")},
        ratings=[(int(u), int(i), float(rating)) for u, i, rating, _ in lines("u.data", "\t")],
    )


def _encode(tables: _Tables, num_embeddings: dict[str, int]) -> tuple[Rows, Schema]:
    users, items = list(tables.users.values()), list(tables.items.values())
    user_position = {user_id: k for k, user_id in enumerate(tables.users)}
    item_position = {item_id: k for k, item_id in enumerate(tables.items)}
    try:
        user_R = np.array([user_position[user_id] for user_id, _, _ in tables.ratings])
        item_R = np.array([item_position[item_id] for _, item_id, _ in tables.ratings])
    except KeyError as error:
        raise ValueError(f"a rating names the unknown user or film {error}") from None

    genders = _vocabulary(user.gender for user in users)
    occupations = _vocabulary(user.occupation for user in users)
    genres = _vocabulary(genre for item in items for genre in item.genres)
    columns = [
        _Column("user_id", [[i] for i in tables.users], user_R, _NUM_ID_ROWS, hashed=True),
        _Column("item_id", [[i] for i in tables.items], item_R, _NUM_ID_ROWS, hashed=True),
        _Column("gender", [[genders[u.gender]] for u in users], user_R, len(genders)),
        _Column("age", [[min(u.age, _NUM_AGES - 1)] for u in users], user_R, _NUM_AGES),
        _Column(
            "occupation", [[occupations[u.occupation]] for u in users], user_R, len(occupations)
        ),
        _Column(
            "zip_prefix", [[_zip_prefix(u)] for u in users], user_R, _NUM_ZIP_ROWS, hashed=True
        ),
        _Column("genres", [[genres[g] for g in i.genres] for i in items], item_R, len(genres)),
        _Column("year", [_year_row(item) for item in items], item_R, _NUM_YEARS),
    ]
    encoded = [column.encode(num_embeddings.get(column.name)) for column in columns]
    age = np.array([user.age for user in users], dtype=np.float32)[user_R] / _NUM_AGES
    year = np.array([item.year or _MEDIAN_YEAR for item in items], dtype=np.float32)[item_R]
    dense = np.stack([age, (year - _FIRST_YEAR) / 100], axis=1)
    labels = np.array([rating >= _LIKED for _, _, rating in tables.ratings], dtype=np.float32)
    rows = Rows(
        dense=torch.from_numpy(dense),
        ids=torch.from_numpy(np.concatenate([ids for _, ids in encoded], axis=1)),
        labels=torch.from_numpy(labels),
    )
    return rows, Schema(dense=("age", "year"), sparse=tuple(feature for feature, _ in encoded))


@dataclass
class _Column:
    """One sparse feature: the bag of every user or film, and which of them each rating names."""

    name: str
    bags: list[list[int]]
    bag_of_rating: np.ndarray
    num_rows: int
    hashed: bool = False

    def encode(self, num_embeddings: int | None) -> tuple[SparseFeature, np.ndarray]:
        """The feature and its `(ratings, width)` ids; another table size means hashing into it."""
        num_rows = num_embeddings or self.num_rows
        width = max(map(len, self.bags))
        ids = np.full((len(self.bags), width), EMPTY_SLOT, dtype=np.int64)
        for bag, row in zip(self.bags, ids, strict=True):
            row[: len(bag)] = bag
        if self.hashed or num_embeddings is not None:
            ids = np.where(ids == EMPTY_SLOT, EMPTY_SLOT, hash_ids(ids, num_rows))
        return SparseFeature(self.name, num_rows, width), ids[self.bag_of_rating]


def _vocabulary(words: Iterable[str]) -> dict[str, int]:
    return {word: k for k, word in enumerate(sorted(set(words)))}


def _zip_prefix(user: _User) -> int:
    return int.from_bytes(user.zip_code[:3].encode(), "big")


def _year_row(item: _Item) -> list[int]:
    return [] if item.year is None else [min(max(item.year - _FIRST_YEAR, 0), _NUM_YEARS - 1)]
