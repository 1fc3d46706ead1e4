"""Starts the tests of `device/` in a process in which Triton interprets its kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it ships for Linux only")


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this process interprets already")
def test_interpreted_kernels():
    folder = Path(__file__).parent / "device"
    num_files = len(list(folder.glob("test_*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", str(folder)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=folder.parents[3],
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > num_files
    assert "skipped" not in done.stdout
