"""What every table's kernel is told, and in which dist group the table is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from ecorec_torchrec.dist import DIST_GROUPS, DistGroups, split_dist_groups
from ecorec_torchrec.lookup import TT_ONLY_SETTINGS, TieredSettings, TTSettings
from ecorec_torchrec.plan import tiers_of
from ecorec_torchrec.tiers import TierSpec
from ecorec_torchrec.tt import TTSpec

from .output_types import check_output_types

_CPU_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
)


def settle_infos(
    infos_by_type: dict[str, list[EmbeddingShardingInfo]],
    specs: Mapping[str, TTSpec],
    tier_specs: Mapping[str, TierSpec],
) -> dict[str, list[EmbeddingShardingInfo]]:
    """TorchRec's infos, dealt out to dist groups, with the `fused_params` that each kernel takes.

    Those of TT tables become `TTSettings`, those of tiered ones `TieredSettings`, and those of
    dense ones lose what only TT kernels know.

    Raises:
        TypeError, ValueError: a setting of a TT or tiered table is not supported, or outputs of
            unlike types would travel together.
    """
    dist_groups = DistGroups()
    for sharding_type, infos in infos_by_type.items():
        data_parallel = sharding_type == ShardingType.DATA_PARALLEL.value
        for info in infos:
            table, fused_params = info.embedding_config.name, dict(info.fused_params or {})
            dist_groups = fused_params.pop(DIST_GROUPS, dist_groups)
            if table in specs:
                if data_parallel:
                    fused_params["optimizer"] = _frozen_or_none(table, info.param)
                info.fused_params = TTSettings.from_fused_params(
                    table, specs[table], fused_params, data_parallel
                ).as_fused_params()
            elif table in tier_specs:
                info.fused_params = TieredSettings.from_fused_params(
                    table, tier_specs[table], fused_params
                ).as_fused_params()
            else:
                _warn_of_frozen(info)
                info.fused_params = {
                    name: value
                    for name, value in fused_params.items()
                    if name not in TT_ONLY_SETTINGS
                }
    check_output_types(infos_by_type, specs.keys() | tier_specs.keys())
    return split_dist_groups(infos_by_type, dist_groups)


def check_fbgemm_optimizers(
    infos: Iterable[EmbeddingShardingInfo], device: torch.device | None
) -> None:
    """Raises ValueError for optimizers that FBGEMM's fused kernels do not have on the CPU.

    They stop at a bare assertion, where TT tables, which share the sharder's `fused_params`, go on.
    """
    if device is None or device.type != "cpu":
        return
    for info in infos:
        optimizer = info.fused_params.get("optimizer") or EmbOptimType.EXACT_SGD
        is_tiered = tiers_of(info.param_sharding) is not None
        is_fused = info.param_sharding.compute_kernel == EmbeddingComputeKernel.FUSED.value
        if (is_fused or is_tiered) and optimizer not in _CPU_OPTIMIZERS:
            kind = "tiered" if is_tiered else "dense"
            raise ValueError(
                f"{kind} table {info.embedding_config.name!r}: FBGEMM has no optimizer {optimizer} "
                f"on the CPU, only {', '.join(kind.name for kind in _CPU_OPTIMIZERS)}: name one of "
                "them in fused_params, and give TT tables their own by apply_optimizer_in_backward"
            )


def _frozen_or_none(table: str, weight: nn.Parameter) -> EmbOptimType | None:
    """The cores of a data-parallel TT table are frozen or belong to the user's own optimizer."""
    settings = getattr(weight, "_optimizer_kwargs", [{}])[0]
    if settings.get("optimizer") is EmbOptimType.NONE:
        return EmbOptimType.NONE
    if settings:
        warnings.warn(
            f"apply_optimizer_in_backward is ignored for TT table {table!r}, which is "
            "data-parallel: step its cores with the optimizer of the dense part",
            stacklevel=2,
        )
    return None


def _warn_of_frozen(info: EmbeddingShardingInfo) -> None:
    """TorchRec's kernels make parameters of their own, whatever the table's requires_grad says."""
    if info.param.requires_grad:
        return
    data_parallel = info.param_sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    instead = (
        "leave it out of the optimizer instead"
        if data_parallel
        else "it is stepped in the backward pass; place it data_parallel, and leave it out of the "
        "optimizer, to freeze it"
    )
    warnings.warn(
        f"requires_grad=False is ignored for the dense table {info.embedding_config.name!r}: "
        f"{instead}",
        stacklevel=2,
    )
