"""Tests under `interpreted/` run kernels in Triton's interpreter, in a process of their own.

The interpreter is chosen when Triton is imported. `test_interpreter.py` starts that process; by
hand: `TRITON_INTERPRET=1 pytest tests/kernels/triton/interpreted`.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["interpreted"]
