"""The kernels compile for GPUs that are not at hand, within what their chips have.

Compiled in a process of its own, like an installed program would: without the interpreter.
`ecorec bench compile` checks every launch; here is a seeded sample with one launch per kernel.
"""

import csv
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it ships for Linux only")

KERNELS = {
    "_key_kernel",
    "_change_kernel",
    "_level_kernel",
    "prefix_kernel",
    "row_kernel",
    "pool_kernel",
    "row_piece_kernel",
    "row_grad_kernel",
    "weight_grad_kernel",
    "prefix_grad_kernel",
    "left_grad_kernel",
    "core0_piece_kernel",
    "core1_grad_kernel",
    "core2_piece_kernel",
    "sum_pieces_kernel",
}

CHECK = """
import json, sys
from pathlib import Path
from ecorec_torchrec.bench.compile_check import CompileOptions, compile_check
options = CompileOptions(csv=Path(sys.argv[1]), **json.loads(sys.argv[2]))
print(json.dumps(compile_check(options)))
"""


@pytest.mark.parametrize(
    "options",
    [{"targets": ["sm_80", "sm_90", "sm_100", "gfx942"]},
     {"targets": ["sm_90"], "candidates": True},
     {"targets": ["sm_80"], "ranks": [1, 2, 12, 14]}],
    ids=["heuristic", "candidates", "small ranks"],
)  # fmt: skip
def test_sample_compiles_without_spills(tmp_path, options):
    """Small ranks, too: matrix units take no side below 16, and kernels were refused for that."""
    out = tmp_path / "compile.csv"
    options |= {"sample": len(KERNELS)}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(out), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["kernel", "config", "target", "registers", "shared_bytes", "spills"]
    for target in options["targets"]:
        compiled = [row for row in rows if row["target"] == target]
        assert {row["kernel"] for row in compiled} == KERNELS
        assert all(int(row["registers"]) > 0 for row in compiled)


def test_a_spill_and_too_much_shared_memory_are_problems():
    from ecorec_torchrec.bench.compile_check import Resources, _problems

    good = Resources("row_kernel", "D=64", "sm_80", 64, 160 * 1024, 0)
    spilled = Resources("row_kernel", "D=64", "sm_90", 255, 1024, 8)
    greedy = Resources("row_kernel", "D=64", "gfx942", 64, 65 * 1024, 0)
    assert list(_problems(good)) == []
    assert "8 bytes spilled" in next(_problems(spilled))
    assert "66560 bytes of shared memory" in next(_problems(greedy))


def test_a_check_goes_on_where_it_ended(tmp_path):
    from ecorec_torchrec.bench.compile_check import CompileOptions, _jobs, _missing

    jobs = _jobs(CompileOptions(sample=20, targets=("sm_80", "gfx942"), ranks=(8,)))
    path = tmp_path / "compile.csv"
    assert _missing(jobs, path) == jobs
    lines = [f"{launch.kernel.__name__},{launch.config},{target}" for launch, target in jobs[:-3]]
    path.write_text("\n".join(["kernel,config,target", *lines]))
    assert len(_missing(jobs, path)) == 3


@pytest.mark.parametrize("wrong", [{"targets": ("sm_70",)}, {"sample": 0}])
def test_wrong_options_are_refused(wrong):
    from ecorec_torchrec.bench.compile_check import CompileOptions

    with pytest.raises(ValueError, match=next(iter(wrong))):
        CompileOptions(**wrong)
