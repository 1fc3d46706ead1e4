"""The `fused_params` of tiered tables, reduced to what their kernel reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from ecorec_torchrec.tiers import TierSpec

from .settings import TT_ONLY_SETTINGS

TIERED_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.ADAM,
)
_WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
_BOUNDS_CHECKS = (BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)
# Of FBGEMM's constructor: how a row that is looked up changes.
_FBGEMM_SETTINGS = frozenset(
    ["learning_rate", "eps", "beta1", "beta2", "weight_decay", "weight_decay_mode"]
    + ["gradient_clipping", "max_gradient"]
)
# These change rows that are not looked up, or count what a table has seen.
_REFUSED_SETTINGS = (
    ["momentum", "max_norm", "eta", "counter_based_regularization", "cowclip_regularization"]
    + ["ensemble_mode", "emainplace_mode", "global_weight_decay", "optimizer_state_dtypes"]
    + ["use_rowwise_bias_correction"]
)
_TAKEN_CARE_OF = (
    TT_ONLY_SETTINGS
    | _FBGEMM_SETTINGS
    | {"tiers", "optimizer", "output_dtype", "bounds_check_mode", "stochastic_rounding"}
)


class TableTiers:
    """The memories of one table, equal to those of any other.

    TorchRec groups tables by the equality of their `fused_params`; tables of one kernel need not
    have like memories, so they do not count here. Each table keeps its own `spec`.
    """

    def __init__(self, spec: TierSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableTiers)

    def __hash__(self) -> int:
        return hash(TableTiers)

    def __repr__(self) -> str:
        return f"TableTiers({self.spec})"


@dataclass(frozen=True)
class TieredSettings:
    """What a tiered kernel is told of its tables; tables with equal settings share a kernel.

    Args:
        tiers: the memories of the table.
        optimizer: None where none was given.
        arguments: of FBGEMM's constructor, by name.
    """

    tiers: TableTiers
    optimizer: EmbOptimType | None
    arguments: tuple[tuple[str, Any], ...]

    @classmethod
    def from_fused_params(
        cls, table: str, spec: TierSpec, fused_params: Mapping[str, Any]
    ) -> TieredSettings:
        """Reads TorchRec's `fused_params` of one table; warns of those that do not apply.

        Raises:
            ValueError: a value is not supported; the message names the table and the value.
        """
        optimizer = fused_params.get("optimizer")
        if optimizer is not None:
            _check(
                table,
                "optimizer",
                optimizer,
                TIERED_OPTIMIZERS,
                "only optimizers that change just the rows of a batch train a tiered table exactly",
            )
        _check(
            table,
            "weight_decay_mode",
            fused_params.get("weight_decay_mode", WeightDecayMode.NONE),
            _WEIGHT_DECAYS,
            "the other modes count or change rows that are not in the batch",
        )
        _check(
            table,
            "bounds_check_mode",
            fused_params.get("bounds_check_mode", BoundsCheckMode.FATAL),
            _BOUNDS_CHECKS,
            "ids of a tiered table are always checked",
        )
        _check(
            table,
            "output_dtype",
            fused_params.get("output_dtype", SparseType.FP32),
            (SparseType.FP32,),
            "rows of a tiered table are looked up in the type they are stored in",
        )
        for name in _REFUSED_SETTINGS:
            if fused_params.get(name):
                raise ValueError(
                    f"tiered table {table!r}: {name}={fused_params[name]!r} is not supported"
                )
        unused = sorted(fused_params.keys() - _TAKEN_CARE_OF - set(_REFUSED_SETTINGS))
        if unused:
            warnings.warn(
                f"fused_params {unused} do not apply to tiered tables and are ignored for them",
                stacklevel=2,
            )
        arguments = {name: fused_params[name] for name in _FBGEMM_SETTINGS & fused_params.keys()}
        return cls(TableTiers(spec), optimizer, tuple(sorted(arguments.items())))

    @classmethod
    def of(cls, fused_params: Mapping[str, Any]) -> TieredSettings:
        """The settings that a TorchRec table or group config carries in its `fused_params`."""
        return cls(**fused_params)

    def as_fused_params(self) -> dict[str, Any]:
        """For TorchRec, which groups tables by the equality of these values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _check(table: str, name: str, value: Any, supported: tuple[Any, ...], why: str) -> None:
    if value not in supported:
        raise ValueError(
            f"tiered table {table!r}: {name}={value!r} is not supported ({why}); supported are "
            f"{', '.join(f'{type(known).__name__}.{known.name}' for known in supported)}"
        )
