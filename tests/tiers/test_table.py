"""A tiered table as its callers see it: tickets, reads and writes, refusals, statistics."""

import contextlib
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecorec_torchrec.tiers import RowInit, RowLayout, TieredTable, TierSpec
from ecorec_torchrec.tiers.row_file import MappedRowFile

from .tables import Trained, zipf_batches

ALL = torch.arange(1000)


@pytest.mark.parametrize("wishes", [{}, {"memory_rows": 60}, {"direct_reads": True}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_equal_a_dictionary(tmp_path: Path, seed: int, wishes: dict) -> None:
    """Everything a caller may do, in any order, with batches in flight or not."""
    rng = np.random.default_rng(seed)
    trained = Trained.make(tmp_path / "tiers", 1000, 120, policy=["lfu", "lru"][seed % 2], **wishes)
    table = trained.table
    model = {i: (row, 0.0) for i, row in enumerate(trained.plain_weight.tolist())}
    saved, touched_when_saved = None, set()
    touched: set[int] = set()
    in_flight: list = []

    def expected(ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([model[i][0] for i in ids.tolist()]).view(-1, 4)

    for step in range(300):
        ids = torch.from_numpy(rng.integers(0, 1000, rng.integers(0, 25)))
        match rng.choice(["prefetch", "step", "step", "eval", "read", "write", "save", "odd"]):
            case "prefetch" if len(in_flight) < 4:
                in_flight.append((table.prefetch(ids), ids))
            case "step" | "eval" as kind if in_flight:
                ticket, ids = in_flight.pop(0)
                slots = table.remap(ticket)
                assert torch.equal(trained.weight[slots], expected(ids))
                if kind == "step":
                    trained.weight[slots] = float(step)
                    trained.momentum[slots] = -float(step)
                    model |= {i: ([float(step)] * 4, -float(step)) for i in ids.tolist()}
                    touched |= set(ids.tolist())
                table.release(ticket, dirty=kind == "step")
            case "read":
                rows = table.read(ids)
                assert torch.equal(rows["weight"], expected(ids))
                assert rows["momentum1"].flatten().tolist() == [model[i][1] for i in ids.tolist()]
                rows_U, inverse_L = table.peek(ids)
                assert torch.equal(rows_U[inverse_L], expected(ids))
            case "write":
                ids = ids.unique()
                table.write(ids, {"weight": torch.full((len(ids), 4), float(step))})
                model |= {i: ([float(step)] * 4, model[i][1]) for i in ids.tolist()}
                touched |= set(ids.tolist())
            case "save" if rng.random() < 0.3:
                table.save(tmp_path / "checkpoint")
                saved, touched_when_saved = dict(model), set(touched)
            case "odd" if rng.random() < 0.3 and saved is not None:
                table.load(tmp_path / "checkpoint")
                model, touched, in_flight = dict(saved), set(touched_when_saved), []
            case "odd" if rng.random() < 0.1:
                table.drain()
                in_flight = []
    assert torch.equal(table.read(ALL)["weight"], expected(ALL))
    assert set(torch.cat([*table.touched_rows(), torch.empty(0)]).tolist()) == touched
    table.drain()
    assert table._cache.num_pinned == 0
    table.close()


def test_evaluation_leaves_the_cache_as_it_is(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 100, policy="lru")
    trained.train(zipf_batches(1000, num_batches=20, batch_size=50))
    before = trained.table._cache._directory.ids.copy()
    trained.table.statistics()
    rows_U, inverse_L = trained.table.peek(ALL.view(10, 100))
    assert torch.equal(rows_U[inverse_L], trained.plain_weight.view(10, 100, 4))
    assert (trained.table._cache._directory.ids == before).all()
    assert trained.table.statistics()["batches"] == 0


def test_batches_that_do_not_fit_wait_for_slots(tmp_path: Path) -> None:
    """Four batches ahead, slots for two: fewer are fetched ahead, and training stays exact."""
    trained = Trained.make(tmp_path, 5000, 130, prefetch_batches=4)
    assert trained.train(zipf_batches(5000, num_batches=200, batch_size=60, exponent=0.3))
    assert trained.equal()
    assert trained.table.statistics()["postponed"] > 0


def test_a_batch_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 50)
    held = trained.table.prefetch(torch.arange(20))
    too_many = trained.table.prefetch(torch.arange(10, 55))
    after = trained.table.prefetch(torch.arange(30))
    trained.table.remap(held)
    with pytest.raises(ValueError, match=r"ads.* 45 unique rows .*cache_rows=50 with 20 rows"):
        trained.table.remap(too_many)
    trained.table.remap(after)  # the next batch is not touched by it
    for ticket in (held, too_many, after):
        trained.table.release(ticket, dirty=False)
    again = trained.table.prefetch(torch.arange(10, 55))
    assert trained.table.remap(again).unique().numel() == 45


def test_a_batch_of_all_slots_fits(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 50)
    for first in (0, 500, 25):
        ids = torch.arange(first, first + 50)
        ticket = trained.table.prefetch(ids)
        assert torch.equal(trained.weight[trained.table.remap(ticket)], trained.plain_weight[ids])
        trained.table.release(ticket, dirty=True)


def test_ids_out_of_range_are_refused_at_the_wait(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 50)
    wrong, right = (trained.table.prefetch(torch.tensor([3, last])) for last in (1000, 4))
    with pytest.raises(ValueError, match=r"ads: id 1000 is not in \[0, 1000\)"):
        trained.table.remap(wrong)
    trained.table.remap(right)
    with pytest.raises(ValueError, match="id -1"):
        trained.table.read(torch.tensor([-1]))
    with pytest.raises(ValueError, match="named twice"):
        trained.table.write(torch.tensor([1, 1]), {"weight": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match=r"weight of \(2, 3\), \(2, 4\) is needed"):
        trained.table.write(torch.tensor([1, 2]), {"weight": torch.zeros(2, 3)})


def test_tickets_are_released_once(tmp_path: Path) -> None:
    """Pins are counted by batch: prefetches without a backward pass hold no slots for ever."""
    trained = Trained.make(tmp_path, 1000, 50)
    for first in range(0, 900, 30):
        ticket = trained.table.prefetch(torch.arange(first, first + 30))
        trained.table.release(ticket, dirty=False)  # never looked at
        with pytest.raises(ValueError, match="released or drained before"):
            trained.table.release(ticket, dirty=False)
    with pytest.raises(ValueError, match="released or drained before"):
        trained.table.remap(ticket)
    trained.table.remap(trained.table.prefetch(torch.arange(50)))
    trained.table.drain()
    assert trained.table._cache.num_pinned == 0


def test_an_error_of_the_storage_is_raised_at_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained.make(tmp_path, 1000, 50)
    trained.train(zipf_batches(1000, num_batches=5, batch_size=40))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space", "ads.rows")

    monkeypatch.setattr(MappedRowFile, "_write_at", full)
    trained.table.remap(trained.table.prefetch(ALL[:40]))  # came in before the write-back
    with pytest.raises((OSError, RuntimeError), match="no space"):
        trained.table.remap(trained.table.prefetch(ALL[40:50]))
    with pytest.raises(RuntimeError, match="cannot be used any more: .*no space"):
        trained.table.save(tmp_path)
    trained.table.close()


def fill_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device of the row files had not a block left."""
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: full)


def trained_and_saved(folder: Path) -> Trained:
    """Of 1,000 rows, 100 were changed; half of them are in slots, and all in a checkpoint."""
    trained = Trained.make(folder, 1000, 50)
    trained.train([ALL[:50], ALL[50:100]])
    trained.table.save(folder / "checkpoint")
    return trained


def test_a_full_device_takes_rows_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_and_saved(tmp_path)
    fill_device(monkeypatch)
    trained.train([ALL[:50], ALL[50:100]])
    trained.table.save(tmp_path / "checkpoint")
    assert trained.equal()
    with pytest.raises((OSError, RuntimeError), match="no space for 50 more rows"):
        trained.train([ALL[100:150], ALL[150:200], ALL[200:250]])
    trained.table.close()


def test_a_load_that_fails_ends_the_table_and_not_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_and_saved(tmp_path)
    with monkeypatch.context() as patch:
        fill_device(patch)
        with pytest.raises(OSError, match="no space for 100 more rows"):
            trained.table.load(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match="cannot be used any more: .*no space"):
        trained.table.save(tmp_path / "checkpoint")
    trained.table.close()
    again = Trained.make(tmp_path / "again", 1000, 50)
    again.table.load(tmp_path / "checkpoint")
    rows = again.table.read(ALL[:100])
    assert torch.equal(rows["weight"], trained.plain_weight[:100])
    again.table.close()


def test_a_fence_that_fails_is_told_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail in a callback of the worker, of which nobody hears."""
    trained = Trained.make(tmp_path, 1000, 50)
    ticket = trained.table.prefetch(ALL[:20])
    trained.table.remap(ticket)

    def lost() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(trained.table._cache._slots, "fence", lost)
    with contextlib.suppress(RuntimeError):
        trained.table.release(ticket, dirty=True)
    with pytest.raises(RuntimeError, match="cannot be used any more: device lost"):
        trained.table.remap(trained.table.prefetch(ALL[:20]))
    trained.table.close()


def test_a_second_level_without_room_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    wishes = {"memory_rows": 100, "memory_folder": str(tmp_path / "memory")}
    with pytest.raises(
        ValueError,
        match=r"ads\.memory: no second level of memory_rows=100 \(2400 bytes\): No space",
    ):
        Trained.make(tmp_path, 1000, 50, **wishes)
    assert not list((tmp_path / "memory").iterdir())
    Trained.make(tmp_path, 1000, 50).table.close()  # the row file is free again


def test_hot_rows_never_leave(tmp_path: Path) -> None:
    hot = list(range(990, 1000))
    trained = Trained.make(tmp_path, 1000, 60, hot_rows=hot, pinned_rows=10)
    trained.train([torch.tensor(hot), *zipf_batches(990, num_batches=60, batch_size=40)])
    trained.table.statistics()
    trained.train([torch.tensor(hot)])
    assert trained.table.statistics()["hit_rate"] == 1
    trained.table.save(tmp_path / "checkpoint")
    trained.table.load(tmp_path / "checkpoint")
    assert trained.equal()


def test_statistics_count_rows_by_level_and_restart(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 100, memory_rows=100, policy="lru")
    first, second = torch.arange(100), torch.arange(100, 200)
    trained.train([first, second, first])
    counts = trained.table.statistics()
    assert (counts["batches"], counts["rows"], counts["slot_hits"]) == (3, 300, 0)
    assert (counts["first_touches"], counts["memory_hits"], counts["file_rows"]) == (200, 100, 0)
    assert counts["memory_rows_written"] == 200 and counts["file_rows_written"] == 0
    assert counts["memory_bytes_read"] == 100 * trained.table.layout.record_bytes
    assert counts["wait_ms"] > 0
    trained.train([first, first])
    assert trained.table.statistics()["hit_rate"] == 1


def test_two_tables_cannot_share_a_file(tmp_path: Path) -> None:
    trained = Trained.make(tmp_path, 1000, 50)
    with pytest.raises(ValueError, match=r"ads\.rows is in use"):
        Trained.make(tmp_path, 1000, 50)
    trained.table.close()
    Trained.make(tmp_path, 1000, 50).table.close()


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ads.rows").write_bytes(b"my thesis" * 1000)
    with pytest.raises(ValueError, match="not a file of ours.*left as it is"):
        Trained.make(tmp_path, 1000, 50)
    assert (tmp_path / "ads.rows").read_bytes() == b"my thesis" * 1000


def test_a_folder_that_takes_no_direct_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def open_without_direct(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return original(path, flags, *more)

    monkeypatch.setattr(os, "open", open_without_direct)
    with pytest.raises(ValueError, match="takes no direct reads .*set direct_reads=False"):
        Trained.make(tmp_path, 1000, 50, direct_reads=True)


def make(tmp_path: Path, **wishes: object) -> TieredTable:
    layout = RowLayout((("weight", 4, torch.float32),))
    slots = wishes.pop("slots", {"weight": torch.zeros(10, 4)})
    hot_rows = wishes.pop("hot_rows", ())
    spec = TierSpec(10, str(tmp_path), **wishes)  # type: ignore[arg-type]
    return TieredTable("ads", 100, layout, spec, RowInit(4, 0), slots, hot_rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"slots": {"weight": torch.zeros(9, 4)}}, r"weight is \(9, 4\).*\(10, 4\)"),
        ({"slots": {"weight": torch.zeros(10, 4).half()}}, "float16.*float32"),
        ({"slots": {"weight": torch.zeros(4, 10).t()}}, "not contiguous"),
        ({"slots": {}}, "columns"),
        ({"hot_rows": [100]}, r"hot row 100 is not in \[0, 100\)"),
        ({"hot_rows": [1, 2, 1]}, "hot row 1 is named twice"),
        ({"pinned_rows": 3, "hot_rows": [1]}, "only 1 hot rows"),
        ({"policy": "fifo"}, "policy='fifo'"),
        ({"memory_rows": -1}, "memory_rows=-1"),
        ({"pinned_rows": 10}, "no slot"),
        ({"memory_folder": "/dev/shm"}, "without memory_rows"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, wishes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **wishes)
    assert list(tmp_path.iterdir()) == []
