"""`make gpu-check` runs on a bare machine: with torch, triton, numpy, pytest and a checkout."""

import csv
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it ships for Linux only")

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "triton", "numpy", "pytest")

# Without `site` an editable install is not found, as if the project were not installed.
BARE = """
import runpy, sys
from importlib.machinery import PathFinder

hidden = set(sys.argv.pop().split(","))

class BarePathFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = BarePathFinder
sys.path += sys.argv.pop().split(",")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def with_requirements(names: set[str]) -> set[str]:
    """Distributions and all that they require, extras left out; names in lower case."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for another platform
            continue
        needed = {re.split(r"[^\w.-]", x)[0].lower() for x in lines if "extra ==" not in x}
        todo |= needed - found
    return {name.replace("_", "-") for name in found}


def test_gpu_check_needs_torch_triton_numpy_and_pytest_only(tmp_path: Path) -> None:
    bare = with_requirements(set(LIBRARIES))
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not bare & {owner.lower().replace("_", "-") for owner in owners}
        and module not in sys.stdlib_module_names
        and module != "ecorec_torchrec"
    ]
    assert {"torchrec", "fbgemm_gpu", "numba", "tyro", "rich", "tqdm", "cloudpickle"} <= set(hidden)
    folders = {str(Path(import_module(x).__file__ or "").parents[1]) for x in LIBRARIES}
    path = tmp_path / "gpu.csv"
    done = subprocess.run(
        [sys.executable, "-S", "-c", BARE, str(ROOT / "tests" / "gpu_check.py"), "--device", "cpu",
         "--quick", "--csv", str(path), ",".join(folders), ",".join(hidden)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    with path.open() as file:
        rows = list(csv.DictReader(file))
    ours = [row for row in rows if (row["pattern"], row["engine"]) == ("grouped", "triton")]
    assert [row["matmul_precision"] for row in ours] == ["highest", "high"]
    for row in ours:
        assert float(row["step_ms"]) > 0 and float(row["max_relative_error"]) < 1e-5
        assert float(row["gemm_gflops"]) > 0 and float(row["copy_gbytes_per_s"]) > 0
        assert row["gpu"] and row["torch"] and row["triton"]
    skipped = {row["step_ms"] for row in rows if row["engine"] == "fbgemm"}
    assert skipped == {"skipped: needs fbgemm_gpu"}
