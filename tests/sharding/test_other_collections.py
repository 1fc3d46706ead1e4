"""TorchRec's other collections in a model with TT tables: they train beside, not around them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    get_module_to_default_sharders,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.plan import TT_COMPUTE_KERNEL, TTParameterSharding, tt_table_wise
from ecorec_torchrec.sharding import TTEmbeddingBagCollectionSharder, get_ecorec_sharders
from ecorec_torchrec.testing import RankPool, toy

META = torch.device("meta")
CPU = torch.device("cpu")
DENSE = toy.configs(("d_tw",))
DENSE_SEQUENCE = toy.sequence_configs(("d_tw",))
TT = toy.configs(("t_q",))
SPEC = toy.SPECS["t_q"]


def processed(ebc: EmbeddingBagCollection) -> nn.Module:
    features = [name for config in ebc.embedding_bag_configs() for name in config.feature_names]
    processors = PositionWeightedModuleCollection(dict.fromkeys(features, 4))
    return FeatureProcessedEmbeddingBagCollection(ebc, processors)


def managed(configs: list) -> ManagedCollisionCollection:
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=CPU,
            input_hash_size=4000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for config in configs
    }
    return ManagedCollisionCollection(modules, configs)


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.DIM, 4)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(pooled.values())


def stock(is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=DENSE, is_weighted=is_weighted, device=META)


BESIDE: dict[str, tuple[Callable[[], nn.Module], ParameterShardingGenerator]] = {
    "feature-processed": (lambda: processed(stock(is_weighted=True)), table_wise(0)),
    "managed-collision": (
        lambda: ManagedCollisionEmbeddingBagCollection(stock(), managed(DENSE)),
        row_wise(),
    ),
    "managed-collision sequences": (
        lambda: ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=DENSE_SEQUENCE, device=META), managed(DENSE_SEQUENCE)
        ),
        row_wise(),
    ),
    "fused": (
        lambda: FusedEmbeddingBagCollection(DENSE, torch.optim.SGD, {"lr": 0.05}, device=CPU),
        table_wise(0),
    ),
}


class Beside(nn.Module):
    """A collection with TT tables, and another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.ebc = toy.collection(toy.configs(("t_tw", "t_dp")), device="meta")
        self.other = other

    def forward(self, features: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Tensor:
        loss = self.ebc(features).values().square().sum()
        found = self.other(others)
        found = found[0] if isinstance(found, tuple) else found  # with the remapped features
        sequences = found.values()
        parts = [sequences] if isinstance(sequences, Tensor) else [s.values() for s in sequences]
        return loss + sum(part.square().sum() for part in parts)


def train_beside(rank: int, kind: str) -> list[str]:
    torch.manual_seed(0)
    make_other, generator = BESIDE[kind]
    model = Beside(make_other())
    plan = {
        "ebc": construct_module_sharding_plan(
            model.ebc,
            toy.generators(("t_tw", "t_dp"), 2),
            sharder=TTEmbeddingBagCollectionSharder(),
            device_type="cpu",
        ),
        "other": construct_module_sharding_plan(
            model.other, {"d_tw": generator}, device_type="cpu", local_size=2, world_size=2
        ),
    }
    for entry in plan["other"].values():
        entry.compute_kernel = "fused"
    dmp = DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan(plan), sharders=get_ecorec_sharders(toy.SGD)
    )
    features = toy.make_batch(("t_tw", "t_dp"), 0, rank).features
    others = toy.make_batch(("d_tw",), 0, rank).features
    if "collision" in kind:  # ids from a space larger than the table
        values = others.values() + 1000 * (rank + 1)
        others = KeyedJaggedTensor(others.keys(), values, lengths=others.lengths())
    before = toy.whole_state(dmp)
    losses = []
    for _ in range(3):
        dmp.zero_grad()
        loss = dmp(features, others)
        loss.backward()
        losses.append(float(loss.detach()))
    # Managed collision moves ids to other rows meanwhile, which may be larger.
    assert all(map(math.isfinite, losses)) and ("collision" in kind or losses[2] < losses[0])
    replicas = [p.grad for name, p in dmp.named_parameters() if ".t_dp" in name]
    assert len(replicas) == 3 and all(bool(grad.any()) for grad in replicas)
    after = toy.whole_state(dmp)
    return [name for name in after if not torch.equal(after[name], before[name])]


