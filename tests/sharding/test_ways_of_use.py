"""The ways to ask for a TT table, and what users see of it once it is sharded."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec.optim as torchrec_optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    get_default_sharders,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.modules import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
)
from ecorec_torchrec.plan import tt_data_parallel, tt_table_wise
from ecorec_torchrec.sharding import (
    ShardedTTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingCollectionSharder,
    get_ecorec_sharders,
)
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.tt import to_dense

NAMES = ("t_tw", "t_tw2", "t_dp", "d_tw")


def build(way: str, names: tuple[str, ...] = NAMES) -> nn.Module:
    plain = toy.configs(names)
    with_shapes = [TTEmbeddingBagConfig(**vars(c), tt=toy.SPECS.get(c.name)) for c in plain]
    meta = torch.device("meta")
    if way == "config":
        return EmbeddingBagCollection(tables=with_shapes, device=meta)
    if way == "config_of_our_collection":
        return TTEmbeddingBagCollection(with_shapes, device=meta)
    if way == "argument":
        return toy.collection(plain, device="meta")
    return EmbeddingBagCollection(tables=plain, device=meta)


def train_way(rank: int, way: str) -> dict[str, Tensor]:
    plan = toy.generators(NAMES, 2)
    if way != "plan":
        plan |= {"t_tw": tt_table_wise(1), "t_tw2": tt_table_wise(1), "t_dp": tt_data_parallel()}
    torch.manual_seed(11)
    model = toy.shard(toy.ToyModel(build(way), toy.configs(NAMES)), plan)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    toy.train_sharded(model, optimizer, [toy.make_batch(NAMES, step, rank) for step in range(3)])
    return toy.whole_state(model)


def test_all_ways_give_the_same_model(ranks: RankPool) -> None:
    ways = ("config", "config_of_our_collection", "argument", "plan")
    first, *others = [ranks.run(train_way, way)[0] for way in ways]
    for other in others:
        assert sorted(first) == sorted(other)
        assert all(torch.equal(first[key], other[key]) for key in first)


def start(rank: int, owners: dict[str, int], seed: int) -> dict[str, Tensor]:
    names = ("d_tw", "t_tw", "t_tw2", "t_dp")
    torch.manual_seed(seed)
    ebc = shard(
        build("argument", names),
        toy.generators(names, dist.get_world_size(), owners),
        sharder=TTEmbeddingBagCollectionSharder(toy.SGD),
        device=torch.device("cpu"),
    )
    return {k: v for k, v in toy.whole_state(ebc).items() if "tt_cores" in k}


def test_start_values_do_not_depend_on_the_placement(ranks: RankPool) -> None:
    torch.manual_seed(5)
    truth = toy.collection(toy.configs(("d_tw", "t_tw", "t_tw2", "t_dp"))).state_dict()
    placements = ({}, {"t_tw": 0, "d_tw": 1}, {"t_tw": -1, "t_tw2": -1, "t_dp": 1})
    for owners in placements:
        cores = ranks.run(start, owners, 5)[0]
        assert cores and all(torch.equal(cores[key], truth[key]) for key in cores)


def keep(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(rank)
    names = ("t_tw", "t_dp")
    source = toy.collection(toy.configs(names))
    before = {k: v.clone() for k, v in source.state_dict().items()}
    sharded = shard(
        source,
        toy.generators(names, 2),
        sharder=TTEmbeddingBagCollectionSharder(toy.SGD),
        device=torch.device("cpu"),
    )
    assert isinstance(sharded, ShardedTTEmbeddingBagCollection)
    kept = toy.whole_state(sharded)
    sharded.reset_parameters()
    return before, kept, toy.whole_state(sharded)


def test_cores_of_a_collection_with_values_are_kept_until_reset(ranks: RankPool) -> None:
    """Table-wise from the owner, data-parallel from rank 0."""
    (first, kept, reset), (second, _, _) = ranks.run(keep)
    for k in range(3):
        owner, replica = f"embedding_bags.t_tw.tt_cores.{k}", f"embedding_bags.t_dp.tt_cores.{k}"
        assert torch.equal(kept[owner], second[owner])
        assert torch.equal(kept[replica], first[replica])
        assert not torch.equal(reset[owner], kept[owner])
        assert not torch.equal(reset[replica], kept[replica])


def init_settings(rank: int) -> list[tuple[float, float]]:
    def table(name: str, **settings: Any) -> TTEmbeddingBagConfig:
        spec = toy.SPECS["t_tw"]
        return TTEmbeddingBagConfig(58, 16, name=name, feature_names=[name], tt=spec, **settings)

    tables = [
        table("bounds", weight_init_min=1.0, weight_init_max=3.0),
        table("constant", init_fn=lambda w: nn.init.constant_(w, 0.25)),
    ]
    ebc = shard(
        TTEmbeddingBagCollection(tables, device=torch.device("meta")),
        {"bounds": tt_table_wise(0), "constant": tt_data_parallel()},
        sharder=TTEmbeddingBagCollectionSharder(toy.SGD),
        device=torch.device("cpu"),
    )
    state = toy.whole_state(ebc)
    dense = [
        to_dense([state[f"embedding_bags.{t.name}.tt_cores.{k}"] for k in range(3)], t.tt)
        for t in tables
    ]
    return [(float(weight.mean()), float(weight.std())) for weight in dense]


def test_start_values_follow_the_table_config(ranks: RankPool) -> None:
    (mean, std), (constant, zero) = ranks.run(init_settings, world_size=1)[0]
    assert mean == pytest.approx(2.0, abs=0.3) and std == pytest.approx(2 / 12**0.5, rel=0.3)
    assert constant == pytest.approx(0.25) and zero == pytest.approx(0.0, abs=1e-6)


def in_backward(rank: int, ours: bool) -> dict[str, Tensor]:
    names = ("t_tw", "t_tw2", "d_tw")
    torch.manual_seed(2)
    ebc = build("argument" if ours else "plan", names)
    for name, kwargs in (("t_tw", {"lr": 0.02, "weight_decay": 0.1}), ("t_tw2", {"lr": 0.5})):
        params = ebc.embedding_bags[name].parameters()
        apply_optimizer_in_backward(torch.optim.AdamW, params, kwargs)
    params = ebc.embedding_bags["d_tw"].parameters()
    apply_optimizer_in_backward(torchrec_optim.SGD, params, {"lr": 0.05})
    model = toy.shard(toy.ToyModel(ebc, toy.configs(names)), toy.generators(names, 2), None)
    if rank == 1:  # unlike learning rates, unlike groups
        rates = {group["lr"] for group in model.fused_optimizer.param_groups}
        assert rates == {0.02, 0.5}
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    toy.train_sharded(model, optimizer, [toy.make_batch(names, step, rank) for step in range(4)])
    return toy.whole_state(model)


def test_apply_optimizer_in_backward_reaches_the_cores(ranks: RankPool) -> None:
    """On the weight of a stock collection and on the cores of ours, with torch's own arguments."""
    names = ("t_tw", "t_tw2", "d_tw")
    tables = toy.configs(names)
    first, second = (ranks.run(in_backward, ours)[0] for ours in (True, False))
    assert all(torch.equal(first[key], second[key]) for key in first)

    class PerTable(torch.optim.SGD):
        def __init__(self, params: list[nn.Parameter]) -> None:
            named = dict(truth.named_parameters())
            rest = [p for name, p in named.items() if ".t_" not in name]
            super().__init__(rest, lr=0.05)
            self.others = [
                torch.optim.AdamW([p for n, p in named.items() if f".{t}." in n], **kwargs)
                for t, kwargs in (
                    ("t_tw", {"lr": 0.02, "weight_decay": 0.1}),
                    ("t_tw2", {"lr": 0.5}),
                )
            ]

        def step(self, closure: None = None) -> None:
            super().step()
            for other in self.others:
                other.step()
                other.zero_grad()

    truth = toy.ToyModel(toy.collection(tables), tables)
    truth.load_state_dict(ranks.run(initial, names)[0])
    toy.train_unsharded(
        truth, PerTable, [[toy.make_batch(names, step, r) for r in range(2)] for step in range(4)]
    )
    expected = truth.state_dict()
    # Adam's first steps divide tiny gradients by their own size.
    assert max(float((first[key] - expected[key]).abs().max()) for key in first) < 1e-4


