"""Plan files: what is written can be read, and what does not fit is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from ecorec_torchrec import TierSpec
from ecorec_torchrec.plan import (
    GroupedParameterSharding,
    TieredParameterSharding,
    TTParameterSharding,
    in_dist_group,
    load_plan,
    save_plan,
    tiered_row_wise,
    tiered_table_wise,
    tt_data_parallel,
    tt_table_wise,
)
from ecorec_torchrec.sharding import TTEmbeddingBagCollectionSharder
from ecorec_torchrec.tt import TTSpec

META = torch.device("meta")
USERS = TTSpec(1000, (10, 10, 10), (4, 4, 4), (8, 8))


def bag(name: str, rows: int = 1000, dim: int = 64) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[f"f_{name}"]
    )


def model(*tables: EmbeddingBagConfig) -> torch.nn.Module:
    ebc = EmbeddingBagCollection(list(tables) or [bag("users"), bag("genders", 3)], device=META)
    return torch.nn.ModuleDict({"ebc": ebc})


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def ebc_file(tmp_path: Path, users: str, *, world_size: int = 2) -> Path:
    """A file whose second table is fine and whose first is `users`."""
    return file(
        tmp_path,
        f"schema_version: 1\nworld_size: {world_size}\nmodules:\n  ebc:\n    users: {users}\n"
        "    genders: {kernel: dense, sharding: data_parallel}\n",
    )


def stock_plan(entries: dict, tables: list[EmbeddingBagConfig], **world: int) -> ShardingPlan:
    """A plan made by TorchRec's own helper."""
    ebc = EmbeddingBagCollection(tables, device=META)
    world = {"local_size": 2, "world_size": 2} | world
    module_plan = construct_module_sharding_plan(ebc, entries, device_type="cpu", **world)
    return ShardingPlan({"ebc": module_plan})


def test_minimal_hand_written_file(tmp_path):
    path = ebc_file(tmp_path, "{kernel: tt, sharding: table_wise, ranks: [1], tt: {rank: 16}}")
    plan = load_plan(path, model(), 2).plan["ebc"]

    users, genders = plan["users"], plan["genders"]
    assert isinstance(users, TTParameterSharding)
    assert users.tt == TTSpec.suggest(1000, 64, rank=16)
    assert users.ranks == [1]
    (shard,) = users.sharding_spec.shards
    assert (shard.shard_offsets, shard.shard_sizes) == ([0, 0], [1000, 64])
    assert shard.placement.rank() == 1
    assert genders.sharding_spec is None
    assert genders.ranks == [0, 1]


@pytest.mark.parametrize(
    ("generator", "world"),
    [
        (table_wise(rank=1, compute_kernel="fused"), {}),
        (row_wise(compute_kernel="fused"), {}),
        (column_wise(ranks=[0, 1], compute_kernel="fused"), {}),
        (column_wise(ranks=[1, 0, 1, 1], compute_kernel="fused"), {}),
        (column_wise(size_per_rank=[16, 48], compute_kernel="fused"), {}),
        (table_row_wise(host_index=1), {"world_size": 4}),
        (grid_shard(host_indexes=[0, 1]), {"world_size": 4, "dim": 256}),
        (data_parallel(), {}),
        (tt_table_wise(1, tt=USERS), {}),
        (tt_data_parallel(tt=USERS), {}),
        (in_dist_group(2, table_wise(rank=1, compute_kernel="fused")), {}),
        (in_dist_group(0, tt_table_wise(1, tt=USERS)), {}),
    ],
)
def test_file_holds_every_sharding_type(tmp_path, generator, world):
    world = dict(world)
    tables = [bag("users", dim=world.pop("dim", 64)), bag("genders", 3)]
    plan = stock_plan({"users": generator, "genders": data_parallel()}, tables, **world)
    path, again = tmp_path / "plan.yaml", tmp_path / "again.yaml"
    world_size = world.get("world_size", 2)

    save_plan(plan, path)
    loaded = load_plan(path, model(*tables), world_size)
    save_plan(loaded, again)

    assert loaded.plan["ebc"] == plan.plan["ebc"]
    assert again.read_bytes() == path.read_bytes()


