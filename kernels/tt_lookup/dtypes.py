"""Which dtypes cores may have, and in which one their products are summed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

CORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accumulate_dtype(core_dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 cores, fp32 for all others."""
    return torch.float64 if core_dtype == torch.float64 else torch.float32


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Where products are summed in `accumulate_dtype`, whatever `torch.autocast` asks for."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
