"""Tiered tables: what they cost, when the planner takes them, and that the plan trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.plan import TieredParameterSharding, load_plan, save_plan
from ecorec_torchrec.planner import (
    DistinctCurve,
    EcoRecConstraints,
    EcoRecPlanner,
    Profile,
    ReuseCurve,
    TableProfile,
    TierSpeeds,
    TierTraffic,
    predicted_tiered_step,
)
from ecorec_torchrec.sharding import get_ecorec_sharders, tier_statistics
from ecorec_torchrec.testing import RankPool, tiered, toy
from ecorec_torchrec.testing.tiered import Case

CPU = torch.device("cpu")
MIB = 2**20
ROWS, DIM, BATCH = 1_000_000, 64, 256
RECORD = DIM * 4 + 4  # SGD keeps no state; a mark of 4 bytes
SPEEDS = TierSpeeds(
    read_gb_per_s=2.0,
    write_gb_per_s=1.0,
    read_iops=1e6,
    write_iops=1e5,
    memory_gb_per_s=10.0,
    lookup_ns=10,
    row_ns=100,
    moved_row_ns=1000,
)
FREE = replace(SPEEDS, lookup_ns=0, row_ns=0, moved_row_ns=0, read_gb_per_s=1e6, write_gb_per_s=1e6,
               read_iops=1e12, write_iops=1e12, memory_gb_per_s=1e6)  # fmt: skip


def profile(name: str, rows: int, miss_ratio: float, unique: float = 400.0) -> TableProfile:
    """Batches of 512 samples ask for `unique` rows; any cache misses `miss_ratio` of them."""
    blocks = range((rows - 1).bit_length() + 1)
    counts = tuple(min(unique, math.ceil(rows / 2**k)) for k in blocks)
    return TableProfile(
        name,
        rows,
        (f"f_{name}",),
        (1.0,),
        by_id=DistinctCurve((512,), (counts,)),
        reuse=ReuseCurve(512, (rows // 100, rows), (miss_ratio, miss_ratio), 0.0),
    )


# What a step moves, and what that takes


def test_rows_that_miss_are_those_of_the_reuse_curve() -> None:
    table = profile("users", ROWS, miss_ratio=0.25)
    traffic = TierTraffic.of(ROWS, 512, 50_000, 0, RECORD, table)
    assert traffic.unique_rows == pytest.approx(400)
    assert traffic.fetched_rows == traffic.read_rows == traffic.written_rows
    assert traffic.fetched_rows == pytest.approx(100)
    assert traffic.hit_rate == pytest.approx(0.75)
    # Twice the batch: twice the misses, although distinct rows grow more slowly.
    twice = TierTraffic.of(ROWS, 1024, 50_000, 0, RECORD, table)
    assert twice.fetched_rows == pytest.approx(200)


def test_without_a_profile_ids_are_uniform() -> None:
    traffic = TierTraffic.of(1000, 100_000, 250, 500, RECORD)
    assert traffic.unique_rows == pytest.approx(1000)
    assert traffic.fetched_rows == pytest.approx(750)
    assert traffic.read_rows == pytest.approx(250)


def test_a_shard_has_its_share() -> None:
    whole = TierTraffic.of(1000, 5000, 200, 0, RECORD)
    shard = TierTraffic.of(1000, 5000, 100, 0, RECORD, shares=2)
    assert shard.unique_rows == whole.unique_rows / 2
    assert shard.fetched_rows == whole.fetched_rows / 2


def test_storage_moves_pages_and_reads_those_that_it_writes_in_part() -> None:
    traffic = TierTraffic(2000, 1000, 500, 300, 200, record_bytes=260)
    pages = 1 + 259 / 4096
    assert traffic.page_amplification == pytest.approx(pages * 4096 / 260)
    assert traffic.storage_bytes_written == pytest.approx(200 * pages * 4096)
    assert traffic.storage_bytes_read == pytest.approx(500 * pages * 4096)
    assert traffic.written_tb_per_day(10.0) == pytest.approx(200 * pages * 4096 * 8.64e6 / 1e12)


def test_the_slower_of_bandwidth_and_operations_counts() -> None:
    traffic = TierTraffic(2000, 1000, 500, 500, 500, record_bytes=4096 * 8)
    few_operations = replace(SPEEDS, read_iops=1e4)
    assert traffic.storage_ms(few_operations) > traffic.storage_ms(SPEEDS)
    read_pages = traffic.storage_bytes_read / 4096
    write_ms = traffic.storage_bytes_written / 4096 / SPEEDS.write_iops * 1e3
    assert traffic.storage_ms(few_operations) == pytest.approx(read_pages / 1e4 * 1e3 + write_ms)


def test_lookahead_hides_the_shorter_of_fetching_and_training() -> None:
    traffic = TierTraffic(32_768, 9000, 2000, 2000, 2000, record_bytes=264)
    fetch_ms = traffic.fetch_ms(SPEEDS)
    for in_memory_ms in (fetch_ms / 2, fetch_ms * 2):
        hidden = predicted_tiered_step(in_memory_ms, traffic, SPEEDS, prefetch_batches=1)
        waited = predicted_tiered_step(in_memory_ms, traffic, SPEEDS, prefetch_batches=0)
        assert hidden == pytest.approx(max(in_memory_ms, fetch_ms))
        assert waited == pytest.approx(in_memory_ms + fetch_ms)
    measured = predicted_tiered_step(1.0, traffic, SPEEDS, prefetch_batches=0, io_ms=7.0)
    assert measured == pytest.approx(8 + traffic.memory_ms(SPEEDS) + traffic.managing_ms(SPEEDS))


# Which form the planner takes


Build = Callable[..., nn.Module]


def kinds(planner: EcoRecPlanner, model: nn.Module, sharders: list) -> dict[str, str]:
    planner.plan(model, sharders)
    assert planner.report is not None
    return {table.name: table.kernel for table in planner.report.tables}


def planner_of(
    topology: Topology,
    constraints: dict[str, EcoRecConstraints],
    speeds: TierSpeeds = FREE,
    profiles: tuple[TableProfile, ...] = (),
) -> EcoRecPlanner:
    return EcoRecPlanner(
        topology,
        BATCH,
        constraints=constraints,
        profile=Profile({p.name: p for p in profiles}, 1) if profiles else None,
        tier_speeds=speeds,
        debug=False,
    )


def test_tables_that_fit_stay_dense(model: Build, topology, sharders) -> None:
    tiered = EcoRecConstraints(tier_folder="/x")
    assert kinds(planner_of(topology(1000), {"users": tiered}), model(users=ROWS), sharders) == {
        "users": "fused"
    }


def test_a_table_that_does_not_fit_is_tiered_before_it_is_compressed(
    model: Build, topology, sharders
) -> None:
    both = EcoRecConstraints(tier_folder="/x", tt_ranks=(8,))
    planner = planner_of(topology(100), {"users": both})
    assert kinds(planner, model(users=ROWS), sharders) == {"users": "tiered"}


def test_tiers_that_are_too_slow_leave_it_to_tt(model: Build, topology, sharders) -> None:
    both = EcoRecConstraints(tier_folder="/x", tt_ranks=(8,))
    slow = replace(SPEEDS, read_iops=1.0)
    assert kinds(planner_of(topology(100), {"users": both}, slow), model(users=ROWS), sharders) == {
        "users": "tt"
    }
    only_tiered = EcoRecConstraints(tier_folder="/x")
    planner = planner_of(topology(100), {"users": only_tiered}, slow)
    assert kinds(planner, model(users=ROWS), sharders) == {"users": "tiered"}
    assert planner.report is not None and planner.report.bottleneck == "fetching rows"


def test_the_table_of_least_demand_per_byte_leaves_memory_first(
    model: Build, topology, sharders
) -> None:
    """Equal tables, of which one misses its cache ten times as often: it stays in memory."""
    allowed = EcoRecConstraints(tier_folder="/x", sharding_types=["table_wise"])
    for often, rarely in (("users", "items_"), ("items_", "users")):
        planner = planner_of(
            topology(320),
            {often: allowed, rarely: allowed},
            SPEEDS,
            (profile(often, ROWS, 0.5), profile(rarely, ROWS, 0.05)),
        )
        rows = {"users": ROWS, "items_": ROWS}
        found = kinds(planner, model(**rows), sharders)
        assert found == {often: "fused", rarely: "fused"}  # one on each rank
        planner = planner_of(
            topology(320, world_size=1),
            {often: allowed, rarely: allowed},
            SPEEDS,
            (profile(often, ROWS, 0.5), profile(rarely, ROWS, 0.05)),
        )
        found = kinds(planner, model(**rows), sharders)
        assert found == {often: "fused", rarely: "tiered"}


def tiers_of_plan(planner: EcoRecPlanner, model: nn.Module, sharders: list):
    entry = planner.plan(model, sharders).plan["ebc"]["users"]
    assert isinstance(entry, TieredParameterSharding)
    return entry.tiers


@pytest.mark.parametrize("prefetch_batches", [0, 3])
def test_slots_hold_the_batches_in_flight(
    model: Build, topology, sharders, prefetch_batches: int
) -> None:
    allowed = EcoRecConstraints(
        tiers="always", tier_folder="/x", prefetch_batches=prefetch_batches, direct_reads=True
    )
    tiers = tiers_of_plan(planner_of(topology(2), {"users": allowed}), model(users=ROWS), sharders)
    in_flight = (prefetch_batches + 1) * 2 * BATCH
    assert in_flight <= tiers.cache_rows < 4 * 1.2 * in_flight
    assert (tiers.folder, tiers.prefetch_batches, tiers.direct_reads) == (
        "/x",
        prefetch_batches,
        True,
    )


def test_the_largest_cache_that_fits(model: Build, topology, sharders) -> None:
    allowed = {"users": EcoRecConstraints(tier_folder="/x")}
    small, large = (
        tiers_of_plan(planner_of(topology(cap), allowed), model(users=ROWS), sharders).cache_rows
        for cap in (20, 100)
    )
    assert small < large <= ROWS // 2
    report_bytes = large * DIM * 4
    assert report_bytes > 20 * MIB  # it would not have fitted into the small one


def test_gpus_keep_the_other_rows_in_host_memory_while_there_is_some(
    model: Build, topology, sharders
) -> None:
    allowed = {"users": EcoRecConstraints(tier_folder="/x", sharding_types=["table_wise"])}
    speeds = replace(SPEEDS, link_gb_per_s=20.0)
    plenty, scarce = (
        tiers_of_plan(
            planner_of(topology(100, "cuda", host_mib=host), allowed, speeds),
            model(users=ROWS),
            sharders,
        )
        for host in (1000, 60)
    )
    assert plenty.cache_rows + plenty.memory_rows == ROWS
    assert scarce.memory_rows < ROWS // 4


def test_storage_is_a_budget_of_the_host(model: Build, sharders) -> None:
    allowed = {"users": EcoRecConstraints(tier_folder="/x")}
    error = "ssd .*Raise the topology's ssd_cap to"
    for ssd_mib, fits in (
        (ROWS * RECORD / 2 / MIB + 1, True),
        (ROWS * RECORD / 2 / MIB - 1, False),
    ):
        cluster = Topology(
            world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=50 * MIB,
            ssd_cap=int(ssd_mib * MIB),
        )  # fmt: skip
        planner = planner_of(cluster, allowed)
        if fits:
            assert kinds(planner, model(users=ROWS), sharders) == {"users": "tiered"}
        else:
            with pytest.raises(PlannerError, match="(?s)" + error):
                planner.plan(model(users=ROWS), sharders)


def test_optimizers_that_tiers_cannot_train_exactly(model: Build, topology) -> None:
    lamb = get_ecorec_sharders({"optimizer": torch.optim.AdamW, "learning_rate": 0.1})
    always = EcoRecConstraints(tiers="always", tier_folder="/x")
    with pytest.raises(PlannerError, match="'users' .*AdamW is none of the optimizers"):
        planner_of(topology(100), {"users": always}).plan(model(users=ROWS), lamb)
    with pytest.warns(UserWarning, match="'users': tier_folder is ignored, AdamW"):
        auto = EcoRecConstraints(tier_folder="/x")
        planner_of(topology(4000), {"users": auto}).plan(model(users=ROWS), lamb)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"data_type": DataType.FP16}, "data_type float16 is not supported"),
        ({"embedding_dim": 6}, "embedding_dim=6 is not a multiple of 4"),
    ],
)
def test_tables_whose_rows_sharding_would_refuse(
    topology, sharders, table: dict[str, Any], reason: str
) -> None:
    values = {"num_embeddings": ROWS, "embedding_dim": 64, "feature_names": ["f"], "name": "users"}
    model = nn.Module()
    model.ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(**values | table)], device=torch.device("meta")
    )
    always = EcoRecConstraints(tiers="always", tier_folder="/x")
    with pytest.raises(PlannerError, match=f"'users' .*{reason}"):
        planner_of(topology(4000), {"users": always}).plan(model, sharders)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiers": "maybe"}, "tiers='maybe' is none of"),
        ({"tiers": "never", "tier_folder": "/x"}, "contradicts tier_folder='/x'"),
        ({"tiers": "always"}, "tiers='always' needs a tier_folder"),
        ({"tiers": "always", "tier_folder": "/x", "tt_ranks": (4,)}, "a table has one form"),
        ({"tt": "always", "tier_folder": "/x", "tt_ranks": (4,)}, "contradicts tier_folder='/x'"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1 must be an integer >= 0"),
    ],
)
def test_constraints_that_contradict_themselves(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EcoRecConstraints(**settings)


def test_the_report_tells_what_storage_has_to_do(model: Build, topology, sharders) -> None:
    allowed = {"users": EcoRecConstraints(tier_folder="/x")}
    planner = planner_of(topology(50), allowed, SPEEDS, (profile("users", ROWS, 0.25),))
    planner.plan(model(users=ROWS), sharders)
    report = planner.report
    assert report is not None and report.step_ms is not None
    (tier,) = report.tiers
    assert tier.traffic.fetched_rows == pytest.approx(100)
    assert tier.file_bytes == ROWS * RECORD
    per_day = tier.traffic.storage_bytes_written * 86_400e3 / report.step_ms / 1e12
    assert tier.written_tb_per_day(report.step_ms) == pytest.approx(per_day)
    assert "written TB/day" in report.text() and f"{ROWS * RECORD:,}" in report.text()
    slowest = max(report.ranks, key=lambda rank: rank.step_ms or 0)
    fetch_ms = slowest.parts_ms["fetching rows"]
    others = sum(slowest.parts_ms.values()) - fetch_ms
    assert report.step_ms == pytest.approx(max(fetch_ms, others))


# The plan trains


def train_planned(rank: int, folder: str, case: Case) -> tuple[dict[str, str], list[str], float]:
    """Kernels of the plan, what differs from the same tables held whole, and rows read back."""
    fused_params = {"optimizer": case.optimizer, "learning_rate": 0.1}
    sharders = get_ecorec_sharders(fused_params)
    constraints = {
        name: EcoRecConstraints(
            tiers="always",
            tier_folder=folder,
            prefetch_batches=0,
            pooling_factors=pooling,
            sharding_types=["table_wise"],  # as its twin is
        )
        for name, pooling in (("users", [1.5, 1.5]), ("ads", [1.5]))
    }
    cluster = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    planner = EcoRecPlanner(cluster, 12, constraints=constraints, debug=False)
    path = Path(folder) / f"plan-{rank}.yaml"
    save_plan(planner.plan(case.model(), sharders), path)
    assert planner.report is not None
    torch.manual_seed(5)
    model = case.model()
    plan = load_plan(path, model, world_size=2)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    optimizer = toy.optimizer_of(sharded, lambda params: torch.optim.SGD(params, lr=0.01))
    owners = tuple((table.name, table.ranks[0]) for table in planner.report.tables)
    twin, twin_optimizer = replace(case, owners=owners).shard()
    tiered.copy_start(sharded, twin)
    batches = [case.batch(step, rank) for step in range(30)]
    list(tiered.train(sharded, optimizer, batches))
    list(tiered.train(twin, twin_optimizer, batches))
    counts = tier_statistics(sharded).values()
    kernels = {table.name: table.kernel for table in planner.report.tables}
    return kernels, tiered.differences(sharded, twin), sum(c["file_rows"] for c in counts)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_with_tiers_trains_on_two_ranks(
    ranks: RankPool, tmp_path: Path, sequence: bool
) -> None:
    """It goes through a plan file; rows leave the slots and come back, and no bit differs."""
    results = ranks.run(train_planned, str(tmp_path), Case(sequence=sequence), world_size=2)
    for kernels, differences, _ in results:
        assert kernels == {"users": "tiered", "ads": "tiered"}
        assert differences == []
    assert sum(rows_read for *_, rows_read in results) > 0
