"""The `fused_params` of TT tables, reduced to what their kernel reads and TorchRec groups by."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from ecorec_torchrec.tt import TTSpec

from .cores import GroupableSpec
from .nonfinite import NONFINITE_POLICIES
from .optimizer_spec import OPTIMIZER_SETTINGS, OptimizerSpec

# `fused_params` that only TT kernels know; FBGEMM's constructors would refuse them.
TT_ONLY_SETTINGS = frozenset(
    {"tt", "workspace_bytes", "backend", "step_in_backward", "nonfinite_gradients"}
)

_BOUNDS_CHECKS = {
    BoundsCheckMode.FATAL: "fatal",
    BoundsCheckMode.V2_FATAL: "fatal",
    BoundsCheckMode.WARNING: "warning",
    BoundsCheckMode.V2_WARNING: "warning",
    BoundsCheckMode.IGNORE: "ignore",
    BoundsCheckMode.V2_IGNORE: "ignore",
    BoundsCheckMode.NONE: "none",
}
_OUTPUT_DTYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}
_FBGEMM_MAX_GRADIENT = 1.0
_BACKENDS = ("auto", "triton", "cpu", "reference")


@dataclass(frozen=True)
class TTSettings:
    """What a TT kernel is told of its tables; tables with equal settings may share a group.

    Args:
        tt: shape of the table.
        optimizer: of table-wise tables; None where none was given, and for data-parallel ones that
            are not frozen, whose cores belong to the optimizer of the dense part.
        step_in_backward: whether it steps in the backward pass, or else at `step()`.
        nonfinite_gradients: "ignore", "skip" or "stop", see `NonfiniteGuard`.
        max_gradient: gradients of the looked-up embeddings are clipped to this value on their way
            to the cores, as FBGEMM clips those of dense tables; None for no clipping.
        workspace_bytes: bound on what a lookup allocates beside its output; None for no bound.
        backend: "auto", "triton", "cpu" or "reference".
        bounds_check: "fatal" (ids out of range raise), "warning", "ignore" or "none".
        output_dtype: of the looked-up embeddings.
    """

    tt: GroupableSpec
    optimizer: OptimizerSpec | None = None
    step_in_backward: bool = True
    nonfinite_gradients: str = "ignore"
    max_gradient: float | None = None
    workspace_bytes: int | None = None
    backend: str = "auto"
    bounds_check: str = "fatal"
    output_dtype: torch.dtype = torch.float32

    @classmethod
    def from_fused_params(
        cls, table: str, spec: TTSpec, fused_params: Mapping[str, Any], data_parallel: bool
    ) -> TTSettings:
        """Reads TorchRec's `fused_params` of one table; warns of those that do not apply.

        Raises:
            TypeError: `workspace_bytes` is not an integer, or `step_in_backward` no bool.
            ValueError: a value is not supported; the message names the table and the value.
        """
        unused = sorted(fused_params.keys() - _KNOWN)
        if unused:
            warnings.warn(
                f"fused_params {unused} do not apply to TT tables and are ignored for them",
                stacklevel=2,
            )
        workspace_bytes = fused_params.get("workspace_bytes")
        if workspace_bytes is not None and type(workspace_bytes) is not int:
            raise TypeError(
                f"TT table {table!r}: workspace_bytes must be an integer, got {workspace_bytes!r}"
            )
        if workspace_bytes is not None and workspace_bytes <= 0:
            raise ValueError(f"TT table {table!r}: workspace_bytes={workspace_bytes} must be > 0")
        backend = fused_params.get("backend", "auto")
        if backend not in _BACKENDS:
            raise ValueError(f"TT table {table!r}: backend={backend!r} is not one of {_BACKENDS}")
        return cls(
            tt=GroupableSpec(spec),
            **_update_settings(table, fused_params, data_parallel),
            workspace_bytes=workspace_bytes,
            backend=backend,
            bounds_check=_lookup(
                _BOUNDS_CHECKS, fused_params, "bounds_check_mode", BoundsCheckMode.FATAL, table
            ),
            output_dtype=_lookup(
                _OUTPUT_DTYPES, fused_params, "output_dtype", SparseType.FP32, table
            ),
        )

    @classmethod
    def of(cls, fused_params: Mapping[str, Any]) -> TTSettings:
        """The settings that a TorchRec table or group config carries in its `fused_params`."""
        return cls(**fused_params)

    def as_fused_params(self) -> dict[str, Any]:
        """For TorchRec, which groups tables by the equality of these values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_KNOWN = (
    TT_ONLY_SETTINGS
    | OPTIMIZER_SETTINGS
    | {"bounds_check_mode", "output_dtype", "gradient_clipping", "max_gradient"}
)


def _update_settings(
    table: str, fused_params: Mapping[str, Any], data_parallel: bool
) -> dict[str, Any]:
    """What speaks of the updates, which for data-parallel tables are the user's own."""
    if data_parallel:
        frozen = fused_params.get("optimizer") is EmbOptimType.NONE
        return {"optimizer": OptimizerSpec(None)} if frozen else {}
    step_in_backward = fused_params.get("step_in_backward", True)
    if type(step_in_backward) is not bool:
        raise TypeError(
            f"TT table {table!r}: step_in_backward must be True or False, got {step_in_backward!r}"
        )
    nonfinite_gradients = fused_params.get("nonfinite_gradients", "ignore")
    if nonfinite_gradients not in NONFINITE_POLICIES:
        raise ValueError(
            f"TT table {table!r}: nonfinite_gradients={nonfinite_gradients!r} is not one of "
            f"{NONFINITE_POLICIES}"
        )
    return {
        "optimizer": OptimizerSpec.from_fused_params(table, fused_params),
        "step_in_backward": step_in_backward,
        "nonfinite_gradients": nonfinite_gradients,
        "max_gradient": _max_gradient(table, fused_params),
    }


def _max_gradient(table: str, fused_params: Mapping[str, Any]) -> float | None:
    if not fused_params.get("gradient_clipping", False):
        if "max_gradient" in fused_params:
            warnings.warn(
                f"TT table {table!r}: max_gradient={fused_params['max_gradient']} is ignored "
                "without gradient_clipping=True",
                stacklevel=2,
            )
        return None
    max_gradient = float(fused_params.get("max_gradient", _FBGEMM_MAX_GRADIENT))
    if not max_gradient > 0:
        raise ValueError(f"TT table {table!r}: max_gradient={max_gradient} must be > 0")
    return max_gradient


def _lookup(
    supported: Mapping[Any, Any],
    fused_params: Mapping[str, Any],
    name: str,
    default: Any,
    table: str,
) -> Any:
    value = fused_params.get(name, default)
    if value not in supported:
        raise ValueError(
            f"TT table {table!r}: {name}={value!r} is not supported; the supported ones are "
            f"{', '.join(f'{type(known).__name__}.{known.name}' for known in supported)}"
        )
    return supported[value]
