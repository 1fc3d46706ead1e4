"""Checkpoints: what they cost, what they refuse, and kills at any moment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ecorec_torchrec.tiers import RowInit, row_file

from .crash_loop import NUM_STEPS, fingerprint, make_table, train
from .tables import Trained, zipf_batches


def saved(folder: Path) -> Trained:
    trained = Trained.make(folder / "tiers", 2000, 100)
    trained.train(zipf_batches(2000, num_batches=30, batch_size=60))
    trained.table.save(folder)
    return trained


def test_a_checkpoint_holds_touched_rows_only(tmp_path: Path) -> None:
    """Two rows of 2^38: no size of the table shows in memory, time or bytes."""
    table, _ = make_table(tmp_path / "large", num_rows=2**38)
    ids = torch.tensor([3, 2**38 - 1])
    table.write(ids, {"weight": torch.ones(2, 4)})
    assert torch.cat(list(table.touched_rows())).tolist() == [3, 2**38 - 1]
    table.save(tmp_path)
    assert (tmp_path / "ads.tier").stat().st_size < 8192
    table.write(torch.tensor([9]), {"weight": torch.ones(1, 4)})
    table.load(tmp_path)
    rows = table.read(torch.tensor([3, 9, 2**38 - 1]))["weight"]
    assert torch.equal(rows[[0, 2]], torch.ones(2, 4))
    assert torch.equal(rows[1:2], RowInit(4, seed=1).rows(torch.tensor([9])))
    table.close()


def test_a_checkpoint_brings_its_initial_rows_along(tmp_path: Path) -> None:
    """A process that drew another seed, orders the file otherwise and has other levels resumes."""
    trained = saved(tmp_path)
    other = Trained.make(tmp_path / "other", 2000, 300, memory_rows=50, hot_rows=[7, 5])
    other.table._cache.backing.init = RowInit(4, seed=99)
    other.table.load(tmp_path)
    other.plain_weight, other.plain_momentum = trained.plain_weight, trained.plain_momentum
    assert other.equal()


@pytest.mark.parametrize("kept", [0, 7, 100, 4096, 4100, 4200, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    trained = saved(tmp_path)
    path = tmp_path / "ads.tier"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"ads\.tier is (cut off at byte|damaged|not a file of)"):
        trained.table.load(tmp_path)
    assert trained.equal()


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """A checksum for the header and for every block: the damage is named, nothing is loaded."""
    trained = saved(tmp_path)
    path = tmp_path / "ads.tier"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(0, 16), 4000, *range(4096, 4110), *rng.integers(0, len(whole), 60)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ads\.tier is (damaged|cut off|not a file of)"):
            trained.table.load(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="goes on after its last block"):
        trained.table.load(tmp_path)
    assert trained.equal()
    path.write_bytes(whole)
    trained.table.load(tmp_path)
    assert trained.equal()


def test_damage_says_which_block_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_SCAN_ROWS", 200)
    trained = saved(tmp_path)
    path = tmp_path / "ads.tier"
    damaged = bytearray(path.read_bytes())
    damaged[9000] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"block \d of \d+ \(\d+ rows, bytes \d+ to \d+\)"):
        trained.table.load(tmp_path)


def test_checkpoints_of_other_tables_are_refused(tmp_path: Path) -> None:
    trained = saved(tmp_path)
    smaller = Trained.make(tmp_path / "other", 1000, 100)
    with pytest.raises(ValueError, match="has num_embeddings 2000, the table has 1000"):
        smaller.table.load(tmp_path)
    half = Trained.make(tmp_path / "half", 2000, 100, weight_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"has columns .*float32.*, the table has .*float16"):
        half.table.load(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint at"):
        trained.table.load(tmp_path / "nowhere")
    os.replace(tmp_path / "tiers" / "ads.rows", tmp_path / "ads.tier")
    with pytest.raises(ValueError, match="is a 'rows' file, not a checkpoint"):
        trained.table.load(tmp_path)


def test_a_save_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = saved(tmp_path)
    before = (tmp_path / "ads.tier").read_bytes()
    trained.train(zipf_batches(2000, num_batches=5, batch_size=60, seed=2))

    def full(_: int) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            trained.table.save(tmp_path)
    assert (tmp_path / "ads.tier").read_bytes() == before
    trained.table.save(tmp_path)
    trained.table.load(tmp_path)
    assert trained.equal()


def resident_bytes(field: str = "VmRSS") -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


@pytest.mark.parametrize("direct", [False, True], ids=["mapped", "direct"])
def test_two_hundred_gib_train_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """The file grows with the rows that were touched, and so does nothing else."""
    before, mapped_before = resident_bytes(), resident_bytes("RssFile")
    monkeypatch.setattr(row_file, "_RESIDENT_BYTES", mapped_before + (4 << 20))
    monkeypatch.setattr(row_file, "_ACCESSES_BETWEEN_LOOKS", 500)
    num_rows = (200 << 30) // 24
    table, slots = make_table(tmp_path, num_rows, cache_rows=5000, direct_reads=direct)
    rng, most_mapped = np.random.default_rng(0), 0
    for _ in range(8):
        ids = torch.from_numpy(rng.integers(0, num_rows, 1000))
        ticket = table.prefetch(ids)
        slots["weight"][table.remap(ticket)] += 1
        table.release(ticket, dirty=True)
        most_mapped = max(most_mapped, resident_bytes("RssFile"))
    expected = RowInit(4, seed=1).rows(ids) + 1
    assert torch.equal(table.read(ids)["weight"], expected)
    num_touched = sum(len(block) for block in table.touched_rows())
    assert num_touched == pytest.approx(8000, abs=20)
    assert table._cache.backing.file._size > 200 << 30
    # A page and the file system's own bookkeeping for each row that lies alone.
    assert table.file_bytes < 1.3 * num_touched * 4096 + (1 << 20)
    assert resident_bytes() - before < 256 << 20
    assert most_mapped - mapped_before < 24 << 20  # of 32 that were touched
    table.close()


def killed(folder: Path, num_kills: int) -> None:
    """Trains a loop that is killed at random moments, and checks what it comes to in the end."""
    script = Path(__file__).with_name("crash_loop.py")
    command = [sys.executable, str(script), str(folder / "killed"), str(num_kills)]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert report["kills"] == num_kills
    assert report["resumed_behind"] == []
    assert max(report["starts"]) > 0  # it came on between the kills
    table = train(folder / "straight", NUM_STEPS, lambda _: None)
    assert report["fingerprint"] == fingerprint(table)
    table.close()


def test_three_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    killed(tmp_path, num_kills=3)


@pytest.mark.long
def test_fifty_kills_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    killed(tmp_path, num_kills=50)
