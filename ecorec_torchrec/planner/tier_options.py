"""Sharding options of tiered tables: cache sizes, and what each needs and takes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping

import torch
import torchrec.optim as torchrec_optim
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from ecorec_torchrec.plan import TIERED_COMPUTE_KERNEL, why_rows_are_not_tiered
from ecorec_torchrec.tiers import TierSpec

from .constraints import EcoRecConstraints
from .estimators import lookups_per_rank, optimizer_of, state_bytes
from .profile import Profile
from .tiers import TierSpeeds, TierTraffic, in_flight_rows, unique_rows

_CACHE_STEP = 4  # a cache size is so many times the next smaller one
_MARK_BYTES = 4  # of a record, whether it was ever written
# Of a slot beside its row: id, score, pins, a flag; and its part of the map from ids to slots.
_DIRECTORY_BYTES = 8 + 8 + 4 + 1
_MAP_BYTES = 8 * (8 + 4)
_OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torchrec_optim.SGD,
    torchrec_optim.Adagrad,
    torchrec_optim.RowWiseAdagrad,
    torchrec_optim.Adam,
)


class TieredShardingOption(ShardingOption):
    """A TorchRec `ShardingOption` of a table whose rows lie in memories of several levels.

    `storage` is what each level holds, storage in `ssd`; `perf.prefetch_compute` the time to fetch
    the rows of a batch.

    Attributes:
        tiers: of every shard.
        level: which of the table's forms it is, 0 the one with most in slots.
        record_bytes: of a row with its optimizer state.
        traffic: of a shard.
    """

    tiers: TierSpec
    level: int
    record_bytes: int
    traffic: TierTraffic

    def in_slots(self) -> ShardingOption:
        """The dense table that the lookup kernel sees, of S rows per shard."""
        rows, columns = self.tiers.cache_rows, self.shards[0].size[1]
        option = copy.copy(self)
        option.__class__ = ShardingOption
        option.compute_kernel = EmbeddingComputeKernel.FUSED.value
        cuts = self.tensor.shape[0] // max(1, self.shards[0].size[0])
        option._tensor = torch.empty(
            rows * max(1, cuts), columns, dtype=self.tensor.dtype, device="meta"
        )
        for name in ("_optimizer_classes", "_optimizer_kwargs"):
            if hasattr(self.tensor, name):
                setattr(option._tensor, name, getattr(self.tensor, name))
        option.shards = [Shard([rows, columns], [0, 0]) for _ in self.shards]
        return option

    @property
    def fetch_is_hidden(self) -> bool:
        """Whether rows are fetched while earlier batches are trained on."""
        return self.tiers.prefetch_batches > 0

    def storage_hash(self) -> int:
        """As TorchRec's, which tells the options of a stored plan apart, and the memories."""
        text = f"{super().storage_hash()}|{self.tiers}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.tiers))


def option_tiers(option: ShardingOption) -> TierSpec | None:
    """The memories of an option, None for one that is not tiered."""
    return option.tiers if isinstance(option, TieredShardingOption) else None


