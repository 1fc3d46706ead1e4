"""Sharding options that know their TT shape, and options of a search over many ranks."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Storage, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType

from ecorec_torchrec.plan import TT_COMPUTE_KERNEL
from ecorec_torchrec.tt import TTSpec


class TTShardingOption(ShardingOption):
    """A TorchRec `ShardingOption` of a table stored as TT cores of the shape `tt`.

    Its shards are those of the dense table, as TorchRec's plans want them; `storage` and `perf` are
    the cores'.
    """

    tt: TTSpec
    dtype: torch.dtype

    @classmethod
    def of(cls, template: ShardingOption, tt: TTSpec, dtype: torch.dtype) -> TTShardingOption:
        """A copy of a `customized_kernel` option, with shape and type of the cores."""
        assert template.compute_kernel == TT_COMPUTE_KERNEL
        option = cls.__new__(cls)
        option.__dict__.update(template.__dict__)
        option.shards = [Shard(list(shard.size), list(shard.offset)) for shard in template.shards]
        option.tt, option.dtype = tt, dtype
        return option

    def dense_stand_in(self) -> ShardingOption:
        """A dense table of the same columns and of about as many bytes as the cores.

        What TorchRec's estimators say of its inputs, outputs and collectives holds for the TT
        table: the same ids and pooled rows travel, and data-parallel ranks reduce as many bytes.
        """
        rows = -(-self.tt.num_parameters // self.tt.embedding_dim)
        option = copy.copy(self)
        option.__class__ = ShardingOption
        option._tensor = torch.empty(rows, self.tt.embedding_dim, dtype=self.dtype, device="meta")
        option.output_dtype = self.output_dtype or DataType.FP32  # whatever the cores are stored in
        option.compute_kernel = (
            EmbeddingComputeKernel.DENSE.value
            if self.sharding_type == ShardingType.DATA_PARALLEL.value
            else EmbeddingComputeKernel.FUSED.value
        )
        option.shards = [Shard([rows, self.tt.embedding_dim], [0, 0])]  # all ranks have equal ones
        return option

    def storage_hash(self) -> int:
        """As TorchRec's, which tells the options of a stored plan apart, and the shape."""
        text = f"{super().storage_hash()}|{self.tt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.tt))


def tt_of(option: ShardingOption) -> TTSpec | None:
    """The TT shape of an option, None for a dense one."""
    return option.tt if isinstance(option, TTShardingOption) else None


@dataclass(frozen=True, eq=False)
class Candidate:
    """An option of the search space, with every run of equal shards held once.

    Data-parallel and row-wise options have a shard per rank, of which all but a few are equal; on a
    thousand ranks a model's options would have millions.

    Args:
        option: with the first shard of every run.
        counts: shards per run, in the order of the shards.
        block: columns per shard, where that is another number than TorchRec would take.
    """

    option: ShardingOption
    counts: tuple[int, ...]
    block: int | None = None

    @property
    def tt(self) -> TTSpec | None:
        return tt_of(self.option)

    @property
    def perfs(self) -> list[Perf]:
        """Predicted time of every run's shards."""
        return [shard.perf for shard in self.option.shards]

    @property
    def ms(self) -> list[float]:
        """Predicted time of every run's shards, without what is done while others are trained."""
        pairs = zip(self.perfs, self.hidden_ms, strict=True)
        return [perf.total - hidden for perf, hidden in pairs]

    @property
    def hidden_ms(self) -> list[float]:
        """Time to fetch rows of tiered tables ahead of the step that needs them."""
        hidden = getattr(self.option, "fetch_is_hidden", False)
        return [perf.prefetch_compute if hidden else 0.0 for perf in self.perfs]

    @property
    def tier_level(self) -> int | None:
        """Which of its table's tiered forms it is, None for another form."""
        return getattr(self.option, "level", None)

    @property
    def storages(self) -> list[Storage]:
        """Predicted memory of every run's shards."""
        return [shard.storage for shard in self.option.shards]


def main_memory_bytes(storage: Storage, topology: Topology) -> int:
    """Bytes of the memory that caps the ranks: host memory on CPU, HBM elsewhere."""
    return storage.ddr if topology.compute_device == "cpu" else storage.hbm
