"""Training through the tiers is bit for bit training of the whole table in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecorec_torchrec.tiers.cache import PinnedBatch, RowCache
from ecorec_torchrec.tiers.slots import HostSlots

from .tables import Trained, zipf_batches


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_two_thousand_steps_equal_the_plain_table(tmp_path: Path, policy: str, ahead: int) -> None:
    """Slots for 8 % of the rows: most rows leave and come back many times."""
    trained = Trained.make(tmp_path, 5000, 400, policy=policy, prefetch_batches=ahead)
    assert trained.train(zipf_batches(5000, num_batches=2000, batch_size=60, exponent=0.9))
    assert trained.equal()
    counts = trained.table.statistics()
    assert counts["batches"] == 2000 and counts["postponed"] == 0
    assert counts["file_rows"] > 20_000 and counts["file_rows_written"] > 20_000
    trained.table.close()


@pytest.mark.parametrize(
    "wishes",
    [
        {"memory_rows": 300},
        {"memory_rows": 300, "policy": "lru"},
        {"memory_rows": 1},
        {"memory_rows": 300, "memory_folder": "memory"},
        {"direct_reads": True},
        {"direct_reads": True, "memory_rows": 300, "prefetch_batches": 3},
        {"hot_rows": list(range(999, 700, -1)), "pinned_rows": 100},
        {"hot_rows": [4999, 0, 17], "direct_reads": True},
        {"prefetch_batches": 0},
    ],
    ids=str,
)
def test_any_levels_equal_the_plain_table(tmp_path: Path, wishes: dict[str, Any]) -> None:
    if "memory_folder" in wishes:
        wishes = {**wishes, "memory_folder": str(tmp_path / "memory")}
    trained = Trained.make(tmp_path, 5000, 400, **wishes)
    assert trained.train(zipf_batches(5000, num_batches=150, batch_size=60, exponent=0.9))
    assert trained.equal()
    trained.table.close()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))  # scratch, and removed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_half_precision_travel_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rows are moved as bytes: NaNs and bit patterns that numpy has no type for come back."""
    trained = Trained.make(tmp_path, 1000, 50, weight_dtype=dtype)
    patterns = torch.randint(-(2**15), 2**15, (1000, 4), dtype=torch.int16).view(dtype)
    trained.table.write(torch.arange(1000), {"weight": patterns})
    for ids in zipf_batches(1000, num_batches=40, batch_size=40):
        ticket = trained.table.prefetch(ids)
        found = trained.weight[trained.table.remap(ticket)]
        assert torch.equal(found.view(torch.int16), patterns[ids].view(torch.int16))
        trained.table.release(ticket, dirty=True)
    assert torch.equal(
        trained.table.read(torch.arange(1000))["weight"].view(torch.int16),
        patterns.view(torch.int16),
    )


def test_without_pins_it_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of a batch in flight leave when the next one needs their slots."""
    pin, unpin = RowCache.pin, RowCache.unpin

    def pin_and_let_go(cache: RowCache, ids_L: np.ndarray, batch: int) -> PinnedBatch | None:
        pinned = pin(cache, ids_L, batch)
        if pinned is not None:
            unpin(cache, pinned, dirty=True)
        return pinned

    monkeypatch.setattr(RowCache, "pin", pin_and_let_go)
    monkeypatch.setattr(RowCache, "unpin", lambda *_, **__: None)
    trained = Trained.make(tmp_path, 5000, 100, policy="lru", prefetch_batches=1)
    assert not trained.train(zipf_batches(5000, num_batches=50, batch_size=80, exponent=0.5))


def test_without_the_state_written_back_it_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: rows leave without their optimizer state."""
    read = HostSlots.read

    def read_weights_only(slots: HostSlots, places: np.ndarray) -> np.ndarray:
        records = read(slots, places)
        records["momentum1"] = np.zeros(len(records), records["momentum1"].dtype)
        return records

    monkeypatch.setattr(HostSlots, "read", read_weights_only)
    trained = Trained.make(tmp_path, 5000, 400)
    assert not trained.train(zipf_batches(5000, num_batches=50, batch_size=80))