def initial(rank: int, names: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ebc = build("argument", names)
    model = toy.shard(toy.ToyModel(ebc, toy.configs(names)), toy.generators(names, 2))
    return toy.whole_state(model)


def evaluate(rank: int) -> tuple[str, float]:
    names = ("t_tw", "t_tw2", "t_dp")
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables),
        toy.generators(names, 2),
        fused_params=None,
    )
    batch = toy.make_batch(names, 0, rank)
    model.eval()
    with torch.inference_mode():
        _, logits = model(batch)
    model.train()
    before = toy.whole_state(model)
    with pytest.raises(ValueError) as caught:
        model(batch)[0].sum().backward()
    # All ranks stopped before a collective: they still can talk.
    dist.barrier()
    after = toy.whole_state(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return str(caught.value), float(logits.sum())


def test_without_an_optimizer_evaluation_works_and_training_is_refused(ranks: RankPool) -> None:
    """Never silent SGD, and no need for optimizer arguments where nothing is trained."""
    for message, logits in ranks.run(evaluate):
        assert "TT tables ['t_tw', 't_tw2'] have no optimizer" in message
        assert logits == logits


def only_looked_up(rank: int) -> tuple[list[str], dict[str, list[int]], set[str]]:
    names = ("t_tw", "t_dp")
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables), toy.generators(names, 2)
    )
    visible = [name for name, _ in model.named_parameters()]
    before = toy.whole_state(model)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    # Row 7 of a 3 x 4 x 5 table is (0, 1, 2), row 46 is (2, 1, 1).
    features = KeyedJaggedTensor(
        ["f_t_tw", "f_t_tw_b", "f_t_dp"], torch.tensor([7, 46]), lengths=torch.tensor([1, 0, 1])
    )
    toy.train_sharded(model, optimizer, [toy.ToyBatch(features, torch.ones(1))])
    after = toy.whole_state(model)
    changed = {}
    for key in after:
        if "tt_cores" in key and after[key].numel():
            rows = (after[key] != before[key]).flatten(1).any(1)
            changed[key] = rows.nonzero().flatten().tolist()
    return visible, changed, set(model.state_dict())


