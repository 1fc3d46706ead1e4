"""Slots on a GPU: pinned copies on a stream of their own, behind the steps that change the rows."""

from pathlib import Path

import pytest
import torch

from .tables import Trained, zipf_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="slots in HBM need a GPU"),
]


@pytest.mark.parametrize("prefetch_batches", [0, 2])
@pytest.mark.parametrize("wishes", [{}, {"direct_reads": True}, {"memory_rows": 500}])
def test_training_in_hbm_is_that_of_the_whole_table(
    tmp_path: Path, prefetch_batches: int, wishes: dict[str, int | bool]
) -> None:
    trained = Trained.make(
        tmp_path, 5000, 600, prefetch_batches=prefetch_batches, device="cuda", **wishes
    )
    assert trained.train(zipf_batches(5000, num_batches=300, batch_size=256))
    assert trained.equal()
    trained.table.close()


def test_a_row_leaves_after_the_steps_of_all_streams(tmp_path: Path) -> None:
    """The fence of one stream must not take the place of another's, which is still at work."""
    trained = Trained.make(tmp_path, 1000, 64, device="cuda")
    table, rows = trained.table, torch.arange(64)
    slow, ticket = torch.cuda.Stream(), table.prefetch(rows)
    slots = table.remap(ticket)
    with torch.cuda.stream(slow):
        torch.cuda._sleep(200_000_000)  # some tenths of a second
        trained.weight[slots] = 7.0
        table.release(ticket, dirty=True)
    again = table.prefetch(rows)
    table.remap(again)
    table.release(again, dirty=False)  # fences the idle stream
    table.remap(table.prefetch(torch.arange(100, 164)))  # all of them leave
    assert torch.equal(table.read(rows)["weight"], torch.full((64, 4), 7.0))
    table.close()
