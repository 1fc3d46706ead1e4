"""The types in which looked-up embeddings travel: one per all-to-all, known to every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from torchrec.distributed.types import ShardingType

_TT_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL


def output_type(fused_params: Mapping[str, Any] | None) -> torch.dtype:
    """The type that a dense or TT table's embeddings have."""
    found = (fused_params or {}).get("output_dtype", torch.float32)
    return found if isinstance(found, torch.dtype) else found.as_dtype()


def check_output_types(
    infos_by_type: Mapping[str, Iterable[EmbeddingShardingInfo]], tables: Set[str]
) -> None:
    """Raises ValueError if a TT table would share an all-to-all with outputs of another type.

    Ranks would then wait for unlike numbers of bytes.
    """
    for sharding_type, infos in infos_by_type.items():
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            continue
        types = {info.embedding_config.name: output_type(info.fused_params) for info in infos}
        if len(set(types.values())) > 1 and not tables.isdisjoint(types):
            raise ValueError(
                f"tables that are sharded {sharding_type} need one output_dtype, since their "
                f"outputs travel together, got {types}"
            )


def settle_output_type(
    sharding: EmbeddingSharding, lookup: nn.Module, device: torch.device | None
) -> None:
    """Gives a rank without tables of this sharding the type that its outputs have elsewhere.

    TorchRec's empty outputs are float32 on such ranks, which then wait for twice the bytes.

    Raises:
        ValueError: FBGEMM cannot give a dense table's rows in that type.
    """
    data_parallel = isinstance(sharding, BaseDpEmbeddingSharding)
    knows_tables = type(sharding).embedding_tables is not EmbeddingSharding.embedding_tables
    if data_parallel or not knows_tables:  # table-row-wise and grid shardings do not tell
        return
    tables = sharding.embedding_tables()
    dtype = output_type(tables[0].fused_params)
    dense = [t.name for t in tables if t.compute_kernel is not _TT_KERNEL]
    if dense and dtype is torch.bfloat16 and _type_of(device) == "cpu":
        raise ValueError(
            f"dense tables {dense}: output_dtype BF16 is not supported on the CPU, where FBGEMM "
            "gives FP32 and FP16; TT tables with BF16 need a collection of their own"
        )
    lookup._dummy_embs_tensor = lookup._dummy_embs_tensor.to(dtype)


def check_codecs(sharding: EmbeddingSharding, device: torch.device | None) -> None:
    """Raises ValueError unless quantised communication works for a table-wise sharding's outputs.

    FBGEMM has a kernel for some pairs of types only; which, a few numbers there and back tell.
    """
    tables = sharding.embedding_tables()
    if _type_of(device) == "meta":
        return
    dtype = output_type(tables[0].fused_params)
    for operation, codecs in (sharding.qcomm_codecs_registry or {}).items():
        if not operation.endswith("ALL_TO_ALL"):
            continue
        for direction, codec in (("forward", codecs.forward), ("backward", codecs.backward)):
            error = _why_not(codec, dtype, device)
            if error is not None:
                raise ValueError(
                    f"tables {[table.name for table in tables]}: {direction} communication of "
                    f"{dtype} on {_type_of(device)} cannot be quantised by {_name(codec)} "
                    f"({error}); what works is {', '.join(_working(dtype, device))}"
                )


def _working(dtype: torch.dtype, device: torch.device | None) -> list[str]:
    codecs = {p.name: get_qcomm_codecs(QCommsConfig(p)).forward for p in CommType}
    return [name for name, codec in codecs.items() if _why_not(codec, dtype, device) is None]


def _type_of(device: torch.device | None) -> str:
    return "cpu" if device is None else device.type


def _why_not(codec: Any, dtype: torch.dtype, device: torch.device | None) -> str | None:
    numbers = torch.zeros(1024, dtype=dtype, device=device)
    context = codec.create_context()
    try:
        codec.decode(codec.encode(numbers, context), context)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _name(codec: Any) -> str:
    precision = getattr(codec, "_comm_precision", None)
    return type(codec).__name__ if precision is None else precision.name