TIERS = TierSpec(500, "/nvme/rows", memory_rows=100, prefetch_batches=3, policy="lru")


@pytest.mark.parametrize(
    "generator", [tiered_table_wise(1, tiers=TIERS), tiered_row_wise(tiers=TIERS)]
)
def test_a_tiered_table_in_a_file(tmp_path, generator):
    ebc = model(bag("users"))
    sharder = TTEmbeddingBagCollectionSharder()
    entries = construct_module_sharding_plan(
        ebc["ebc"], {"users": generator}, sharder, world_size=2, local_size=2, device_type="cpu"
    )
    path = tmp_path / "plan.yaml"
    save_plan(ShardingPlan({"ebc": entries}), path, world_size=2)
    read = load_plan(path, ebc, world_size=2).plan["ebc"]["users"]
    assert isinstance(read, TieredParameterSharding)
    assert read == entries["users"]
    text = path.read_text()
    assert "kernel: tiered" in text and "prefetch_batches: 3" in text
    assert "direct_reads" not in text, "what is the default is left out"


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ("{sharding: table_wise, ranks: [0]}", "`tiers` is missing"),
        (
            "{sharding: data_parallel, tiers: {cache_rows: 5, folder: /f}}",
            "a tiered table is table_wise or row_wise: replicas would",
        ),
        ("{sharding: row_wise, tiers: {cache_rows: 5}}", "tiers: `folder` is missing"),
        (
            "{sharding: row_wise, tiers: {cache_rows: 0, folder: /f}}",
            "tiers: cache_rows=0 must be 1 or more",
        ),
        (
            "{sharding: row_wise, tiers: {cache_rows: many, folder: /f}}",
            "tiers: cache_rows must be an integer, got 'many'",
        ),
        ("{sharding: row_wise, tiers: {cach_rows: 5}}", "did you mean 'cache_rows'"),
        (
            "{sharding: row_wise, tt: {rank: 8}, tiers: {cache_rows: 5, folder: /f}}",
            "`tt` needs `kernel: tt`, found `kernel: tiered`",
        ),
    ],
)
def test_refuses_tiers_that_do_not_fit(tmp_path, users, message):
    """A cache without a slot crashed other software at the first lookup: it is no plan."""
    path = ebc_file(tmp_path, users.replace("{", "{kernel: tiered, ", 1))
    with pytest.raises(ValueError, match=message):
        load_plan(path, model(), world_size=2)


def test_tiers_are_of_tiered_tables(tmp_path):
    users = "{kernel: fused, sharding: row_wise, tiers: {cache_rows: 5, folder: /f}}"
    with pytest.raises(ValueError, match="`tiers` needs `kernel: tiered`, found `kernel: fused`"):
        load_plan(ebc_file(tmp_path, users), model(), world_size=2)


def test_a_dist_group_in_a_file(tmp_path):
    path = ebc_file(tmp_path, "{kernel: fused, sharding: table_wise, ranks: [1], dist_group: 3}")
    plan = load_plan(path, model(), 2).plan["ebc"]
    assert isinstance(plan["users"], GroupedParameterSharding)
    assert plan["users"].dist_group == 3
    assert not isinstance(plan["genders"], GroupedParameterSharding)


@pytest.mark.parametrize("dist_group", ["-1", "1.5", "first"])
def test_a_dist_group_is_a_number_from_0(tmp_path, dist_group):
    path = ebc_file(
        tmp_path,
        f"{{kernel: fused, sharding: table_wise, ranks: [1], dist_group: {dist_group}}}",
    )
    with pytest.raises(ValueError, match="table 'users': `dist_group`"):
        load_plan(path, model(), 2)


