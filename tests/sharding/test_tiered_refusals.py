"""What tiered tables cannot do is refused by name, before a file is made."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.plan import (
    TIERED_COMPUTE_KERNEL,
    TieredParameterSharding,
    tiered_row_wise,
    tiered_table_wise,
)
from ecorec_torchrec.sharding import TTEmbeddingBagCollectionSharder
from ecorec_torchrec.testing import RankPool, tiered, toy
from ecorec_torchrec.testing.tiered import Case
from ecorec_torchrec.tiers import TierSpec

META = torch.device("meta")
SGD = EmbOptimType.EXACT_SGD


def shard(
    folder: str, fused_params: dict[str, Any], config: dict[str, Any] | None = None
) -> torch.nn.Module:
    table = EmbeddingBagConfig(
        **{
            "name": "users",
            "num_embeddings": 100,
            "embedding_dim": 8,
            "feature_names": ["f"],
            **(config or {}),
        }
    )
    module = EmbeddingBagCollection(tables=[table], device=META)
    sharder = TTEmbeddingBagCollectionSharder(fused_params)
    tiers = tiered_table_wise(0, tiers=TierSpec(10, folder))
    plan = construct_module_sharding_plan(
        module, {"users": tiers}, sharder, world_size=1, local_size=1, device_type="cpu"
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env, torch.device("cpu"))


SETTINGS = [
    ({"optimizer": EmbOptimType.LAMB}, {}, "optimizer=.*LAMB.* change just the rows of a batch"),
    ({"optimizer": EmbOptimType.NONE}, {}, "optimizer=.*NONE.* is not supported"),
    (
        {"optimizer": EmbOptimType.ADAM},
        {},
        "tiered table 'users': FBGEMM has no optimizer .* on the CPU",
    ),
    (
        {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "weight_decay_mode": WeightDecayMode.COUNTER,
        },
        {},
        "weight_decay_mode=.*COUNTER.* rows that are not in the batch",
    ),
    ({"optimizer": SGD, "max_norm": 1.0}, {}, "max_norm=1.0 is not supported"),
    ({"optimizer": SGD, "bounds_check_mode": BoundsCheckMode.IGNORE}, {}, "always checked"),
    ({"optimizer": SGD, "output_dtype": SparseType.FP16}, {}, "output_dtype=.*FP16"),
    ({"optimizer": SGD}, {"data_type": DataType.FP16}, "data_type float16 is not supported"),
    ({"optimizer": SGD}, {"embedding_dim": 10}, "embedding_dim=10 is not a multiple of 4"),
    ({"optimizer": SGD}, {"init_fn": torch.nn.init.zeros_}, "init_fn is not supported"),
    (
        {"optimizer": SGD},
        {"weight_init_min": 1.0, "weight_init_max": 0.0},
        "weight_init_min=1.0 and weight_init_max=0.0 must be finite and in order",
    ),
]


def refused(rank: int, folder: str) -> None:
    for fused_params, config, message in SETTINGS:
        with pytest.raises(ValueError, match=message):
            shard(folder, fused_params, config)
    with pytest.warns(UserWarning, match=r"\['cache_load_factor'\] do not apply to tiered tables"):
        shard(folder, {"optimizer": SGD, "cache_load_factor": 0.5})


def test_settings_that_would_not_be_exact(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refused, str(tmp_path), world_size=1)


def without_optimizer(rank: int, folder: str) -> None:
    model, _ = Case().shard(folder, optimizer=None)
    batch = Case().batch(0, rank)
    with torch.no_grad():
        model(batch)
    with pytest.raises(ValueError, match=r"tiered tables \['users', 'ads'\] have no optimizer"):
        model(batch)[0].sum().backward()


def test_training_without_an_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(without_optimizer, str(tmp_path), world_size=2)


def ids_out_of_range(rank: int, folder: str) -> None:
    for case in (Case(), Case(row_wise=True)):
        model, _ = case.shard(f"{folder}/{case.row_wise}")
        batch = case.batch(0, rank)
        batch.features.values()[0] = tiered.ROWS["users"]
        with pytest.raises(ValueError, match="users.* 1500"):
            model(batch)


def test_ids_without_a_row(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(ids_out_of_range, str(tmp_path), world_size=1)


def test_entries_that_cannot_be_made(tmp_path: Path) -> None:
    tiers = TierSpec(10, str(tmp_path))
    world = {"world_size": 1, "local_size": 1, "device_type": "cpu"}
    bags = toy.collection(toy.configs(("d_tw",)), device="meta")
    with pytest.raises(ValueError, match=r"rank=3 is not within 0\.\.0"):
        construct_module_sharding_plan(
            bags,
            {"d_tw": tiered_table_wise(3, tiers=tiers)},
            TTEmbeddingBagCollectionSharder(),
            **world,
        )
    with pytest.raises(TypeError, match="needs a TierSpec, got tiers=None"):
        TieredParameterSharding("table_wise", TIERED_COMPUTE_KERNEL)


def data_parallel_tiers(*arguments: Any) -> ParameterSharding:
    entry = data_parallel()(*arguments)
    return TieredParameterSharding(
        **{**vars(entry), "compute_kernel": TIERED_COMPUTE_KERNEL}, tiers=TierSpec(10, "/nowhere")
    )


def tiered_as_tt(*arguments: Any) -> ParameterSharding:
    return tiered_table_wise(0, tiers=TierSpec(10, "/nowhere"))(*arguments)


def refused_plans(rank: int) -> None:
    module = EmbeddingBagCollection(tables=toy.configs(("d_tw",)), device=META)
    with pytest.raises(ValueError, match="'d_tw' cannot be sharded data_parallel: a tiered table"):
        toy.shard(toy.ToyModel(module, toy.configs(("d_tw",))), {"d_tw": data_parallel_tiers})
    with pytest.raises(ValueError, match="'t_tw' is held as TT cores"):
        tables = toy.configs(("t_tw",))
        module = toy.collection(tables, device="meta")
        toy.shard(toy.ToyModel(module, tables), {"t_tw": tiered_as_tt})


def test_plans_that_are_refused_when_they_are_used(ranks: RankPool) -> None:
    ranks.run(refused_plans, world_size=1)


def mixed(rank: int, folder: str) -> list[str]:
    """Dense, TT and tiered tables in one collection, some of them sharing a feature."""
    torch.manual_seed(1)
    names = ("t_tw", "t_tw2", "t_dp", "d_tw", "d_rw", "d_cw")
    tables = toy.configs(names)
    plan = toy.generators(names, dist.get_world_size())
    tiers = TierSpec(36, folder)
    own = {**plan, "d_tw": tiered_table_wise(0, tiers=tiers), "d_rw": tiered_row_wise(tiers=tiers)}
    models = []
    for placement in (own, {**plan, "d_tw": table_wise(0, compute_kernel="fused")}):
        torch.manual_seed(2)
        collection = toy.collection(tables, device="meta")
        models.append(toy.shard(toy.ToyModel(collection, tables), placement))
    model, twin = models
    twin.load_state_dict(
        {**twin.state_dict(), **{k: v for k, v in model.state_dict().items() if "row_ver" not in k}}
    )
    tiered.copy_start(model, twin)
    wrong = []
    for step in range(30):
        batch = toy.make_batch(names, step, rank)
        outputs = []
        for one in models:
            loss, logits = one(batch)
            loss.sum().backward()
            outputs.append(logits)
        if not torch.equal(*outputs):
            wrong.append(f"step {step}")
    return wrong


def test_beside_dense_and_tt_tables(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(mixed, str(tmp_path), world_size=2) == [[], []]
