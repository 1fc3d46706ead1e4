"""Tests under `device/` run kernels: on a GPU if there is one, else in Triton's interpreter.

The interpreter is chosen when Triton is imported, so it needs a process of its own, which
`test_interpreter.py` starts. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/triton/device`.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore = ["device"]
