"""EcoRecPlanner: fits first, then compresses least, then is fast; the same plan every time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import validate_compute_kernels
from torchrec.distributed.planner.proposers import UniformProposer
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Stats,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from ecorec_torchrec.plan import TT_COMPUTE_KERNEL, TTParameterSharding, load_plan, save_plan
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.tt import TTSpec

META = torch.device("meta")
MIB = 2**20
SIZES = {"big": 1_000_000, "mid": 500_000, "small": 250_000, "tiny": 10_000}
ALL_MAY_BE_TT = {name: EcoRecConstraints(tt_ranks=(16, 32)) for name in SIZES}
USERS = TTSpec(10_000, (20, 20, 25), (4, 4, 4), (8, 8))


def tt_tables(plan) -> dict[str, TTSpec]:
    entries = plan.plan["ebc"].items()
    return {name: e.tt for name, e in entries if e.compute_kernel == TT_COMPUTE_KERNEL}


def bag(name: str, rows: int = 10_000) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=64, name=name, feature_names=[f"f_{name}"]
    )


def tt_model() -> nn.Module:
    """A collection that holds `users` as cores already."""
    tables = [bag("users"), bag("genders", 3)]
    return nn.ModuleDict(
        {"ebc": TTEmbeddingBagCollection(tables, tt={"users": USERS}, device=META)}
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shrinking_memory_turns_the_largest_tables_tt(model, topology, sharders, device):
    """A user with too little memory wants to be told which tables to compress, not to choose."""
    caps_mib = [2048, 400, 250, 150, 90, 40, 20]
    compressed = []
    for cap_mib in caps_mib:
        planner = EcoRecPlanner(
            topology(cap_mib, device), batch_size=512, constraints=ALL_MAY_BE_TT, debug=False
        )
        compressed.append(set(tt_tables(planner.plan(model(**SIZES), sharders))))
        for rank in planner.report.ranks:
            assert rank.needed_bytes <= rank.cap_bytes <= cap_mib * MIB

    assert compressed[0] == set()
    assert compressed[-1] >= {"big", "mid", "small"}
    largest_first = list(SIZES)
    for fewer, more in zip(compressed, compressed[1:], strict=False):
        assert fewer <= more
    for tables in compressed:
        assert tables == set(largest_first[: len(tables)])


def test_takes_the_highest_rank_that_fits(model, topology, sharders):
    def ranks(cap_mib: float) -> set[tuple[int, ...]]:
        constraints = {"big": EcoRecConstraints(tt="always", tt_ranks=(64, 8, 32))}
        planner = EcoRecPlanner(topology(cap_mib), 64, constraints=constraints, debug=False)
        return {
            spec.ranks for spec in tt_tables(planner.plan(model(big=1_000_000), sharders)).values()
        }

    assert ranks(100) == {(64, 64)}
    assert ranks(10) == {(32, 32)}
    assert ranks(2) == {(8, 8)}


def test_of_equal_tables_the_less_read_one_is_compressed(model, topology, sharders):
    constraints = {
        "hot": EcoRecConstraints(tt_ranks=(16,), pooling_factors=[20.0]),
        "cold": EcoRecConstraints(tt_ranks=(16,), pooling_factors=[1.0]),
    }
    planner = EcoRecPlanner(topology(300, world_size=1), 64, constraints=constraints, debug=False)
    plan = planner.plan(model(hot=1_000_000, cold=1_000_000), sharders)
    assert set(tt_tables(plan)) == {"cold"}


def test_nothing_is_compressed_without_leave(model, topology, sharders):
    constraints = {"big": EcoRecConstraints(tt="auto"), "mid": ParameterConstraints()}
    planner = EcoRecPlanner(topology(1000), 64, constraints=constraints, debug=False)
    assert tt_tables(planner.plan(model(**SIZES), sharders)) == {}


def test_own_shapes_are_always_tt(topology, sharders):
    plan = EcoRecPlanner(topology(1000), 64, debug=False).plan(tt_model(), sharders)
    assert tt_tables(plan) == {"users": USERS}
    assert isinstance(plan.plan["ebc"]["users"], TTParameterSharding)

    config = TTEmbeddingBagConfig(**vars(bag("users")), tt=USERS)
    stock = nn.ModuleDict({"ebc": EmbeddingBagCollection([config], device=META)})
    assert tt_tables(EcoRecPlanner(topology(1000), 64, debug=False).plan(stock, sharders)) == {
        "users": USERS
    }
    never = EcoRecPlanner(
        topology(1000), 64, constraints={"users": EcoRecConstraints(tt="never")}, debug=False
    )
    assert tt_tables(never.plan(stock, sharders)) == {}
    with pytest.raises(PlannerError, match="'users'.*tt='never', but the model holds it as TT"):
        never.plan(tt_model(), sharders)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (ParameterConstraints(sharding_types=["row_wise"]), "sharding_types=.'row_wise'."),
        (ParameterConstraints(compute_kernels=["quant"]), "compute_kernels=.'quant'."),
        (EcoRecConstraints(tt="always"), "neither tt_ranks nor the model's config"),
        (
            EcoRecConstraints(tt="always", tt_ranks=(8,), sharding_types=["column_wise"]),
            "a TT table is table_wise or data_parallel: cutting it by rows or columns",
        ),
        (
            EcoRecConstraints(
                tt="always", tt_ranks=(8,), sharding_types=["table_wise"], compute_kernels=["dense"]
            ),
            "compute_kernels=.'dense'., and it is a TT table",
        ),
    ],
)
def test_impossible_constraint_is_named_when_planning(
    model, topology, sharders, constraint, reason
):
    """Not when sharding, and not for the table before it: table and constraint are in the error."""
    planner = EcoRecPlanner(topology(4096), 64, constraints={"mid": constraint}, debug=False)
    with pytest.raises(PlannerError, match=f"table 'mid' has no sharding option: .*{reason}") as e:
        planner.plan(model(**SIZES), sharders)
    assert e.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


@pytest.mark.parametrize("cap_mib", [2048, 150, 20])
def test_planned_kernels_pass_torchrecs_check(model, topology, sharders, cap_mib):
    """Newer TorchRec refuses plans whose kernels and shardings do not go together."""
    planner = EcoRecPlanner(topology(cap_mib), 512, constraints=ALL_MAY_BE_TT, debug=False)
    planner.plan(model(**SIZES), sharders)
    validate_compute_kernels(planner._best_plan)
    option = planner._best_plan[0]
    option.compute_kernel, option.sharding_type = "dense", "table_wise"
    with pytest.raises(PlannerError, match="DENSE kernel requires DATA_PARALLEL"):
        validate_compute_kernels(planner._best_plan)


def test_stock_sharders_cannot_shard_tt(topology):
    planner = EcoRecPlanner(topology(1000), 64, debug=False)
    config = TTEmbeddingBagConfig(**vars(bag("users")), tt=USERS)
    stock = nn.ModuleDict({"ebc": EmbeddingBagCollection([config], device=META)})
    with pytest.raises(PlannerError, match="EmbeddingBagCollectionSharder shards no TT tables"):
        planner.plan(stock, get_default_sharders())


def test_settings_that_do_nothing_are_told(model, topology, sharders):
    constraints = {"userz": EcoRecConstraints(), "users": EcoRecConstraints(tt_ranks=(4,))}
    planner = EcoRecPlanner(topology(1000), 64, constraints=constraints, debug=False)
    with pytest.warns(UserWarning) as caught:
        planner.plan(tt_model(), sharders)
    messages = [str(warning.message) for warning in caught]
    assert any("constraints for userz are ignored" in message for message in messages)
    assert any("tt_ranks=(4,) is ignored" in message for message in messages)
    with pytest.raises(TypeError, match="EcoRecEnumerator, got EmbeddingEnumerator"):
        EcoRecPlanner(topology(1), enumerator=EmbeddingEnumerator(topology(1), 64))


def test_missing_optimizer_is_told_when_planning(topology):
    """A table-wise TT table must not end up trained by some optimizer nobody asked for."""
    planner = EcoRecPlanner(
        topology(1000),
        64,
        constraints={"users": EcoRecConstraints(sharding_types=["table_wise"])},
        debug=False,
    )
    with pytest.warns(UserWarning, match="no optimizer is known for .* users"):
        planner.plan(tt_model(), get_ecorec_sharders())


def test_takes_torchrec_arguments(model, topology, sharders):
    class Recorder(Stats):
        def log(self, *args: object, **kwargs: object) -> None:
            self.best_plan = kwargs["best_plan"]

    recorder, seen = Recorder(), []
    planner = EcoRecPlanner(
        topology(150),
        batch_size=512,
        proposer=UniformProposer(),
        stats=recorder,
        callbacks=[lambda options: seen.append(len(options)) or options],
        constraints=ALL_MAY_BE_TT,
        timeout_seconds=60,
    )
    plan = planner.plan(model(**SIZES), sharders)
    assert isinstance(planner, EmbeddingShardingPlanner)
    assert seen == [4]
    assert {option.name for option in recorder.best_plan} == set(SIZES)
    assert set(tt_tables(plan)) == {"big"}


def test_planned_file_is_the_same_in_every_process(tmp_path):
    """String hashes differ from process to process and must not decide between equal plans."""
    script = """