def test_cuda_placements_survive_on_a_machine_without_cuda(tmp_path):
    ebc = EmbeddingBagCollection([bag("users")], device=META)
    module_plan = construct_module_sharding_plan(
        ebc, {"users": row_wise(compute_kernel="fused")}, local_size=2, world_size=4,
        device_type="cuda",
    )  # fmt: skip
    plan = ShardingPlan({"ebc": module_plan})
    save_plan(plan, tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml", model(bag("users")), 4)
    placements = [str(s.placement) for s in loaded.plan["ebc"]["users"].sharding_spec.shards]
    assert placements == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"]


def test_torchrec_options_survive(tmp_path):
    plan = stock_plan({"users": table_wise(rank=0, compute_kernel="fused")}, [bag("users")])
    entry = plan.plan["ebc"]["users"]
    entry.output_dtype = DataType.FP16
    entry.stochastic_rounding = False
    entry.cache_params = CacheParams(load_factor=0.25, precision=DataType.FP32)
    save_plan(plan, tmp_path / "plan.yaml", world_size=2)
    loaded = load_plan(tmp_path / "plan.yaml", model(bag("users")), 2)
    assert loaded.plan["ebc"]["users"] == entry


def test_sequence_tables_and_root_module(tmp_path):
    movies = EmbeddingConfig(
        num_embeddings=50, embedding_dim=8, name="movies", feature_names=["f_movies"]
    )
    text = "schema_version: 1\nworld_size: 1\nmodules:\n  '':\n    movies: {kernel: fused, "
    path = file(tmp_path, text + "sharding: table_wise, ranks: [0]}\n")
    plan = load_plan(path, EmbeddingCollection([movies], device=META), 1)
    assert plan.plan[""]["movies"].compute_kernel == "fused"


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ("{kernal: tt}", r"unknown key 'kernal' \(did you mean 'kernel'"),
        ("{kernel: fuse, sharding: table_wise, ranks: [0]}", r"'fuse' \(did you mean 'fused'"),
        ("{kernel: fused, sharding: table_wise}", "`ranks` is missing"),
        ("{kernel: fused, sharding: table_wise, ranks: [2]}", r"rank 2 is not within 0\.\.1"),
        ("{kernel: fused, sharding: table_wise, ranks: [0, 1]}", "into 1 shards"),
        ("{kernel: fused, sharding: table_wise, ranks: 0}", "list of integers"),
        ("{kernel: tt, sharding: table_wise, ranks: [0]}", "`tt` is missing"),
        (
            "{kernel: tt, sharding: row_wise, tt: {rank: 8}}",
            "is row_wise, but a TT table is table_wise or data_parallel: cutting it",
        ),
        ("{kernel: tt, sharding: data_parallel, tt: {rank: 0}}", "rank"),
        (
            "{kernel: tt, sharding: data_parallel,"
            " tt: {row_factors: [10, 10, 10], col_factors: [4, 4, 8], ranks: [8, 8]}}",
            "embedding_dim=128, the model has embedding_dim=64",
        ),
        (
            "{kernel: fused, sharding: table_wise, ranks: [0], num_embeddings: 999}",
            "the plan is for num_embeddings=999, the model has num_embeddings=1000",
        ),
        (
            "{kernel: tt, sharding: table_wise, ranks: [0, 1], tt: {rank: 8}, shards: "
            "[{offset: [0, 0], size: [500, 64]}, {offset: [500, 0], size: [500, 64]}]}",
            r"shard 0: size \[500, 64\] is not how table_wise cuts",
        ),
        (
            "{kernel: fused, sharding: row_wise, shards: "
            "[{offset: [0, 0], size: [1000, 32]}, {offset: [0, 32], size: [1000, 32]}]}",
            r"shard 0: size \[1000, 32\] is not how row_wise cuts",
        ),
        (
            "{kernel: fused, sharding: row_wise, shards: "
            "[{offset: [0, 0], size: [500, 64]}, {offset: [0, 0], size: [500, 64]}]}",
            "plan.yaml: module 'ebc', table 'users': .* overlap",
        ),
        (
            "{kernel: fused, sharding: row_wise, ranks: [1, 0]}",
            r"row_wise is on all 2 ranks, in their order, found \[1, 0\]",
        ),
        ("{kernel: fused, sharding: data_parallel}", "replicas would part: use `kernel: dense`"),
        (
            "{kernel: fused, sharding: table_wise, ranks: [0], device: gpu}",
            "table 'users': `device`: 'gpu' is no type of device",
        ),
        (
            "{kernel: fused, sharding: table_wise, ranks: [0], device: 'cuda:1'}",
            "`device`: give the type, 'cuda', found 'cuda:1'",
        ),
        ("{[kernel, sharding]: fused}", "plan.yaml:5: a key must be a name"),
        ("{kernel: fused, kernel: dense}", "plan.yaml:5: the key 'kernel' is given twice"),
        ("{kernel: fused", "plan.yaml:6: "),
    ],
)
def test_refuses_an_entry_that_does_not_fit(tmp_path, users, message):
    with pytest.raises(ValueError, match=message):
        load_plan(ebc_file(tmp_path, users), model(), 2)