class TierMenu:
    """The tiered options of tables, and their estimates.

    A table gets cache sizes from the rows that batches in flight pin, each four times the last, up
    to half of the table; on a GPU each with all other rows in host memory, the smallest also with
    an eighth of them there and with none. Fewer slots or less memory is a form of its own.

    Args:
        topology: the ranks.
        constraints: lookups per sample, and which tables may be tiered.
        profile: how often ids repeat, and what caches do; ids of other tables count as uniform.
        speeds: of a rank; without them as far as the topology tells.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        profile: Profile | None = None,
        speeds: TierSpeeds | None = None,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._profiles = {} if profile is None else profile.tables
        self._speeds = speeds or TierSpeeds.of_topology(topology)

    def options(
        self,
        stock: ShardingOption,
        sharder: ModuleSharder[torch.nn.Module],
        constraint: EcoRecConstraints,
    ) -> Iterator[TieredShardingOption]:
        """One per cache size of one of TorchRec's options."""
        assert constraint.tier_folder is not None
        num_rows = stock.shards[0].size[0]
        lookups = lookups_per_rank(stock, self._constraints, self._topology)
        profile = self._profiles.get(stock.name)
        shares = max(1, round(stock.tensor.shape[0] / num_rows))
        unique = unique_rows(stock.tensor.shape[0], lookups, profile) / shares
        record_bytes = self._record_bytes(stock, sharder)
        pinned = in_flight_rows(unique, constraint.prefetch_batches)
        sizes = self._sizes(num_rows, pinned, always=constraint.tiers == "always")
        for level, (cache_rows, memory_rows) in enumerate(sizes):
            option = TieredShardingOption.__new__(TieredShardingOption)
            option.__dict__.update(stock.__dict__)
            option.shards = [Shard(list(shard.size), list(shard.offset)) for shard in stock.shards]
            option.compute_kernel = TIERED_COMPUTE_KERNEL
            option.level, option.record_bytes = level, record_bytes
            option.tiers = TierSpec(
                cache_rows,
                constraint.tier_folder,
                memory_rows=memory_rows,
                prefetch_batches=constraint.prefetch_batches,
                direct_reads=constraint.direct_reads,
            )
            option.traffic = TierTraffic.of(
                stock.tensor.shape[0], lookups, cache_rows, memory_rows, record_bytes, profile,
                shares,
            )  # fmt: skip
            yield option

    def estimate(self, option: TieredShardingOption, in_slots: ShardingOption) -> None:
        """Time and memory, from those of the lookup in the slots."""
        option.is_weighted = in_slots.is_weighted
        tiers, fetch_ms = option.tiers, option.traffic.fetch_ms(self._speeds)
        host_bytes = _directory_bytes(tiers.cache_rows)
        host_bytes += 2 * int(option.traffic.unique_rows) * option.record_bytes  # on their way
        if tiers.memory_rows:
            host_bytes += tiers.memory_rows * option.record_bytes
            host_bytes += _directory_bytes(tiers.memory_rows)
        for shard, slots in zip(option.shards, in_slots.shards, strict=True):
            shard.perf = copy.copy(slots.perf)
            shard.perf.prefetch_compute = fetch_ms
            file_bytes = shard.size[0] * option.record_bytes
            shard.storage = slots.storage + Storage(hbm=0, ddr=host_bytes, ssd=file_bytes)

    def _sizes(self, num_rows: int, pinned: int, *, always: bool) -> list[tuple[int, int]]:
        """(slots, rows of the second level) of every form, the one with most in slots first."""
        if pinned > num_rows // 2:
            return [(num_rows, 0)] if always else []
        slots = [pinned]
        while slots[-1] * _CACHE_STEP <= num_rows // 2:
            slots.append(slots[-1] * _CACHE_STEP)
        if self._topology.compute_device == "cpu":  # slots are as good as any other memory
            return [(size, 0) for size in reversed(slots)]
        in_memory = [(size, num_rows - size) for size in reversed(slots)]
        return [*in_memory, (pinned, num_rows // 8), (pinned, 0)]

    def _record_bytes(self, option: ShardingOption, sharder: ModuleSharder[torch.nn.Module]) -> int:
        columns = option.tensor.shape[1]
        optimizer = optimizer_of(option.name, option.tensor, _fused_params(sharder))
        weight = columns * option.tensor.element_size()
        return weight + state_bytes((1, columns), optimizer) + _MARK_BYTES


def why_not_tiered(
    table: str, weight: torch.Tensor, sharder: ModuleSharder[torch.nn.Module]
) -> str | None:
    """Why a table cannot be tiered; None if it can."""
    if not getattr(sharder, "shards_tt_tables", False):
        return f"{type(sharder).__name__} shards no tiered tables"
    if reason := why_rows_are_not_tiered(weight.dtype, weight.shape[1]):
        return reason
    optimizer = optimizer_of(table, weight, _fused_params(sharder))
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        return f"{optimizer.__name__} is none of the optimizers that train a tiered table exactly"
    return None


def _fused_params(sharder: ModuleSharder[torch.nn.Module]) -> Mapping[str, object]:
    return getattr(sharder, "fused_params", None) or {}


def _directory_bytes(num_slots: int) -> int:
    return num_slots * _DIRECTORY_BYTES + (1 << max(1, (num_slots // 3).bit_length())) * _MAP_BYTES
