"""Functional lookups in tensor-train tables, as `torch.nn.functional.embedding_bag`.

The kernel families live in `/kernels` of the repository and need no TorchRec. Replaces the use of
FBGEMM's table-batched embedding operators for TT tables.
"""

try:
    from .tt_lookup import tt_embedding, tt_embedding_bag
except ModuleNotFoundError as error:
    if error.name not in (f"{__name__}.tt_lookup", f"{__name__}.tt_index"):
        raise
    raise ModuleNotFoundError(
        f"{error.name} is not installed. The kernels lie outside the package folder, so the "
        "package must be installed: `pip install ecorec-torchrec`, or `pip install -e .` in a "
        "checkout (putting the checkout on PYTHONPATH is not enough)",
        name=error.name,
    ) from error

__all__ = ["tt_embedding", "tt_embedding_bag"]
