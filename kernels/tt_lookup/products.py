"""Matrix products whose bits depend on their operands only."""

from __future__ import annotations

import torch
from torch import Tensor


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """`torch.bmm` whose items do not depend on the rest of the batch or on the number of threads.

    A BLAS gives every matrix of a batch to one thread, unless there are fewer matrices than
    threads: then it splits one among several and adds in another order. Such batches are filled up
    on the CPU. Differentiable (without `out`); its backward products have as many items.

    Args:
        a: `(n, i, k)`.
        b: `(n, k, j)`.
        out: `(n, i, j)`, to write into.
    """
    batch = a.shape[0]
    missing = _num_threads() - batch if a.device.type == "cpu" and batch else 0
    if missing > 0:
        product = torch.bmm(_fill_up(a, missing), _fill_up(b, missing))[:batch]
        return product if out is None else out.copy_(product)
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)


def _fill_up(x: Tensor, missing: int) -> Tensor:
    """`missing` more matrices. A transposed operand stays one: BLAS has other code for it."""
    if x.stride(2) != 1 and x.stride(1) == 1:
        return _fill_up(x.mT, missing).mT
    return torch.cat([x, x[:1].expand(missing, -1, -1)])


@torch.compiler.assume_constant_result
def _num_threads() -> int:
    return max(2, torch.get_num_threads())
