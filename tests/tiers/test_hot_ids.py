"""The file of hot ids that a profile has beside it."""

from pathlib import Path

import numpy as np
import pytest

from ecorec_torchrec.tiers import load_hot_ids, save_hot_ids


def test_ids_come_back_in_their_order(tmp_path: Path) -> None:
    ids = {"file": np.array([7, 3, 9]), "ads": np.array([], np.int64)}  # `file` is savez's own word
    save_hot_ids(ids, tmp_path / "profile.npz")
    loaded = load_hot_ids(tmp_path / "profile.npz")
    assert {name: found.tolist() for name, found in loaded.items()} == {
        "file": [7, 3, 9],
        "ads": [],
    }


def test_one_table_is_read_alone(tmp_path: Path) -> None:
    save_hot_ids({"users": np.array([1]), "ads": np.array([2])}, tmp_path / "profile.npz")
    assert load_hot_ids(tmp_path / "profile.npz", "ads") == {"ads": [2]}
    assert load_hot_ids(tmp_path / "profile.npz", "genres") == {}


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 and no more"])
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "profile.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"profile\.npz: not an archive of hot ids"):
        load_hot_ids(tmp_path / "profile.npz")


def test_one_array_is_no_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3))
    with pytest.raises(ValueError, match="not an archive of hot ids"):
        load_hot_ids(tmp_path / "ids.npy")
