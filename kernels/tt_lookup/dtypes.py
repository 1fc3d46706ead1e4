"""Which dtypes cores may have, and in which one their products are summed."""

from __future__ import annotations

import torch

CORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accumulate_dtype(core_dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 cores, fp32 for all others."""
    return torch.float64 if core_dtype == torch.float64 else torch.float32
