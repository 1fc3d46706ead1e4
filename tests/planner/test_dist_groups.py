"""Dist groups that follow from predicted times: none where links are fast, more where they pay."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import Perf

from ecorec_torchrec.plan import load_plan, save_plan
from ecorec_torchrec.planner import (
    Calibration,
    EcoRecConstraints,
    EcoRecPlanner,
    choose_dist_groups,
)
from ecorec_torchrec.planner.dist_groups import best_count, group_ms

GB_PER_S = 1e9 / 1e3  # bytes per millisecond, as Topology counts


def table(
    name: str, lookup_ms: float, transfer_ms: float, rank: int = 0, sharding: str = "table_wise"
) -> SimpleNamespace:
    """An option with as much time forward as backward."""
    perf = Perf(lookup_ms / 2, transfer_ms / 2, lookup_ms / 2, transfer_ms / 2)
    shard = SimpleNamespace(rank=rank, perf=perf)
    return SimpleNamespace(path="ebc", name=name, sharding_type=sharding, shards=[shard])


def chosen(tables: list[SimpleNamespace], cost_ms: float) -> dict[str, int]:
    return {name: group for (_, name), group in choose_dist_groups(tables, cost_ms).items()}


@pytest.mark.parametrize(
    ("hideable_ms", "most", "count"), [(0, 8, 1), (0.9, 8, 1), (16, 8, 4), (16, 3, 3), (1000, 8, 8)]
)
def test_the_count_is_about_the_square_root(hideable_ms: float, most: int, count: int) -> None:
    assert best_count(hideable_ms, 1.0, most) == count
    assert 1 <= count <= max(1, round(math.sqrt(hideable_ms)))


def test_groups_of_a_rank_take_equal_time() -> None:
    tables = [table(f"t{i}", 4.0, 4.0) for i in range(4)]
    assert chosen(tables, 1.0) == {"t0": 0, "t1": 1, "t2": 2, "t3": 3}
    assert set(chosen(tables, 100.0).values()) == {0}
    # One table as long as three others.
    uneven = [table("long", 12.0, 12.0), *(table(f"t{i}", 4.0, 4.0) for i in range(3))]
    assert chosen(uneven, 8.0) == {"long": 0, "t0": 1, "t1": 1, "t2": 1}


def test_every_rank_has_its_share_in_every_group() -> None:
    tables = [table(f"t{i}", 8.0, 8.0, rank=i % 2) for i in range(8)]
    found = chosen(tables, 1.0)
    places = Counter((i % 2, found[f"t{i}"]) for i in range(8))
    assert places == {(rank, group): 1 for rank in range(2) for group in range(4)}


def test_other_shardings_are_cut_by_themselves() -> None:
    tables = [table(f"t{i}", 8.0, 8.0) for i in range(4)]
    rows = [table(f"r{i}", 8.0, 0.0, sharding="row_wise") for i in range(4)]
    copies = [table("c", 8.0, 0.0, sharding="data_parallel")]
    found = chosen(tables + rows + copies, 1.0)
    assert {found[f"t{i}"] for i in range(4)} == {0, 1, 2, 3}
    assert {found[f"r{i}"] for i in range(4)} == {0}
    assert "c" not in found


def test_the_order_takes_least_time_of_all() -> None:
    """Against every order of tables that are unlike: lookups in turn, then transfers in turn."""
    times = {"a": (5.0, 2.0), "b": (1.0, 6.0), "c": (9.0, 7.0), "d": (3.0, 8.0), "e": (4.0, 1.0)}

    def makespan(order: tuple[str, ...]) -> float:
        looked_up = sent = 0.0
        for name in order:
            looked_up += times[name][0]
            sent = max(sent, looked_up) + times[name][1]
        return sent

    groups = chosen([table(name, *ms) for name, ms in times.items()], 1e-6)
    assert sorted(groups.values()) == [0, 1, 2, 3, 4] or len(set(groups.values())) >= 3
    found = tuple(sorted(times, key=lambda name: groups[name]))
    assert makespan(found) == min(map(makespan, itertools.permutations(times)))


def test_a_group_costs_what_was_measured() -> None:
    measured = Calibration(
        {
            "tt_forward": {"calls": 200_000},
            "tt_backward": {"calls": 300_000},
            "all_to_all": {"calls": 50_000, "bytes": 1.0},
        }
    )
    assert group_ms("cuda", measured) == pytest.approx(0.2 + 0.3 + 4 * 0.05)
    assert group_ms("cpu", Calibration({})) == group_ms("cpu") == 1.0


def plan_over(
    gb_per_s: float, model: Callable[..., nn.Module], sharders: list, **constraints: object
) -> tuple:
    topology = Topology(
        world_size=2,
        local_world_size=2,
        compute_device="cpu",
        intra_host_bw=gb_per_s * GB_PER_S,
        inter_host_bw=gb_per_s * GB_PER_S,
    )
    sizes = {f"t{i}": 1_000_000 for i in range(16)}
    rules = {
        name: EcoRecConstraints(
            tt="always",
            tt_ranks=(64,),
            sharding_types=["table_wise"],
            dist_group=constraints.get(name),
        )
        for name in sizes
    }
    planner = EcoRecPlanner(
        topology, batch_size=8192, constraints=rules, debug=False, auto_dist_groups=True
    )
    unsharded = model(**sizes)
    return planner.plan(unsharded, sharders), unsharded


def groups_of(plan: object) -> dict[str, int]:
    return {name: entry.dist_group for name, entry in plan.plan["ebc"].items()}


def test_slow_links_make_groups_and_fast_ones_none(
    model: Callable[..., nn.Module], sharders: list, tmp_path: Path
) -> None:
    """What was chosen is in the plan file, one group too."""
    fast, _ = plan_over(600.0, model, sharders)
    assert set(groups_of(fast).values()) == {0}
    slow, unsharded = plan_over(0.1, model, sharders)
    count = len(set(groups_of(slow).values()))
    assert count > 1
    for rank in range(2):  # every group has tables on both ranks
        assert {
            entry.dist_group for entry in slow.plan["ebc"].values() if entry.ranks == [rank]
        } == set(range(count))
    save_plan(slow, tmp_path / "plan.yaml")
    assert groups_of(load_plan(tmp_path / "plan.yaml", unsharded, 2)) == groups_of(slow)


def test_a_constraint_goes_before(model: Callable[..., nn.Module], sharders: list) -> None:
    plan, _ = plan_over(600.0, model, sharders, t3=5)
    assert groups_of(plan) == {f"t{i}": 5 if i == 3 else 0 for i in range(16)}
