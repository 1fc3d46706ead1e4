"""The parts: initial rows, id map, replacement, file order, I/O."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ecorec_torchrec.tiers import RowInit, RowLayout
from ecorec_torchrec.tiers.directory import Directory
from ecorec_torchrec.tiers.id_map import IdMap
from ecorec_torchrec.tiers.init import mix64
from ecorec_torchrec.tiers.page_io import AsyncIO, PageIO, ThreadedIO
from ecorec_torchrec.tiers.row_order import RowOrder

from .tables import zipf_batches


@pytest.mark.parametrize(
    ("init", "mean", "std", "low", "high"),
    [
        (RowInit(7, 1, "uniform", -1.0, 3.0), 1.0, 4 / 12**0.5, -1.0, 3.0),
        (RowInit(7, 1, "normal", 0.5, 0.1), 0.5, 0.1, 0.0, 1.0),
    ],
)
def test_initial_rows_have_their_distribution(
    init: RowInit, mean: float, std: float, low: float, high: float
) -> None:
    rows = init.rows(torch.arange(20_000))
    assert rows.shape == (20_000, 7) and rows.dtype == torch.float32
    assert rows.mean().item() == pytest.approx(mean, abs=0.01)
    assert rows.std().item() == pytest.approx(std, rel=0.01)
    assert low <= rows.min() < low + 0.1 * (high - low)
    assert high - 0.1 * (high - low) < rows.max() <= high
    assert torch.corrcoef(rows.t()).fill_diagonal_(0).abs().max() < 0.04  # between columns
    assert torch.corrcoef(torch.stack([rows[:-1, 0], rows[1:, 0]]))[0, 1].abs() < 0.04


def test_an_initial_row_follows_from_seed_and_id_only() -> None:
    init, other = RowInit(5, seed=3), RowInit(5, seed=4)
    ids = torch.tensor([7, 2**40, 0, 7])
    rows = init.rows(ids)
    assert torch.equal(rows[0], rows[3])
    for i, row in zip(ids, rows, strict=True):
        assert torch.equal(init.rows(i[None])[0], row)
    assert not torch.isclose(other.rows(ids), rows).any()
    assert len(np.unique(mix64(np.arange(1000, dtype=np.uint64)))) == 1000


@pytest.mark.parametrize("spread", [1, 64, 2**32])
def test_id_map_equals_a_dictionary(spread: int) -> None:
    """Filled to the brim, emptied and refilled; ids at equal distances are no trap."""
    rng = np.random.default_rng(0)
    ids, model = IdMap(500), {}
    for _ in range(300):
        present = np.array(sorted(model), np.int64)
        gone = rng.choice(present, rng.integers(0, len(present) + 1), replace=False)
        ids.remove(gone)
        for i in gone.tolist():
            del model[i]
        new = rng.choice(5000, min(500 - len(model), rng.integers(0, 400)), replace=False) * spread
        new = np.array([i for i in new if i not in model], np.int64)
        slots = rng.integers(0, 500, len(new))
        ids.insert(new, slots)
        model |= dict(zip(new.tolist(), slots.tolist(), strict=True))
        asked = rng.integers(0, 5000, 200) * spread
        assert ids.find(asked).tolist() == [model.get(i, -1) for i in asked.tolist()]


def test_id_map_keeps_ids_that_share_a_bucket() -> None:
    """More ids than a bucket has ways: none is lost, found wrongly or refused."""
    ids = IdMap(100)
    numbers = np.arange(200_000)
    same = numbers[ids._bucket(numbers) == 5][:90]
    assert len(same) == 90
    ids.insert(same, np.arange(90))
    assert ids.find(same).tolist() == list(range(90))
    ids.remove(same[::2])
    assert (ids.find(same[::2]) == -1).all()
    assert ids.find(same[1::2]).tolist() == list(range(1, 90, 2))


def test_nothing_grows_with_the_table() -> None:
    """2^40 rows and a thousand slots: the map is as large as for a table of a thousand rows."""
    assert IdMap(1000).nbytes < 1000 * 100
    order = RowOrder("ads", 2**40, np.array([2**39, 5]))
    assert order.positions(np.array([2**39, 5, 4, 6, 2**40 - 1])).tolist() == [
        0, 1, 6, 7, 2**40 - 1,
    ]  # fmt: skip


def test_order_is_a_permutation_with_the_hot_rows_first() -> None:
    hot = np.random.default_rng(0).permutation(1000)[:300]
    order = RowOrder("ads", 1000, hot)
    everything = np.arange(1000)
    positions = order.positions(everything)
    assert sorted(positions) == everything.tolist()
    assert (order.positions(hot) == np.arange(300)).all()
    assert (order.ids(positions) == everything).all()
    assert (np.diff(order.ids(np.arange(300, 1000))) > 0).all()  # the others by id


def hit_rate(policy: str, num_slots: int, batches: list[torch.Tensor]) -> float:
    directory, hits, rows = Directory(num_slots, policy), 0, 0
    for number, batch in enumerate(batches):
        ids = np.unique(batch.numpy())
        slots = directory.map.find(ids)
        missing = ids[slots < 0]
        slots = slots[slots >= 0]
        directory.pins[slots] += 1
        filled = directory.victims(len(missing))
        assert filled is not None and len(np.unique(filled)) == len(missing)
        directory.pins[slots] -= 1
        directory.empty(filled)
        directory.place(missing, filled)
        everywhere = np.concatenate([slots, filled])
        directory.scores[everywhere] = directory.used(directory.scores[everywhere], number)
        if number >= len(batches) // 4:
            hits, rows = hits + len(slots), rows + len(ids)
    return hits / rows


def test_frequent_rows_stay_and_old_favourites_age() -> None:
    """LFU beats LRU on steady skew, and still does when other rows have become frequent."""
    steady = zipf_batches(20_000, 200, 500, exponent=1.05)
    assert hit_rate("lfu", 1000, steady) > hit_rate("lru", 1000, steady) + 0.05
    moved = zipf_batches(20_000, 1200, 500, exponent=1.05, seed=1)
    drifting = [*steady, *moved]
    assert hit_rate("lfu", 1000, drifting) > hit_rate("lru", 1000, drifting)


def test_pinned_slots_are_no_victims() -> None:
    directory = Directory(10, "lru")
    directory.place(np.arange(10), np.arange(10))
    directory.pins[:7] = 1
    assert sorted(directory.victims(3).tolist()) == [7, 8, 9]  # type: ignore[union-attr]
    assert directory.victims(4) is None


@pytest.mark.parametrize("kind", [AsyncIO, ThreadedIO])
def test_pages_are_moved_between_file_and_memory(
    tmp_path: Path, kind: type[AsyncIO] | type[ThreadedIO]
) -> None:
    """More requests than the queue is deep, out of order, of several lengths."""
    content = np.random.default_rng(0).integers(0, 256, 3000 * 4096, dtype=np.uint8)
    (tmp_path / "pages").write_bytes(content.tobytes())
    memory = np.zeros_like(content)
    with open(tmp_path / "pages", "r+b") as file:
        io: PageIO = kind(file.fileno())
        order = np.random.default_rng(1).permutation(1000)
        at, lengths = order * 3 * 4096, np.where(order % 2, 4096, 3 * 4096)
        io.read(at, memory.ctypes.data + at, lengths)
        kept = np.repeat(np.arange(3000) % 3 < np.where(np.arange(3000) // 3 % 2, 1, 3), 4096)
        assert (memory[kept] == content[kept]).all() and not memory[~kept].any()
        io.write(at[:700], memory.ctypes.data + at[::-1][:700], np.full(700, 4096))
        written = np.frombuffer((tmp_path / "pages").read_bytes(), np.uint8).reshape(-1, 4096)
        assert (written[order[:700] * 3] == content.reshape(-1, 4096)[order[::-1][:700] * 3]).all()
        with pytest.raises(OSError, match="at byte 12288000 of a row file"):
            io.read(np.array([0, 3000 * 4096]), np.full(2, memory.ctypes.data), np.full(2, 4096))
        io.close()


def test_a_read_after_an_interrupted_one_gets_its_own_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, file = 4096, tmp_path / "pages"
    file.write_bytes(np.arange(200, dtype=np.uint8).repeat(page).tobytes())
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    page_io = AsyncIO(fd)
    call = page_io._call

    def interrupted(number: int, *arguments: object) -> int:
        result = call(number, *arguments)
        if number == page_io._submit:
            raise KeyboardInterrupt
        return result

    def read(first: int, count: int) -> list[int]:
        memory = np.frombuffer(mmap.mmap(-1, count * page), np.uint8)
        pages = page * np.arange(count)
        page_io.read(page * first + pages, memory.ctypes.data + pages, np.full(count, page))
        return memory[::page].tolist()

    monkeypatch.setattr(page_io, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(0, 64)
    monkeypatch.setattr(page_io, "_call", call)
    for _ in range(3):
        assert read(100, 16) == list(range(100, 116))
    page_io.close()
    os.close(fd)


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no 'weight'"):
        RowLayout((("momentum1", 1, torch.float32),))
    with pytest.raises(ValueError, match="each name once"):
        RowLayout((("weight", 1, torch.float32), ("weight", 1, torch.float32)))
    with pytest.raises(ValueError, match="width of weight=0"):
        RowLayout((("weight", 0, torch.float32),))
