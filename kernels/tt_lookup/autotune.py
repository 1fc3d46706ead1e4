"""The launch configuration of a call: the heuristic's, or on request the fastest on this device.

With `ECOREC_TRITON_AUTOTUNE=1` the first lookup of a shape times `LaunchConfig.candidates` on a
batch of random ids, forward and backward, and keeps the fastest: for the process in memory, for the
next one as a file under `ECOREC_CACHE_DIR` (default `~/.cache/ecorec_torchrec`). The key is the
device, the versions of torch and Triton, the shape of the cores and the arithmetic; the batch and
the tables are not part of it. A search compiles every candidate, and takes a minute or two.

One configuration gives the same bits on every run. Two may differ in the last bits on a GPU, so
copy the file where runs must agree to the bit. Without the variable nothing is timed or read.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from torch import Tensor

from .launch import LaunchConfig, dot_precision

SWITCH, FOLDER = "ECOREC_TRITON_AUTOTUNE", "ECOREC_CACHE_DIR"
_ROW_FACTORS = (64, 64, 64)
_NUM_LOOKUPS, _BAG_LENGTH = 65_536, 16

Timer = Callable[[Callable[[], Any]], float]
"""Runs a function some times and says how long one takes, in any unit."""


def launch_config(cores: list[Tensor]) -> LaunchConfig:
    """How to launch the kernels on these cores."""
    q1, q2, q3 = (core.shape[2] for core in cores)
    ranks, dtype = (cores[0].shape[3], cores[1].shape[3]), cores[0].dtype
    heuristic = LaunchConfig.choose((q1, q2, q3), ranks, dot_precision(dtype))
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return heuristic
    return fastest((q1, q2, q3), ranks, dtype, heuristic, cores[0].device)


@lru_cache(maxsize=256)
def fastest(
    col_factors: tuple[int, int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    heuristic: LaunchConfig,
    device: torch.device,
    timer: Timer | None = None,
) -> LaunchConfig:
    """The fastest of `heuristic.candidates()`, from the file of an earlier search if there is one.

    Args:
        col_factors, ranks, dtype: of the cores.
        heuristic: whose candidates are tried.
        device: where.
        timer: default `triton.testing.do_bench`.

    Example::

        heuristic = LaunchConfig.choose((4, 4, 4), (16, 16), "tf32")
        fastest((4, 4, 4), (16, 16), torch.float32, heuristic, torch.device("cuda", 0))
    """
    from triton import testing  # imported on use: Triton may be missing

    candidates = heuristic.candidates()
    key = {
        "device": _device_name(device),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "col_factors": list(col_factors),
        "ranks": list(ranks),
        "dtype": str(dtype),
        "precision": heuristic.precision,
    }
    path = _path(key)
    found = _read(path, key, candidates)
    if found is None:
        step, time = _step(col_factors, ranks, dtype, device), timer or testing.do_bench
        times = [time(partial(step, config)) for config in candidates]
        found = candidates[times.index(min(times))]
        _write(path, {"key": key, "config": asdict(found), "times": times})
    return found


def _step(
    col_factors: tuple[int, int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[LaunchConfig], None]:
    """Forward and backward of one batch whose hot rows are few, as a function of how to launch."""
    from . import triton_engine  # which imports this module

    rows = _ROW_FACTORS[0] * _ROW_FACTORS[1] * _ROW_FACTORS[2]
    batch = TableBatch(("t",), (rows,), (_ROW_FACTORS,), col_factors, ranks, ("f",), (0,))
    generator = torch.Generator().manual_seed(0)
    skewed = torch.rand(_NUM_LOOKUPS, generator=generator).pow(3) * rows
    ids = torch.randperm(rows, generator=generator)[skewed.long()].to(device)
    offsets = torch.arange(0, _NUM_LOOKUPS + 1, _BAG_LENGTH, device=device)
    plan = index_plan(ids, offsets, batch, bounds_check="none")
    cores = [torch.ones(shape, dtype=dtype, device=device) for shape in batch.core_shapes]
    grad = torch.ones(len(offsets) - 1, batch.embedding_dim, dtype=dtype, device=device)

    def step(config: LaunchConfig) -> None:
        triton_engine.forward(plan, cores, None, 1, False, dtype, None, config)
        triton_engine.backward(grad, plan, cores, None, 1, False, True, False, None, config)

    return step


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _path(key: dict[str, Any]) -> Path:
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "ecorec_torchrec"
    name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / "triton_autotune" / f"{name}.json"


def _read(path: Path, key: dict[str, Any], candidates: list[LaunchConfig]) -> LaunchConfig | None:
    """What an earlier search found, unless the file is damaged or of other candidates."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        return next((c for c in candidates if asdict(c) == content["config"]), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: several ranks may search at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    unfinished.replace(path)
