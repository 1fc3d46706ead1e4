"""Placement: balanced up to what is indivisible, never over a cap, whatever the ranks are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.plan import load_plan, save_plan
from ecorec_torchrec.planner import (
    EcoRecConstraints,
    EcoRecEnumerator,
    EcoRecPlanner,
    PlanReport,
)

MIB = 2**20


def drawn_tables(count: int, seed: int = 788) -> list[tuple[int, float]]:
    """Rows and pooling factors of a recommendation model's kind: both lognormal."""
    draw = np.random.default_rng(seed)
    pooling = np.clip(draw.lognormal(np.log(3.0), 1.55, count), 0.05, 400)
    rows = np.clip((draw.lognormal(0.0, 2.1, count) * 50_000).astype(np.int64), 10, 2_000_000)
    return list(zip(rows.tolist(), pooling.tolist(), strict=True))


def drawn_model(count: int, dim: int = 128) -> tuple[nn.Module, dict[str, EcoRecConstraints]]:
    tables = drawn_tables(count)
    configs = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"]
        )
        for i, (rows, _) in enumerate(tables)
    ]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(configs, device=torch.device("meta"))})
    return model, {
        f"t{i}": EcoRecConstraints(pooling_factors=[pooling], tt_ranks=(16,))
        for i, (_, pooling) in enumerate(tables)
    }


@pytest.mark.parametrize("world_size", [8, 32])
def test_no_rank_takes_longer_than_mean_or_largest_shard(sharders, world_size):
    """TorchRec's rule, the fastest option per table and no second look, leaves ranks idle."""
    topology = Topology(world_size, "cuda", hbm_cap=8192 * MIB, local_world_size=8)
    model, constraints = drawn_model(80)
    planner = EcoRecPlanner(topology, 512, constraints=constraints, debug=False)
    planner.plan(model, sharders)
    report = planner.report
    mean = sum(rank.step_ms for rank in report.ranks) / world_size
    assert report.step_ms <= 1.03 * max(mean, report.indivisible_ms)
    assert report.imbalance == pytest.approx(report.step_ms / mean)
    assert report.over_bound == report.step_ms / max(report.mean_ms, report.indivisible_ms)
    assert all(rank.needed_bytes <= rank.cap_bytes for rank in report.ranks)
    unique_ids = {f"t{i}": float(rows) for i, (rows, _) in enumerate(drawn_tables(80))}
    ecorec, torchrec = planner.baselines(unique_ids)
    assert report.step_ms < ecorec.step_ms
    assert report.step_ms <= 1.001 * torchrec.step_ms


def test_six_steps_down_and_up_again(sharders, tmp_path):
    """More tables become TT as memory shrinks, none over a cap, until nothing fits; growing gives
    equal files back."""
    model, constraints = drawn_model(24)

    def plan(cap_mib: float, name: str) -> tuple[set[str], bytes]:
        topology = Topology(8, "cuda", hbm_cap=int(cap_mib * MIB), local_world_size=4)
        planner = EcoRecPlanner(topology, 64, constraints=constraints, debug=False)
        save_plan(planner.plan(model, sharders), tmp_path / name)
        assert all(rank.needed_bytes <= rank.cap_bytes for rank in planner.report.ranks)
        tt = {table.name for table in planner.report.tables if table.tt is not None}
        return tt, (tmp_path / name).read_bytes()

    caps = [1200, 600, 400, 250, 150, 100]
    down = [plan(cap, f"down{cap}.yaml") for cap in caps]
    up = [plan(cap, f"up{cap}.yaml") for cap in reversed(caps)]
    assert down == up[::-1]
    numbers = [len(tt) for tt, _ in down]
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] > numbers[0]
    load_plan(tmp_path / "down250.yaml", model, 8)
    with pytest.raises(PlannerError, match=r"do not fit(.|\n)*Cures, each of them enough:\n  1\) "):
        plan(1, "none.yaml")
    assert not (tmp_path / "none.yaml").exists()


def test_ranks_with_unequal_memory(model, sharders):
    """One small GPU among large ones must not be filled like the others."""
    caps = [800 * MIB, 100 * MIB]
    topology = Topology(
        2, "cuda", local_world_size=2,
        custom_topology_data=CustomTopologyData({"hbm_cap": caps}, world_size=2),
    )  # fmt: skip
    planner = EcoRecPlanner(topology, 64, debug=False)
    planner.plan(model(a=900_000, b=700_000, c=300_000), sharders)
    needed = [rank.needed_bytes for rank in planner.report.ranks]
    assert needed[0] > caps[1]
    assert all(need <= cap for need, cap in zip(needed, caps, strict=True))


def test_row_wise_over_two_hosts_is_cut_by_all_ranks(model, sharders):
    """Sixteen shards on two hosts of eight, not eight."""
    topology = Topology(16, "cuda", local_world_size=8)
    found = EcoRecEnumerator(topology, 64).enumerate(model(users=100_001), sharders)
    rows = [
        [shard.size[0] for shard in option.shards]
        for option in found
        if option.sharding_type == "row_wise"
    ]
    assert rows and all(sizes == [6251] * 15 + [100_001 - 15 * 6251] for sizes in rows)


def test_long_table_becomes_a_grid_over_hosts(sharders, tmp_path):
    """Columns on one host each, cut there by rows: TorchRec considers that only when it is told."""
    topology = Topology(16, "cuda", local_world_size=4, hbm_cap=8192 * MIB)
    model, _ = drawn_model(1)

    def planned(**constraint: object) -> PlanReport:
        constraints = {"t0": EcoRecConstraints(pooling_factors=[300.0], **constraint)}
        planner = EcoRecPlanner(topology, 512, constraints=constraints, debug=False)
        save_plan(planner.plan(model, sharders), tmp_path / "plan.yaml")
        return planner.report

    every = ["table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel"]
    stock_ms = planned(sharding_types=every).step_ms
    report = planned()
    (table,) = report.tables
    assert table.sharding == "grid_shard" and report.step_ms < stock_ms
    assert len({rank // 4 for rank in table.ranks}) > 1
    load_plan(tmp_path / "plan.yaml", model, 16)


def test_long_tables_are_cut_into_more_columns_than_torchrec_would(sharders, tmp_path):
    """One table that takes longer than all others together, on ranks of one host."""
    topology = Topology(4, "cuda", local_world_size=4, hbm_cap=8192 * MIB)
    model, _ = drawn_model(1)
    constraints = {"t0": EcoRecConstraints(
        pooling_factors=[300.0], sharding_types=["table_wise", "column_wise"])}  # fmt: skip
    plan = EcoRecPlanner(topology, 512, constraints=constraints, debug=False).plan(model, sharders)
    entry = plan.plan["ebc"]["t0"]
    assert entry.sharding_type == "column_wise" and len(set(entry.ranks)) > 1
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml", model, 4) == plan
