"""`ecorec env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from ecorec_torchrec.train.machine import cpu_name

_PACKAGES = (
    "ecorec-torchrec",
    "torch",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "triton",
    "numba",
    "torchmetrics",
    "tensordict",
    "numpy",
)


def run(arguments: list[str]) -> None:
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: ecorec env\n\nPrint versions and hardware, for bug reports.")
        return
    if arguments:
        raise ValueError(f"`ecorec env` takes no options, got {' '.join(arguments)}")
    for name, value in environment().items():
        print(f"{name:<16} {value}")


def environment() -> dict[str, str]:
    """Versions and hardware of this machine, by name."""
    import torch

    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
        "torchrec import": _import_state("torchrec"),
        "fbgemm import": _import_state("fbgemm_gpu"),
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "torch threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda or "none"),
        "hip": str(torch.version.hip or "none"),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = properties.total_memory / 2**30
        facts[f"gpu {index}"] = f"{properties.name}, {memory_gib:.0f} GiB"
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _import_state(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # any failure is what the report is for
        return f"fails: {error!r}"
    return "works"
