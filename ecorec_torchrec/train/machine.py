"""What this machine is: what a measurement is valid for.

Light to import, and without TorchRec, so that `ecorec env` can tell of a broken installation.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping


def describe_machine(ranks_per_host: int) -> dict[str, str]:
    """Names, cores and versions that speeds depend on, of ranks that share this host."""
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "cores": str(len(os.sched_getaffinity(0))),
        "ranks": str(ranks_per_host),
        "torch": importlib.metadata.version("torch"),
        "torchrec": importlib.metadata.version("torchrec"),
        "ecorec-torchrec": importlib.metadata.version("ecorec-torchrec"),
    }


def differences(measured: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Where two descriptions differ, for people."""
    return [
        f"{name}: {measured.get(name, 'not given')} there, {here.get(name, 'not given')} here"
        for name in {**measured, **here}
        if measured.get(name) != here.get(name)
    ]


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
