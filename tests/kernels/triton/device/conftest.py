"""Where the kernels run."""

import os
from functools import partial

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def lookup_case(lookup_case, device):
    return partial(lookup_case, device=device)


@pytest.fixture
def matmul_precision():
    """A setter of torch's matmul precision, which is set back."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)
