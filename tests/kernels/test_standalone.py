"""The kernel families need no TorchRec and no FBGEMM; the facade says how to install them."""

import subprocess
import sys
from textwrap import dedent

BLOCK = """
import sys

for name in ("torchrec", "fbgemm_gpu", "fbgemm"):
    sys.modules[name] = None  # importing it raises ImportError
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runs_without_torchrec():
    output = run("""
        import torch
        from ecorec_torchrec import TTSpec
        from ecorec_torchrec.kernels import tt_embedding_bag

        spec = TTSpec(90, (4, 5, 5), (2, 2, 2), (4, 4))
        ids, offsets = torch.tensor([3, 89, 3]), torch.tensor([0, 2])
        for dtype in (torch.float32, torch.float64):
            cores = [torch.ones(s, dtype=dtype, requires_grad=True) for s in spec.core_shapes]
            for backend in ("cpu", "reference"):
                output = tt_embedding_bag(ids, offsets, cores, spec, backend=backend)
                output.sum().backward()
                print(output[:, 0].tolist(), cores[0].grad.sum().item())
                cores[0].grad = None
        """)
    # A row of ones is 16 * 1: r1 * r2 paths. d(sum of 3 * 8 entries)/d(core 0) = 24 * 16.
    assert output.split("\n")[:-1] == ["[32.0, 16.0] 384.0"] * 4


def test_importing_does_not_load_numba():
    """numba takes a second to import: only its first use pays."""
    assert "False" in run("""
        import ecorec_torchrec.kernels

        print("numba" in sys.modules)
        """)


def test_missing_families_are_explained():
    output = run("""
        sys.modules["ecorec_torchrec.kernels.tt_lookup"] = None
        try:
            import ecorec_torchrec.kernels
        except ModuleNotFoundError as error:
            print(error)
        """)
    assert "tt_lookup is not installed" in output
    assert "pip install -e ." in output
