"""Training through the tiers is bit for bit training of the whole table in memory."""

from pathlib import Path

import pytest

from .tables import Trained, zipf_batches


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("memory_rows", [0, 200])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_weights_and_state_equal_the_plain_table(
    tmp_path: Path, policy: str, memory_rows: int, ahead: int
) -> None:
    """A cache of 8 % of the rows: most rows are evicted and come back many times."""
    trained = Trained.make(
        tmp_path, 5000, 400, policy=policy, memory_rows=memory_rows, prefetch_batches=ahead
    )
    assert trained.train(zipf_batches(5000, num_batches=200, batch_size=80))
    assert trained.equal()
    assert trained.table.statistics()["file_rows"] > 1000
    trained.table.close()
