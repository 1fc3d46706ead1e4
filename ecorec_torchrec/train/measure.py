"""What tables really take: bytes of weights and optimizer state, counted from their tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingType
from torchrec.optim.keyed import CombinedOptimizer

from ecorec_torchrec.sharding import tiered_rows
from ecorec_torchrec.train.saved_tables import table_of


def embedding_bytes(
    model: DistributedModelParallel, optimizer: CombinedOptimizer
) -> dict[str, int]:
    """Bytes of every table over all ranks, optimizer state included; replicas count once.

    Of a tiered table what is in memory counts: its slots and its second level.

    All ranks must call it together.
    """
    replicated = {
        table
        for module_plan in model.plan.plan.values()
        for table, entry in module_plan.items()
        if entry.sharding_type == ShardingType.DATA_PARALLEL.value
    }
    counts: Counter[str] = Counter()
    for state in (model.state_dict(), optimizer.state_dict()["state"]):
        for name, tensor in _tensors(state):
            table = table_of(name)
            if table is not None and (table not in replicated or _rank() == 0):
                counts[table] += _local_bytes(tensor)
    for rows in tiered_rows(model):
        counts.update(rows.memory_bytes())
    if not dist.is_initialized():
        return dict(counts)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    return dict(sum(gathered, Counter()))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{name}.")
        elif isinstance(value, torch.Tensor | ShardedTensor):
            yield name, value


def _local_bytes(tensor: torch.Tensor | ShardedTensor) -> int:
    if isinstance(tensor, ShardedTensor):
        return sum(shard.tensor.nbytes for shard in tensor.local_shards())
    return tensor.nbytes
