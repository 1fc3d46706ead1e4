"""Which backend runs a lookup, and why another one cannot."""

from __future__ import annotations

import torch
from ecorec_torchrec.kernels.tt_index.op import numba_error

BACKENDS = ("auto", "triton", "cpu", "reference")


def unavailable_backends(device: torch.device) -> dict[str, str]:
    """The backends that cannot run on `device`, each with the reason."""
    reasons = {"triton": "this version has no Triton kernels"}
    if device.type != "cpu":
        reasons["cpu"] = f"it takes CPU tensors, these are on {device}"
    return reasons


def choose_engine(backend: str, device: torch.device, core_dtype: torch.dtype) -> str:
    """The engine behind a backend: "reference", "torch" (grouped PyTorch) or "numba".

    `cpu` runs the numba kernels, and the grouped form in PyTorch where numba is missing or the
    cores are fp64. `auto` is `cpu` on the CPU, and the grouped form in PyTorch elsewhere.

    Raises:
        ValueError: the backend is unknown or cannot run here; the message says what can, and why.

    Example::

        choose_engine("auto", torch.device("cpu"), torch.float64)   # "torch"
    """
    reasons = unavailable_backends(device)
    if backend not in BACKENDS or backend in reasons:
        available = [name for name in BACKENDS if name not in reasons]
        why = "; ".join(f"{name!r} is not available: {why}" for name, why in reasons.items())
        raise ValueError(f"backend={backend!r}, but available are {available} ({why})")
    if backend == "reference":
        return "reference"
    if device.type == "cpu" and core_dtype != torch.float64 and numba_error() is None:
        return "numba"
    return "torch"