def test_a_step_changes_the_rows_looked_up_and_only_those(ranks: RankPool) -> None:
    """Fused cores have no gradient after a step, yet they train, and under their own names."""
    cores = [f"ebc.embedding_bags.{t}.tt_cores.{k}" for t in ("t_tw", "t_dp") for k in range(3)]
    visible, changed, saved = ranks.run(only_looked_up)[0]
    assert sorted(cores) == sorted(n for n in visible if "tt_cores" in n) and saved >= set(cores)
    assert [changed[name] for name in cores] == [[0], [1], [2], [2], [1], [1]]


def freeze(
    rank: int, names: tuple[str, ...], frozen: tuple[str, ...]
) -> tuple[dict[str, bool], list[str]]:
    ebc = build("argument", names)
    for name in frozen:
        ebc.embedding_bags[name].tt_cores.requires_grad_(False)
    model = toy.shard(toy.ToyModel(ebc, toy.configs(names)), toy.generators(names, 2))
    optimizer = toy.optimizer_of(
        model, lambda params: torch.optim.AdamW(params, lr=0.05), GroupKeyedOptimizer
    )
    before = toy.whole_state(model)
    toy.train_sharded(model, optimizer, [toy.make_batch(names, s, rank) for s in range(3)])
    after = toy.whole_state(model)
    model.eval()
    model(toy.make_batch(names, 9, rank))
    return {key: torch.equal(after[key], before[key]) for key in after}, list(optimizer.params)


