"""Embedding tables too large for memory, as tensor-train (TT) cores inside TorchRec.

The public names load on first use (PEP 562), so that importing a kernel never imports TorchRec.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PUBLIC_NAMES = {
    "EcoRecConstraints": "planner",
    "EcoRecPlanner": "planner",
    "EcoRecTrainPipeline": "pipeline",
    "TTEmbeddingBagCollection": "modules",
    "TTEmbeddingBagCollectionSharder": "sharding",
    "TTEmbeddingBagConfig": "modules",
    "TTEmbeddingCollection": "modules",
    "TTEmbeddingCollectionSharder": "sharding",
    "TTEmbeddingConfig": "modules",
    "TTParameterSharding": "plan",
    "TTSpec": "tt",
    "TierSpec": "tiers",
    "TieredParameterSharding": "plan",
    "from_dense": "tt",
    "get_ecorec_sharders": "sharding",
    "load_plan": "plan",
    "load_tiers": "sharding",
    "save_plan": "plan",
    "save_tiers": "sharding",
    "tiered_row_wise": "plan",
    "tiered_table_wise": "plan",
    "to_dense": "tt",
    "tt_data_parallel": "plan",
    "tt_table_wise": "plan",
}

__all__ = sorted(_PUBLIC_NAMES)

try:
    __version__ = version("ecorec-torchrec")
except PackageNotFoundError:
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = _PUBLIC_NAMES[name]
    if package not in (
        "tt",
        "tiers",
    ):  # the others need TorchRec: say what is wrong with it, and the cure
        from .errors import require_torchrec

        require_torchrec()
    value = getattr(import_module(f".{package}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC_NAMES])
