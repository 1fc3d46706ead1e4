"""Fixtures shared by all tests: seeds, and the pool of gloo ranks."""

from collections.abc import Iterator

import pytest
import torch

from ecorec_torchrec.testing import RankPool


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to 4 gloo ranks that live as long as the test session."""
    with RankPool(max_world_size=4) as pool:
        yield pool