@pytest.mark.parametrize(
    ("names", "frozen"),
    [
        (("t_tw", "t_q", "t_dp"), ("t_tw",)),
        (("t_tw", "t_dp", "t_dp2"), ("t_dp",)),
        (("t_tw", "t_dp", "t_dp2"), ("t_dp", "t_dp2")),
        (("t_tw", "t_tw2", "t_dp"), ("t_tw", "t_tw2", "t_dp")),
    ],
    ids=["table-wise", "data-parallel", "all replicas", "all tables"],
)
def test_frozen_tables_stay_as_they_are(
    ranks: RankPool, names: tuple[str, ...], frozen: tuple[str, ...]
) -> None:
    """A rank with nothing but a frozen table takes part in the backward pass of the others."""
    same, optimized = ranks.run(freeze, names, frozen)[0]
    for key, value in same.items():
        assert value == any(f".{name}." in key for name in frozen)
    assert not any(f".{name}." in key for key in optimized for name in frozen)


def own_optimizer(rank: int) -> bool:
    names = ("t_dp",)
    fused_params = {"optimizer": EmbOptimType.NONE}
    model = toy.shard(
        toy.ToyModel(build("argument", names), toy.configs(names)),
        toy.generators(names, 2),
        fused_params,
    )
    before = toy.whole_state(model)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    toy.train_sharded(model, optimizer, [toy.make_batch(names, 0, rank)])
    return any(torch.equal(before[key], value) for key, value in toy.whole_state(model).items())


def test_no_optimizer_in_backward_does_not_freeze_replicas(ranks: RankPool) -> None:
    assert not any(ranks.run(own_optimizer))


def freeze_dense(rank: int) -> None:
    names = ("t_tw", "d_tw", "d_dp")
    ebc = build("argument", names)
    for name in ("d_tw", "d_dp"):
        ebc.embedding_bags[name].requires_grad_(False)
    with pytest.warns(UserWarning) as caught:
        model = toy.shard(toy.ToyModel(ebc, toy.configs(names)), toy.generators(names, 2))
    messages = [str(w.message) for w in caught if "requires_grad" in str(w.message)]
    assert [name for name in names if any(f"dense table {name!r}" in m for m in messages)] == [
        "d_tw",
        "d_dp",
    ]
    cores = [p for n, p in model.named_parameters() if "tt_cores" in n and p.numel()]
    assert rank == 0 or cores
    for core in cores:
        assert core.requires_grad_(True) is core
        with pytest.raises(ValueError, match="freeze a table's cores before the model is sharded"):
            core.requires_grad_(False)


def test_freezing_that_has_no_effect_is_told(ranks: RankPool) -> None:
    ranks.run(freeze_dense)


def marked_replicas(rank: int) -> None:
    ebc = build("argument", ("t_dp",))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    with pytest.warns(UserWarning, match="is ignored for TT table 't_dp', which is data-parallel"):
        toy.shard(toy.ToyModel(ebc, toy.configs(("t_dp",))), toy.generators(("t_dp",), 2))


def test_optimizer_in_backward_of_replicas_is_ignored_aloud(ranks: RankPool) -> None:
    ranks.run(marked_replicas)


