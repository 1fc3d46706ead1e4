"""Cores in the state dict: whole tensors with one owner, whatever the placement.

A table-wise core is on its owner only. In a state dict it is a ShardedTensor (or DTensor) of one
shard that every rank holds, so that `torch.distributed.checkpoint` can save it on N ranks and load
it on others, on one, and into the unsharded collection. Data-parallel cores are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.tensor import DTensor, Replicate
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from ecorec_torchrec.tt import TTSpec


@dataclass(frozen=True)
class CoreState:
    """How one core of one table stands in a state dict.

    Args:
        key: its name within the collection, `embedding_bags.<table>.tt_cores.<k>` or
            `embeddings.<table>.tt_cores.<k>`.
        is_local: whether this rank holds its values.
        whole: the ShardedTensor or DTensor that every rank saves; None for a data-parallel core.
    """

    key: str
    is_local: bool
    whole: ShardedTensor | DTensor | None


def core_states(
    table_key: str,
    spec: TTSpec,
    dtype: torch.dtype,
    cores: Sequence[Tensor] | None,
    entry: ParameterSharding,
    env: ShardingEnv,
) -> list[CoreState]:
    """The states of one table's K cores.

    Args:
        table_key: `embedding_bags.<table>` or `embeddings.<table>`.
        spec: the table's shape.
        dtype: of the cores.
        cores: this rank's; None where another rank owns the table.
        entry: where the plan places the table.
        env: the ranks.
    """
    states = []
    for k, shape in enumerate(spec.core_shapes):
        core = None if cores is None else cores[k].detach()
        if entry.sharding_type == ShardingType.DATA_PARALLEL.value:
            whole: ShardedTensor | DTensor | None = None
        elif env.output_dtensor:
            whole = _as_dtensor(core, shape, env)
        else:
            whole = _as_sharded_tensor(core, shape, dtype, entry, env)
        states.append(CoreState(f"{table_key}.tt_cores.{k}", core is not None, whole))
    return states


def _as_sharded_tensor(
    core: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    entry: ParameterSharding,
    env: ShardingEnv,
) -> ShardedTensor:
    shard = ShardMetadata(
        shard_offsets=[0] * len(shape),
        shard_sizes=list(shape),
        placement=entry.sharding_spec.shards[0].placement,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[] if core is None else [Shard(core, shard)],
        sharded_tensor_metadata=ShardedTensorMetadata(
            [shard], torch.Size(shape), TensorProperties(dtype=dtype)
        ),
        process_group=env.process_group,
    )


def _as_dtensor(core: Tensor | None, shape: tuple[int, ...], env: ShardingEnv) -> DTensor:
    local = LocalShardsWrapper(
        [] if core is None else [core], [] if core is None else [(0,) * len(shape)]
    )
    return DTensor.from_local(
        local,
        device_mesh=env.device_mesh,
        # "Replicate" as TorchRec says of its own table-wise tensors: the one shard is the whole.
        placements=[Replicate()] * env.device_mesh.ndim,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def add_whole_cores(states: Sequence[CoreState], destination: dict[str, Any], prefix: str) -> None:
    """After TorchRec has filled `destination`: owners' local cores give way to whole ones."""
    for state in states:
        if state.whole is not None:
            destination[prefix + state.key] = state.whole


def take_local_cores(states: Sequence[CoreState], state_dict: dict[str, Any], prefix: str) -> None:
    """Before a state dict is loaded: only what this rank holds stays, as plain tensors.

    Where another rank owns a table, empty tensors stay for the placeholders of its cores.

    Raises:
        ValueError: this rank holds a core of which the state dict has no value here.
    """
    for state in states:
        key = prefix + state.key
        if key not in state_dict:
            continue
        local = _local_value(key, state_dict[key]) if state.is_local else torch.empty(0)
        state_dict[key] = local


def _local_value(key: str, value: Any) -> Tensor:
    if isinstance(value, ShardedTensor):
        shards = [shard.tensor for shard in value.local_shards()]
    elif isinstance(value, DTensor):
        local = value.to_local()
        shards = local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]
    else:
        return value
    if len(shards) != 1:
        raise ValueError(
            f"{key}: this rank owns the core, but its value in the state dict lies on another "
            "rank: the state dict is of another placement, which torch.distributed.checkpoint "
            "can load"
        )
    return shards[0]
