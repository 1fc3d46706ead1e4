"""The kernels' device tests and benchmark on a GPU, from a bare checkout: `make gpu-check`.

Needs Python 3.11 or newer, torch, triton, numpy and pytest. Nothing of this project has to be
installed. Takes under 8 minutes; the benchmark runs only if the tests pass. Where TorchRec and
FBGEMM are installed, the pipeline's streams and events are tested too.

    python tests/gpu_check.py --csv gpu_lookup.csv

`TRITON_INTERPRET=1 python tests/gpu_check.py --device cpu --quick --csv F` goes the same way
without a GPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DEVICE_TESTS = ROOT / "tests" / "kernels" / "triton" / "device"
TIER_TESTS = ROOT / "tests" / "tiers" / "test_cuda.py"
PIPELINE_TESTS = ROOT / "tests" / "pipeline" / "test_cuda.py"


class CheckoutFinder(MetaPathFinder):
    """Finds the kernel families where pyproject.toml says that they lie; nothing is installed."""

    def __init__(self) -> None:
        pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        self._folders = pyproject["tool"]["setuptools"]["package-dir"]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._folders:
            return None
        folder = ROOT / self._folders[name]
        return spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def run_tests(quick: bool) -> int:
    """pytest's exit code."""
    import pytest

    tests = [str(DEVICE_TESTS), str(TIER_TESTS)]
    missing = [name for name in ("torchrec", "fbgemm_gpu") if find_spec(name) is None]
    if missing:
        print(f"not tested, as there is no {' and no '.join(missing)}: {PIPELINE_TESTS}")
    else:
        tests.append(str(PIPELINE_TESTS))
    if quick:
        tests = [f"{DEVICE_TESTS}/test_plan.py::test_no_bags",
                 f"{DEVICE_TESTS}/test_lookup.py::test_arithmetic"]  # fmt: skip
    where = ["-m", "not gpu"] if os.environ.get("TRITON_INTERPRET") == "1" else []
    return int(pytest.main(["-p", "no:cacheprovider", "--durations=5", "-rs", *where, *tests]))


def run_benchmark(options: argparse.Namespace) -> bool:
    """Prints and writes the rows; False if a result is wrong."""
    from ecorec_torchrec.bench.gpu_lookup import GpuLookupOptions, run_gpu_lookup

    all_right = True
    measured = run_gpu_lookup(
        GpuLookupOptions(
            csv=options.csv, device=options.device, quick=options.quick, sha=options.sha
        )
    )
    for cell in measured:
        key = f"{cell.cell.id_order}, {len(cell.cell.ids_L):,} lookups, {cell.cell.spec}"
        print(f"\n{key}; GEMM {cell.peak_gflops:,.0f} GFLOP/s")
        for result in cell.results:
            time_ms = f"{result.step_ms:10.3f} ms" if result.runs else result.skipped
            wrong = "" if not result.runs or result.is_right else f" WRONG {result.relative_error}"
            all_right = all_right and not wrong
            print(f"{result.contender.pattern:24} {result.contender.engine:8} {time_ms}{wrong}")
    return all_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", required=True, help="the benchmark's rows are appended to it")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="two tests and a tiny benchmark")
    parser.add_argument("--sha", default="", help="commit, where there is no git folder")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, CheckoutFinder())
    start = time.monotonic()
    if code := run_tests(options.quick):
        print("the tests failed: nothing is measured")
        return code
    print(f"tests: {time.monotonic() - start:.0f} s")
    is_right = run_benchmark(options)
    print(f"tests and benchmark: {time.monotonic() - start:.0f} s; rows in {options.csv}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