class TwoCollections(nn.Module):
    """Two collections with a table of the same name, TT in one and dense in the other."""

    def __init__(self) -> None:
        super().__init__()
        tt = TTEmbeddingBagConfig(58, 16, name="t", feature_names=["a"], tt=toy.SPECS["t_tw"])
        dense = EmbeddingBagConfig(30, 16, name="t", feature_names=["a"])
        self.first = TTEmbeddingBagCollection([tt], device=torch.device("meta"))
        self.second = EmbeddingBagCollection(tables=[dense], device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        first, second = self.first(features), self.second(features)
        return (first["a"] * second["a"]).sum()


def stock_beside_ours(rank: int) -> tuple[dict[str, Tensor], list[str]]:
    model = TwoCollections()
    sharder = TTEmbeddingBagCollectionSharder()
    plan = {
        "first": construct_module_sharding_plan(
            model.first, {"t": tt_table_wise(1)}, sharder=sharder, device_type="cpu"
        ),
        "second": construct_module_sharding_plan(
            model.second, {"t": table_wise(0, compute_kernel="fused")}, device_type="cpu"
        ),
    }
    dmp = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plan),
        sharders=get_ecorec_sharders(
            {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
        ),
    )
    features = KeyedJaggedTensor(["a"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    before = toy.whole_state(dmp)
    dmp(features).backward()
    after = toy.whole_state(dmp)
    assert all(not torch.equal(before[key], after[key]) for key in after) or rank != 0
    return after, sorted(dmp.fused_optimizer.state_dict()["state"])


def test_tables_of_equal_name_in_two_collections_do_not_mix(ranks: RankPool) -> None:
    (state, on_first), (_, on_second) = ranks.run(stock_beside_ours)
    assert state["second.embedding_bags.t.weight"].shape == (30, 16)
    assert state["first.embedding_bags.t.tt_cores.0"].shape == (3, 1, 2, 3)
    assert on_first == ["second.embedding_bags.t.weight"]
    assert on_second == [f"first.embedding_bags.t.tt_cores.{k}" for k in range(3)]


def test_sharders_are_the_default_ones_but_for_pooled_and_sequence_collections() -> None:
    ours = {s.module_type: s for s in get_ecorec_sharders(toy.SGD, num_dist_groups=2)}
    assert ours.keys() == {s.module_type for s in get_default_sharders()} | {
        TTEmbeddingBagCollection,
        TTEmbeddingCollection,
    }
    for module_type in (EmbeddingBagCollection, TTEmbeddingBagCollection):
        assert isinstance(ours[module_type], TTEmbeddingBagCollectionSharder)
    for module_type in (EmbeddingCollection, TTEmbeddingCollection):
        assert isinstance(ours[module_type], TTEmbeddingCollectionSharder)


def convert(rank: int) -> None:
    names = ("t_tw", "t_dp", "t_q")
    model = toy.shard(toy.model_of_both(names, "meta"), toy.generators(names, 2))
    batch = toy.make_batch(names, 0, rank)
    expected = model(batch)[1]
    assert model.to(torch.device("cpu")).float() is model  # nothing to convert
    for change in (
        lambda: model.half(),
        lambda: model.to(torch.float64),
        lambda: model.to("meta"),
        lambda: model.module.ebc.to(torch.bfloat16),
        lambda: model.module.ec.to(torch.bfloat16),
    ):
        with pytest.raises(TypeError, match="cannot be converted .* set data_type .* and the dev"):
            change()
        for parameter in model.module.linear.parameters():  # converted before the tables are
            parameter.data = parameter.data.float()
    assert torch.equal(model(batch)[1], expected)


def test_sharded_tables_cannot_be_converted(ranks: RankPool) -> None:
    """A new storage would part what is looked up from what is trained and saved."""
    ranks.run(convert)


def train_by_pickled_plan(rank: int) -> list[dict[str, Tensor]]:
    names = ("t_tw", "t_dp", "d_tw")
    found = []
    for copy_of in (lambda plan: plan, lambda plan: pickle.loads(pickle.dumps(plan))):
        torch.manual_seed(4)
        model = toy.ToyModel(build("argument", names), toy.configs(names))
        entries = construct_module_sharding_plan(
            model.ebc,
            toy.generators(names, 2),
            sharder=TTEmbeddingBagCollectionSharder(),
            device_type="cpu",
        )
        plan = copy_of(ShardingPlan({"ebc": entries}))
        assert plan.plan["ebc"]["t_tw"] == entries["t_tw"]
        dmp = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=get_ecorec_sharders(toy.SGD)
        )
        optimizer = toy.optimizer_of(dmp, lambda params: torch.optim.SGD(params, lr=0.05))
        toy.train_sharded(dmp, optimizer, [toy.make_batch(names, 0, rank)])
        found.append(toy.whole_state(dmp))
    return found


def test_plans_can_be_sent(ranks: RankPool) -> None:
    """Planners make a plan on one rank and pickle it for the others."""
    first, second = ranks.run(train_by_pickled_plan)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
