"""Times from measured costs: per shard by hand-made costs, and of a whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder

from ecorec_torchrec.planner import (
    Calibration,
    DenseWork,
    EcoRecConstraints,
    EcoRecEnumerator,
    EcoRecPlanner,
)
from ecorec_torchrec.planner.costs import MeasuredCosts
from ecorec_torchrec.planner.dist_groups import group_ms
from ecorec_torchrec.planner.options import TTShardingOption
from ecorec_torchrec.planner.tt_work import expected_distinct, lookup_flops

ROWS, DIM, BATCH, WORLD = 100_000, 64, 128, 2
NS = 1e-6  # in ms
COSTS = {
    "copy": {"bytes": 1.0},
    "gemm": {"flops": 0.01},
    "all_to_all": {"calls": 1000.0, "bytes": 2.0},
    "all_reduce": {"calls": 1000.0, "bytes": 3.0},
    "dense_forward": {"calls": 500.0, "lookups": 10.0, "bag_bytes": 0.25},
    "dense_backward": {"calls": 500.0, "unique_rows": 20.0},
    "tt_forward": {"calls": 700.0, "flops": 0.1},
    "tt_backward": {"calls": 700.0, "flops": 0.1, "parameters": 5.0},
    "step": {"calls": 10_000.0, "bags": 1.0, "tt_groups": 3000.0},
}
CALIBRATION = Calibration(COSTS, step_bytes={"calls": 1e6, "bag_bytes": 4.0})


@pytest.fixture
def options(
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
) -> dict[tuple[bool, str], object]:
    """(is TT, sharding type) -> option of a table that may be TT, estimated from `COSTS`."""
    enumerator = EcoRecEnumerator(
        topology(1000), BATCH, {"users": EcoRecConstraints(tt_ranks=(16,))}, calibration=CALIBRATION
    )
    found = enumerator.enumerate(model(users=ROWS), sharders)
    return {(isinstance(o, TTShardingOption), o.sharding_type): o for o in found}


def test_a_dense_table_costs_its_lookups_rows_and_bags(options):
    perf = options[False, "table_wise"].shards[0].perf
    lookups = bags = BATCH * WORLD
    sent = bags * DIM * 4 / 2  # the other half is for its own samples
    assert perf.fwd_compute == pytest.approx((10 * lookups + 0.25 * bags * DIM * 4) * NS)
    assert perf.bwd_compute == pytest.approx(20 * expected_distinct(ROWS, lookups) * NS)
    assert perf.fwd_comms == perf.bwd_comms == pytest.approx(2 * sent * NS)
    assert perf.input_dist_comms == pytest.approx(2 * 8 * (lookups + bags) / 2 * NS)


def test_a_tt_table_costs_its_products_and_cores(options):
    option = options[True, "table_wise"]
    lookups = BATCH * WORLD
    unique = expected_distinct(ROWS, lookups)
    prefixes = expected_distinct(option.tt.row_factors[0] * option.tt.row_factors[1], lookups)
    forward, backward = lookup_flops(option.tt, unique, prefixes)
    perf = option.shards[0].perf
    assert perf.fwd_compute == pytest.approx(0.1 * forward * NS)
    cores = 5 * option.tt.num_parameters
    assert perf.bwd_compute == pytest.approx((0.1 * backward + cores) * NS)
    assert perf.fwd_comms == options[False, "table_wise"].shards[0].perf.fwd_comms


def test_a_data_parallel_table_reduces_and_updates_all_its_weights(options):
    perf = options[False, "data_parallel"].shards[0].perf
    weight = ROWS * DIM * 4
    assert perf.fwd_comms == perf.input_dist_comms == 0
    assert perf.bwd_comms == pytest.approx(3 * weight * NS)
    assert perf.bwd_compute > 5 * weight * NS
    assert options[True, "data_parallel"].shards[0].perf.bwd_comms < perf.bwd_comms / 20


def test_what_was_not_measured_stays_torchrecs(
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
):
    """A data sheet tells a rate of products, which replaces the guess for TT tables only."""
    allowed = {"users": EcoRecConstraints(tt_ranks=(64,))}

    def times(calibration: Calibration | None) -> dict[tuple[bool, str, str], float]:
        enumerator = EcoRecEnumerator(
            topology(1000, device="cuda"), 65_536, allowed, calibration=calibration
        )
        found = enumerator.enumerate(model(users=ROWS), sharders)
        return {
            (isinstance(o, TTShardingOption), o.sharding_type, o.compute_kernel): o.shards[
                0
            ].perf.fwd_compute
            for o in found
        }

    without, slow = times(None), times(Calibration.of_data_sheet(0.1, 1000))
    assert not MeasuredCosts.knows(Calibration.of_data_sheet(0.1, 1000), object())
    for key, time_ms in without.items():
        assert slow[key] > 2 * time_ms if key[0] else slow[key] == time_ms


@pytest.fixture
def planner(
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
) -> EcoRecPlanner:
    """Has planned a dense and a TT table, both table-wise."""
    table_wise = ["table_wise"]
    planner = EcoRecPlanner(
        topology(1000),
        BATCH,
        constraints={
            "users": EcoRecConstraints(tt="always", tt_ranks=(16,), sharding_types=table_wise),
            "items_": EcoRecConstraints(sharding_types=table_wise),
        },
        calibration=CALIBRATION,
        debug=False,
    )
    planner.plan(model(users=ROWS, items_=1000), sharders)
    return planner


def test_a_step_is_the_sum_of_its_phases_on_their_slowest_ranks(planner: EcoRecPlanner):
    dense = DenseWork(flops_per_sample=1e6, parameters=1000)
    step = planner.predict_step(dense)
    (tt,) = [o for o in planner._best_plan if isinstance(o, TTShardingOption)]
    (stock,) = [o for o in planner._best_plan if not isinstance(o, TTShardingOption)]
    on_tt, on_stock = tt.shards[0].perf, stock.shards[0].perf
    assert tt.shards[0].rank != stock.shards[0].rank
    assert step.parts_ms["forward lookup"] == pytest.approx(
        max(on_tt.fwd_compute + 700 * NS, on_stock.fwd_compute + 500 * NS)
    )
    assert step.parts_ms["forward communication"] == pytest.approx(
        1000 * NS + max(on_tt.fwd_comms, on_stock.fwd_comms)
    )
    weights = 1000 * 4
    assert step.parts_ms["dense part"] == pytest.approx(
        (0.01 * 1e6 * BATCH + 5 * weights + 1000 + 3 * weights) * NS
    )
    assert step.parts_ms["framework"] == pytest.approx((10_000 + 2 * BATCH + 3000) * NS)
    assert step.step_ms == pytest.approx(sum(step.parts_ms.values()))
    assert step.bottleneck in step.parts_ms
    assert planner.report is not None and planner.report.step == planner.predict_step(
        DenseWork.of(nn.Identity())
    )
    assert "predicted step of the model: " in planner.report.text()
    bag_bytes = 2 * BATCH * DIM * 4
    of_tables = sum(o.shards[0].storage.ddr for o in planner._best_plan)
    beside = 2 * (1_000_000 + 4 * bag_bytes + 2 * weights)
    assert sum(step.bytes_W) == pytest.approx(of_tables + beside)


def test_steps_of_other_plans_of_the_model_are_predicted(
    planner: EcoRecPlanner,
    model: Callable[..., nn.Module],
    sharders: list[ModuleSharder[nn.Module]],
):
    dense = DenseWork(flops_per_sample=0, parameters=0)
    best = planner.predict_step(dense)
    plan = planner.plan(model(users=ROWS, items_=1000), sharders)
    assert planner.predict_step(dense, plan) == best
    for entry in plan.plan["ebc"].values():
        entry.ranks = [0]
    together = planner.predict_step(dense, plan)
    assert together.parts_ms["forward lookup"] > best.parts_ms["forward lookup"]
    assert max(together.bytes_W) > max(best.bytes_W)
    plan.plan["ebc"]["items_"].compute_kernel = "dense"
    with pytest.raises(ValueError, match="table 'items_': table_wise by dense is no option"):
        planner.predict_step(dense, plan)


@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_a_step_of_tiered_tables_waits_for_rows_unless_they_are_prefetched(
    prefetch_batches: int,
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
):
    tiered = EcoRecConstraints(
        tiers="always", tier_folder="/x", prefetch_batches=prefetch_batches,
        sharding_types=["table_wise"],
    )  # fmt: skip
    planner = EcoRecPlanner(
        topology(1000), BATCH, constraints={"users": tiered}, calibration=CALIBRATION, debug=False
    )
    plan = planner.plan(model(users=ROWS), sharders)
    (option,) = planner._best_plan
    for fetch_ms in (0.5, 1000.0):
        option.shards[0].perf.prefetch_compute = fetch_ms
        step = planner.predict_step(DenseWork(0, 0))
        other_ms = step.step_ms - step.parts_ms["fetching rows"]
        longer = max(fetch_ms, other_ms)
        expected = longer if prefetch_batches else fetch_ms + other_ms
        assert step.step_ms == pytest.approx(expected)
    of_last = planner.predict_step(DenseWork(0, 0), plan)
    assert of_last.bytes_W == step.bytes_W
    entry = plan.plan["ebc"]["users"]
    entry.tiers = replace(entry.tiers, cache_rows=entry.tiers.cache_rows + 1)
    with pytest.raises(ValueError, match="table 'users': table_wise by .* is no option"):
        planner.predict_step(DenseWork(0, 0), plan)
    del plan.plan["ebc"]["users"]
    with pytest.raises(ValueError, match="table 'users': the plan has no entry"):
        planner.predict_step(DenseWork(0, 0), plan)


def test_dist_groups_cost_what_is_calibrated(
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[float] = []
    monkeypatch.setattr(
        "ecorec_torchrec.planner.planner.choose_dist_groups",
        lambda options, cost_ms: asked.append(cost_ms) or {},
    )
    planner = EcoRecPlanner(
        topology(1000), BATCH, calibration=CALIBRATION, auto_dist_groups=True, debug=False
    )
    planner.plan(model(users=ROWS), sharders)
    assert asked == [group_ms("cpu", CALIBRATION)] != [group_ms("cpu")]


def test_a_step_cannot_be_predicted_without_measured_costs(
    model: Callable[..., nn.Module],
    topology: Callable[..., Topology],
    sharders: list[ModuleSharder[nn.Module]],
):
    planner = EcoRecPlanner(topology(1000), BATCH, debug=False)
    with pytest.raises(ValueError, match=r"plan\(\) comes first"):
        planner.predict_step(DenseWork(0, 0))
    with pytest.raises(ValueError, match=r"plan\(\) comes first"):
        planner.baselines({})
    planner.plan(model(users=1000), sharders)
    with pytest.raises(ValueError, match="needs a calibration with measured costs"):
        planner.predict_step(DenseWork(0, 0))
    with pytest.raises(TypeError, match="calibration must be a Calibration, got dict"):
        EcoRecPlanner(topology(1000), BATCH, calibration=COSTS)


def test_the_dense_part_is_counted_from_its_linear_layers():
    work = DenseWork.of(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)))
    assert work == DenseWork(flops_per_sample=6 * (32 + 4), parameters=32 + 4 + 4)