import sys, torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from ecorec_torchrec import EcoRecConstraints, EcoRecPlanner, get_ecorec_sharders, save_plan
tables = [EmbeddingBagConfig(num_embeddings=100_000, embedding_dim=256, name=f"t{i}",
                             feature_names=[f"f{i}"]) for i in range(6)]
model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables, device=torch.device("meta"))})
constraints = {f"t{i}": EcoRecConstraints(tt_ranks=(8, 16),
               sharding_types=["data_parallel", "column_wise", "table_wise"]) for i in range(6)}
topology = Topology(world_size=2, compute_device="cpu", ddr_cap=250 * 2**20)
sharders = get_ecorec_sharders({"optimizer": torch.optim.SGD})
save_plan(EcoRecPlanner(topology, 512, constraints=constraints).plan(model, sharders), sys.argv[1])
"""
    files = []
    for seed in ("1", "2"):
        files.append(tmp_path / f"{seed}.yaml")
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(files[-1])],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
    assert files[0].read_bytes() == files[1].read_bytes()


def test_plan_goes_through_a_file(model, topology, sharders, tmp_path):
    planner = EcoRecPlanner(topology(150), 512, constraints=ALL_MAY_BE_TT, debug=False)
    plan = planner.plan(model(**SIZES), sharders)
    save_plan(plan, tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml", model(**SIZES), 2)
    save_plan(loaded, tmp_path / "again.yaml")
    assert loaded == plan
    assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "plan.yaml").read_bytes()


def _plan_and_look_up(rank: int) -> tuple[bytes, torch.Tensor]:
    tables = [bag("users"), bag("movies", 40_000), bag("genders", 3)]
    collection = TTEmbeddingBagCollection(tables, tt={"users": USERS})
    constraints = {"movies": EcoRecConstraints(tt_ranks=(8,))}
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=4 * MIB)
    sharders = get_ecorec_sharders(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    planner = EcoRecPlanner(topology, 4, constraints=constraints, debug=False)
    plan = planner.collective_plan(collection, sharders)
    assert (planner.report is None) == (rank != 0)
    model = DistributedModelParallel(
        collection, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["f_users", "f_movies", "f_genders"],
        values=torch.tensor([9_999, 1, 39_999, 2, 0, 1]),
        lengths=torch.ones(6, dtype=torch.int64),
    )
    pooled = model(features).wait().values()
    return plan, pooled.detach()


def test_collective_plan_shards_a_model(ranks):
    (plan_0, pooled_0), (plan_1, pooled_1) = ranks.run(_plan_and_look_up, world_size=2)
    assert plan_0 == plan_1
    entries = plan_0.plan[""]
    kernels = {name: entry.compute_kernel for name, entry in entries.items()}
    assert kernels["users"] == kernels["movies"] == TT_COMPUTE_KERNEL != kernels["genders"]
    assert entries["movies"].tt == TTSpec.suggest(40_000, 64, rank=8)
    assert pooled_0.shape == (2, 3 * 64)
    torch.testing.assert_close(pooled_0, pooled_1)
    assert pooled_0.abs().sum() > 0


@pytest.mark.parametrize("gb_per_s", [0.05, 600.0], ids=["slow", "fast"])
@pytest.mark.parametrize(
    ("rows", "batch_size", "on_slow_links"),
    [(10_000, 16_384, "data_parallel"), (100_000_000, 64, "table_wise")],
    ids=["tiny", "huge"],
)
def test_the_cost_decides_between_copies_and_one_owner(
    model, sharders, rows: int, batch_size: int, on_slow_links: str, gb_per_s: float
) -> None:
    """Cores are reduced by all ranks, or pooled rows travel to and from the owner."""
    bytes_per_ms = gb_per_s * 1e6
    topology = Topology(
        world_size=2,
        local_world_size=2,
        compute_device="cpu",
        intra_host_bw=bytes_per_ms,
        inter_host_bw=bytes_per_ms,
    )
    rule = EcoRecConstraints(tt="always", tt_ranks=(64,))
    planner = EcoRecPlanner(topology, batch_size, constraints={"t": rule}, debug=False)
    unsharded = model(t=rows)
    entry = planner.plan(unsharded, sharders).plan["ebc"]["t"]
    ways = planner._enumerator.candidates(unsharded, sharders)
    by_sharding = {way.option.sharding_type: way.perfs[0] for way in ways}
    assert set(by_sharding) == {"table_wise", "data_parallel"}
    owner, copies = by_sharding["table_wise"], by_sharding["data_parallel"]
    assert entry.sharding_type == min(by_sharding, key=lambda way: by_sharding[way].total)
    if gb_per_s < 1:
        assert entry.sharding_type == on_slow_links
        owner_sends, copies_send = owner.fwd_comms + owner.bwd_comms, copies.bwd_comms
        assert (copies_send < owner_sends) == (on_slow_links == "data_parallel")
    else:  # what travels takes next to no time
        assert owner.fwd_comms + owner.bwd_comms < 0.05 * owner.total