@pytest.mark.parametrize("kind", BESIDE)
def test_other_collections_train_beside_tt_tables(ranks: RankPool, kind: str) -> None:
    changed = ranks.run(train_beside, kind)[0]
    assert {f"ebc.embedding_bags.t_tw.tt_cores.{k}" for k in range(3)} <= set(changed)
    assert any(name.endswith(".d_tw.weight") for name in changed)


def ours(is_weighted: bool = False) -> EmbeddingBagCollection:
    return toy.collection(TT, is_weighted, "meta")


AROUND: dict[str, Callable[[], nn.Module]] = {
    "feature-processed": lambda: processed(ours(is_weighted=True)),
    "managed-collision": lambda: ManagedCollisionEmbeddingBagCollection(ours(), managed(TT)),
}


def shard_around(rank: int, kind: str) -> None:
    model = nn.ModuleDict({"other": AROUND[kind]()})
    message = r"TT tables \['t_q'\] are in a collection within .* give them a collection of their"
    sharders = {sharder.module_type: sharder for sharder in get_ecorec_sharders(toy.SGD)}
    sharder = sharders[type(model["other"])]
    with pytest.raises(NotImplementedError, match=message):
        construct_module_sharding_plan(
            model["other"], {"t_q": tt_table_wise(0)}, sharder=sharder, device_type="cpu"
        )
    entry = TTParameterSharding("table_wise", TT_COMPUTE_KERNEL, ranks=[0], tt=SPEC)
    plan = ShardingPlan({"other": {"t_q": entry}})
    with pytest.raises(NotImplementedError, match=message):
        DistributedModelParallel(model, device=CPU, plan=plan, sharders=list(sharders.values()))


@pytest.mark.parametrize("kind", AROUND)
def test_tt_tables_within_other_collections_are_refused_by_name(ranks: RankPool, kind: str) -> None:
    ranks.run(shard_around, kind)


@pytest.mark.parametrize("kind", [*AROUND, "tower"])
def test_sharders_of_other_collections_are_given_no_tt_tables(kind: str) -> None:
    """TorchRec's own take the last core for the table, and tell of its size."""
    if kind == "tower":
        module: nn.Module = EmbeddingTower(ours(), Interaction())
        sharder: ModuleSharder = EmbeddingTowerSharder()
    else:
        module = AROUND[kind]()
        sharder = get_module_to_default_sharders()[type(module)]
    for generator in (tt_table_wise(0, tt=SPEC), tt_table_wise(0)):
        with pytest.raises(ValueError, match=f"{type(sharder).__name__} cannot shard TT tables"):
            construct_module_sharding_plan(
                module, {"t_q": generator}, sharder=sharder, device_type="cpu",
                local_size=1, world_size=1,
            )  # fmt: skip


@pytest.mark.parametrize("kind", AROUND)
def test_unsharded_they_take_tt_tables(kind: str) -> None:
    ebc = toy.collection(TT, is_weighted=kind == "feature-processed")
    module = (
        processed(ebc)
        if kind == "feature-processed"
        else ManagedCollisionEmbeddingBagCollection(ebc, managed(TT))
    )
    features = KeyedJaggedTensor(["f_t_q"], torch.tensor([7, 3, 3]), lengths=torch.tensor([2, 1]))
    found = module(features)
    pooled = found[0] if isinstance(found, tuple) else found
    assert pooled.values().shape == (2, toy.DIM)
    pooled.values().square().sum().backward()
    assert all(bool(core.grad.any()) for core in ebc.embedding_bags["t_q"].tt_cores)


def test_other_collections_are_sharded_by_torchrec() -> None:
    """What is given for embedding bag collections does not reach the others."""
    defaults = get_module_to_default_sharders()
    for sharder in get_ecorec_sharders({"learning_rate": 0.7}):
        if sharder.module_type in defaults and sharder.module_type not in (
            EmbeddingBagCollection,
            EmbeddingCollection,
        ):
            stock_one = defaults[sharder.module_type]
            assert type(sharder) is type(stock_one)
            assert sharder.fused_params == stock_one.fused_params