@pytest.mark.parametrize(
    "cut",
    ["row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"],
)
def test_refuses_to_cut_a_tt_table(tmp_path, cut):
    users = f"{{kernel: tt, sharding: {cut}, ranks: [0, 1], tt: {{rank: 8}}}}"
    message = f"table 'users': .*is {cut}, but a TT table is table_wise or data_parallel"
    with pytest.raises(ValueError, match=message):
        load_plan(ebc_file(tmp_path, users), model(), 2)


GOOD = "{kernel: fused, sharding: table_wise, ranks: [0]}"


@pytest.mark.parametrize("local_world_size", [0, 3])
def test_refuses_hosts_that_do_not_make_up_the_world(tmp_path, local_world_size):
    path = ebc_file(tmp_path, GOOD)
    path.write_text(f"local_world_size: {local_world_size}\n{path.read_text()}")
    with pytest.raises(ValueError, match=f"local_world_size={local_world_size} .*world_size=2"):
        load_plan(path, model(), 2)


def test_refuses_what_is_no_text(tmp_path):
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="plan.yaml: not a text in UTF-8"):
        load_plan(tmp_path / "plan.yaml", model(), 2)


def test_refuses_another_world_size(tmp_path):
    path = ebc_file(tmp_path, GOOD, world_size=8)
    with pytest.raises(ValueError, match="world_size=8, this run has world_size=2"):
        load_plan(path, model(), 2)


def test_refuses_another_model(tmp_path):
    path = ebc_file(tmp_path, GOOD)
    with pytest.raises(ValueError, match="tables movies are missing"):
        load_plan(path, model(bag("users"), bag("genders", 3), bag("movies")), 2)
    with pytest.raises(ValueError, match="unknown table 'genders'"):
        load_plan(path, model(bag("users")), 2)
    with pytest.raises(ValueError, match=r"unknown module 'ebc' \(did you mean 'ebcs'"):
        load_plan(path, torch.nn.ModuleDict({"ebcs": model()["ebc"]}), 2)


def test_unknown_number_of_ranks_is_asked_for(tmp_path):
    plan = stock_plan({"users": table_wise(rank=0)}, [bag("users")])
    with pytest.raises(ValueError, match="how many ranks"):
        save_plan(plan, tmp_path / "plan.yaml")


def test_failed_save_keeps_the_old_file(tmp_path):
    path = file(tmp_path, "old")
    plan = stock_plan({"users": table_wise(rank=0)}, [bag("users")])
    plan.plan["ebc"]["users"].key_value_params = object()
    with pytest.raises(ValueError, match="table 'users' of module 'ebc'"):
        save_plan(plan, path, world_size=2)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
