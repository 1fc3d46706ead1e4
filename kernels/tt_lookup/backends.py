"""Which backend runs a lookup, and why another one cannot."""

from __future__ import annotations

import os

import torch
from ecorec_torchrec.kernels.tt_index.op import numba_error, triton_error

BACKENDS = ("auto", "triton", "cpu", "reference")


def unavailable_backends(device: torch.device) -> dict[str, str]:
    """The backends that cannot run on `device`, each with the reason."""
    reasons = {}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu"
    if device.type != "cuda" and not interpreted:
        reasons["triton"] = f"it takes CUDA tensors, these are on {device}"
    elif triton_error() is not None:
        reasons["triton"] = f"Triton cannot be imported ({triton_error()})"
    if device.type != "cpu":
        reasons["cpu"] = f"it takes CPU tensors, these are on {device}"
    return reasons


def choose_engine(backend: str, device: torch.device, core_dtype: torch.dtype) -> str:
    """The engine behind a backend: "reference", "torch" (grouped PyTorch), "numba" or "triton".

    `cpu` runs the numba kernels, `triton` the Triton kernels; without numba, and for fp64 cores,
    which neither takes, the grouped form in PyTorch runs. `auto` is `cpu` on the CPU; on CUDA it
    is `triton`, or the grouped form in PyTorch where Triton cannot be imported.

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
    if core_dtype == torch.float64:
        return "torch"
    if backend == "triton" or (device.type == "cuda" and "triton" not in reasons):
        return "triton"
    if device.type == "cpu" and numba_error() is None:
        return "numba"
    return "torch"
