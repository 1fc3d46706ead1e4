"""Computation patterns of published TT embedding systems, to measure `tt_lookup` against.

TT-Rec, EL-Rec and EcoRec, forward and backward, written anew from descriptions of the algorithms.
For comparison only: train with `ecorec_torchrec.kernels.tt_lookup`.
"""

from typing import TYPE_CHECKING, Any

from .functional import Pattern, baseline_embedding_bag
from .torch_patterns import EcoRec, ELRec, TTRec

if TYPE_CHECKING:
    from .numba_grouped import NumbaGroupedPlain
    from .numba_patterns import NumbaEcoRec, NumbaEcoRecTuned

__all__ = [
    "ELRec",
    "EcoRec",
    "NumbaEcoRec",
    "NumbaEcoRecTuned",
    "NumbaGroupedPlain",
    "Pattern",
    "TTRec",
    "baseline_embedding_bag",
]


def __getattr__(name: str) -> Any:
    if name in ("NumbaEcoRec", "NumbaEcoRecTuned"):  # imported on use: numba takes a second
        from . import numba_patterns

        return getattr(numba_patterns, name)
    if name == "NumbaGroupedPlain":
        from . import numba_grouped

        return numba_grouped.NumbaGroupedPlain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
