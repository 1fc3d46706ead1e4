"""Fixtures shared by all tests: seeds, and the pool of gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from ecorec_torchrec.testing import RankPool


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to 4 gloo ranks that live as long as the test session."""
    from ecorec_torchrec.testing import RankPool  # the kernels' tests do without its libraries

    with RankPool(max_world_size=4) as pool:
        yield pool
