"""How many dist groups, and which table in which: from predicted times of lookups and links.

The lookups and the transfers of a collection are a flow shop of two machines: a group is looked up,
then its output travels while the next group is looked up (backward: first the gradients, then the
lookup, in the reverse order). Cut into G groups of equal work, either pass takes

    max(lookup, transfer) + min(lookup, transfer) / G

since all but the first G-th of the shorter one is hidden behind the longer one. Every group costs a
fixed time on top, for its own calls and collectives, so the best number minimises

    hideable / G + G * group,    hideable = min(lookup, transfer) forward + the same backward,

which is about sqrt(hideable / group): one group where links are fast, more where more is to hide.

Within a rank, the tables come in the order of Johnson's rule (Naval Research Logistics Quarterly 1,
1954), which makes the total least: first those that take longer to send than to look up, the
quickest lookup first, so that sending starts early; then the others, the longest transfer first, so
that little is left to send at the end. EcoRec's order, cheap tables first, is its first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torchrec.distributed.planner.types import Perf, ShardingOption
from torchrec.distributed.types import ShardingType

from .calibration import Calibration

# Of one more group per step, forward and backward. CPU: measured with `ecorec bench pipeline` (see
# docs/benchmarks/pipeline.md). Others: not measured; some dozens of launches and four collectives.
GROUP_MS = {"cpu": 1.0}
OTHER_GROUP_MS = 0.3
_COLLECTIVES_PER_GROUP = 4  # lengths and ids, output, gradient


def group_ms(device_type: str, calibration: Calibration | None = None) -> float:
    """What one more dist group costs per step, as calibrated or else by device.

    Example::

        group_ms("cpu")  # 1.0
    """
    calls = ("tt_forward", "tt_backward", "all_to_all")
    if calibration is None or not all(operation in calibration for operation in calls):
        return GROUP_MS.get(device_type, OTHER_GROUP_MS)
    forward, backward, collective = (calibration.time_ms(name, calls=1) for name in calls)
    return forward + backward + _COLLECTIVES_PER_GROUP * collective


def choose_dist_groups(
    options: Sequence[ShardingOption], group_ms: float
) -> dict[tuple[str, str], int]:
    """The dist group of every table that travels, by module and name.

    Every sharding type of a module is cut by itself, as its groups have collectives of their own.

    Args:
        options: of a plan: with their shards' ranks and predicted times.
        group_ms: see the function of that name.

    Example, 4 equal tables on one rank, whose lookups and transfers take 2 ms each both ways::

        choose_dist_groups(options, group_ms=1.0)
        # 4 groups: 16 / G + G is least there. A table in each.
    """
    travelling = [o for o in options if o.sharding_type != ShardingType.DATA_PARALLEL.value]
    groups = {}
    for _, slice_of in groupby(sorted(travelling, key=_slice), key=_slice):
        members = list(slice_of)
        of_owner: dict[int, list[ShardingOption]] = {}
        for option in members:
            of_owner.setdefault(option.shards[0].rank or 0, []).append(option)
        most_tables = max(len(tables) for tables in of_owner.values())
        count = best_count(_hideable_ms(members), group_ms, most_tables)
        for tables in of_owner.values():
            groups.update(_cut(sorted(tables, key=_by_johnsons_rule), count))
    return groups


def best_count(hideable_ms: float, group_ms: float, most: int) -> int:
    """The number of groups, up to `most`, that takes least time.

    Example::

        best_count(16.0, 1.0, most=8)  # 4
    """
    return min(range(1, most + 1), key=lambda count: hideable_ms / count + count * group_ms)


def _slice(option: ShardingOption) -> tuple[str, str]:
    return option.path, option.sharding_type


def _hideable_ms(options: Sequence[ShardingOption]) -> float:
    """On the rank with most to hide."""
    of_rank: dict[int, Perf] = {}
    for option in options:
        for shard in option.shards:
            rank = shard.rank or 0
            of_rank[rank] = of_rank[rank] + shard.perf if rank in of_rank else shard.perf
    return max(
        min(perf.fwd_compute, perf.fwd_comms) + min(perf.bwd_compute, perf.bwd_comms)
        for perf in of_rank.values()
    )


def _lookup_and_transfer_ms(option: ShardingOption) -> tuple[float, float]:
    perf = option.shards[0].perf
    return perf.fwd_compute + perf.bwd_compute, perf.fwd_comms + perf.bwd_comms


def _by_johnsons_rule(option: ShardingOption) -> tuple[bool, float, str]:
    lookup_ms, transfer_ms = _lookup_and_transfer_ms(option)
    if lookup_ms < transfer_ms:
        return False, lookup_ms, option.name
    return True, -transfer_ms, option.name


def _cut(tables: Sequence[ShardingOption], count: int) -> dict[tuple[str, str], int]:
    """Cuts a rank's tables into groups of equal time."""
    times = [sum(_lookup_and_transfer_ms(table)) for table in tables]
    total, before, groups = sum(times) or 1.0, 0.0, {}
    for table, time_ms in zip(tables, times, strict=True):
        middle = (before + time_ms / 2) / total
        groups[table.path, table.name] = min(int(middle * count), count - 1)
        before += time_ms
    return groups
