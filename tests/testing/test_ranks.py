"""The rank pool: results in rank order, errors with their traceback, life after a failure."""

import os

import pytest
import torch
import torch.distributed as dist

from ecorec_torchrec.testing import RankPool


def _sum_over_ranks(rank: int, value: int) -> int:
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return int(total)


def _fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("table t: bad id 7")
    dist.barrier()


def _die_on_rank_0(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(ranks: RankPool, world_size: int) -> None:
    expected = 10 * world_size + world_size * (world_size - 1) // 2
    assert ranks.run(_sum_over_ranks, 10, world_size=world_size) == [expected] * world_size


def test_failure_shows_the_rank_and_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="rank 1(.|\n)*table t: bad id 7"):
        ranks.run(_fail_on_rank_1, world_size=2)
    assert ranks.run(_sum_over_ranks, 1, world_size=2) == [3, 3]


def test_death_of_a_rank_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="rank 0: the process died, exit code 3"):
        ranks.run(_die_on_rank_0, world_size=2)


def test_world_size_beyond_the_pool_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=9 is not within 1\.\.4"):
        ranks.run(_sum_over_ranks, 1, world_size=9)
