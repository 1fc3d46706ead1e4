"""State dicts and checkpoints: one format whatever the placement and the number of ranks.

The model has a pooled and a sequence collection.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.shard import shard as torchrec_shard
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.plan import tt_table_wise
from ecorec_torchrec.sharding import TTEmbeddingBagCollectionSharder
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.tt import TTSpec, from_dense, to_dense

NAMES = ("t_tw", "t_tw2", "t_q", "t_dp", "t_dp2", "d_dp")
ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01}
# Table-wise tables change owner or become data-parallel, and the other way round.
MOVED = {"t_tw": 0, "t_tw2": -1, "t_dp": 0}
STEPS = 4


def adam(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sharded_model(owners: dict[str, int]) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    plan = toy.generators(NAMES, dist.get_world_size(), owners)
    model = toy.shard(toy.model_of_both(NAMES, "meta"), plan, ADAM)
    return model, toy.optimizer_of(model, adam, GroupKeyedOptimizer)


def batches(first: int, last: int, rank: int, world_size: int) -> list[toy.ToyBatch]:
    """The same 12 examples per step on every number of ranks."""
    return [toy.make_batch(NAMES, step, rank, 12 // world_size) for step in range(first, last)]


def save(rank: int, folder: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model, optimizer = sharded_model({})
    toy.train_sharded(model, optimizer, batches(0, STEPS, rank, 2))
    dcp.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, checkpoint_id=folder)
    return outputs(model)


def outputs(model: torch.nn.Module, names: Sequence[str] = NAMES) -> list[torch.Tensor]:
    """Pooled rows and rows of hundreds of ids of every feature, in the order of their names."""
    with torch.no_grad():
        features = toy.make_batch(names, 99, 0, batch_size=170).features
        if isinstance(model, DistributedModelParallel):
            model = model.module
        pooled, sequences = model.ebc(features), model.ec(features)
        found = [pooled[name] for name in sorted(pooled.keys())]
        found += [sequences[name].values() for name in sorted(sequences.keys())]
        return [torch.clone(tensor) for tensor in found]


def load_and_go_on(rank: int, folder: str, owners: dict[str, int]) -> tuple[list, dict]:
    torch.manual_seed(4)
    model, optimizer = sharded_model(owners)
    state = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["opt"])
    found = outputs(model)
    # The ranks' losses are averaged: a step on W ranks is one on 2 with another loss scale, so
    # every rank is fed what both ranks of the straight run were, in turn.
    for step in range(STEPS, STEPS + 3):
        optimizer.zero_grad()
        loss = sum(model(toy.make_batch(NAMES, step, r, 6))[0] for r in range(2)) / 2
        loss.sum().backward()
        optimizer.step()
    return found, toy.whole_state(model)


@pytest.fixture(scope="module")
def checkpoint(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, ranks.run(save, str(folder))[0]


def load_unsharded(folder: Path) -> tuple[toy.ToyModel, GroupKeyedOptimizer]:
    model = toy.model_of_both(NAMES)
    optimizer = GroupKeyedOptimizer(dict(model.named_parameters()), adam)
    state = {"model": model.state_dict(), "opt": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["opt"])
    return model, optimizer


def test_checkpoint_of_two_ranks_loads_unsharded(
    checkpoint: tuple[Path, list[torch.Tensor]],
) -> None:
    folder, expected = checkpoint
    model, _ = load_unsharded(folder)
    for found, wanted in zip(outputs(model), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_checkpoint_of_two_ranks_loads_on_any_number(
    ranks: RankPool, checkpoint: tuple[Path, list[torch.Tensor]], world_size: int
) -> None:
    """Identical outputs after loading, and identical training: the optimizer state moved too."""
    folder, expected = checkpoint
    straight, optimizer = load_unsharded(folder)
    for step in range(STEPS, STEPS + 3):
        optimizer.zero_grad()
        loss = sum(straight(toy.make_batch(NAMES, step, r, 6))[0] for r in range(2)) / 2
        loss.sum().backward()
        optimizer.step()
    owners = MOVED if world_size > 1 else {}
    found, state = ranks.run(load_and_go_on, str(folder), owners, world_size=world_size)[0]
    for output, wanted in zip(found, expected, strict=True):
        assert torch.equal(output, wanted)
    truth = straight.state_dict()
    assert sorted(state) == sorted(truth)
    assert max(float((state[key] - truth[key]).abs().max()) for key in truth) < 1e-5


def optimizer_state(rank: int) -> tuple[list[str], list[str]]:
    model, optimizer = sharded_model({})
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    fused = model.fused_optimizer.state_dict()["state"]
    short = copy.deepcopy(model.fused_optimizer.state_dict())
    if fused:
        short["state"].pop(next(iter(fused)))
        with pytest.raises(ValueError, match="parameter count"):
            model.fused_optimizer.load_state_dict(short)
    return sorted(fused), sorted(name for name, _ in model.named_parameters())


def test_names_of_parameters_and_optimizer_state_are_those_of_the_unsharded_model(
    ranks: RankPool,
) -> None:
    expected = {name for name, _ in toy.model_of_both(NAMES).named_parameters()}
    found = ranks.run(optimizer_state)
    for (fused, parameters), tables in zip(found, (("t_q",), ("t_tw", "t_tw2")), strict=True):
        cores = {
            f"{collection}.{t}.tt_cores.{k}"
            for collection in ("ebc.embedding_bags", "ec.embeddings")
            for t in tables
            for k in range(3)
        }
        assert set(fused) == cores
        assert set(parameters) == expected


def as_dtensors(rank: int, folder: str) -> dict[str, str]:
    names = ("t_tw", "t_dp", "d_tw")
    env = ShardingEnv(2, rank, dist.group.WORLD, output_dtensor=True)

    def build(owners: dict[str, int]) -> DistributedModelParallel:
        plan = toy.generators(names, 2, owners)
        return toy.shard(toy.model_of_both(names, "meta"), plan, env=env)

    torch.manual_seed(1)
    model = build({})
    state = model.state_dict()
    expected = outputs(model, names)
    dcp.save({"model": state}, checkpoint_id=folder)
    torch.manual_seed(2)
    other = build({"t_tw": 0})
    loaded = other.state_dict()
    dcp.load({"model": loaded}, checkpoint_id=folder)
    other.load_state_dict(loaded)
    torch.testing.assert_close(outputs(other, names), expected, rtol=0, atol=0)
    return {key: type(value).__name__ for key, value in state.items()}


def test_state_as_dtensors_where_the_environment_asks_for_them(
    ranks: RankPool, tmp_path: Path
) -> None:
    for kinds in ranks.run(as_dtensors, str(tmp_path)):
        for tables in ("ebc.embedding_bags", "ec.embeddings"):
            assert kinds[f"{tables}.t_tw.tt_cores.0"] == DTensor.__name__
            assert kinds[f"{tables}.d_tw.weight"] == DTensor.__name__
            assert kinds[f"{tables}.t_dp.tt_cores.0"] == "Tensor"


def from_pretrained(rank: int, cores: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("t_q", "t_dp")
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables), toy.generators(names, 2)
    )
    result = model.load_state_dict(dict(cores), strict=False)
    assert not result.unexpected_keys
    ids = torch.arange(24)
    features = KeyedJaggedTensor(
        ["f_t_q", "f_t_dp"], ids.repeat(2), lengths=torch.ones(48, dtype=torch.int64)
    )
    pooled = model.module.ebc(features)
    return torch.stack([pooled["f_t_q"], pooled["f_t_dp"]]).detach()


def test_training_can_start_from_a_dense_table(ranks: RankPool) -> None:
    """Pre-trained dense weights become cores, and load into a sharded model."""
    cores, dense = {}, []
    for name in ("t_q", "t_dp"):
        spec = toy.SPECS[name]
        weight = to_dense([torch.randn(shape) for shape in spec.core_shapes], spec)
        found, error = from_dense(weight, spec)
        assert error < 1e-5
        dense.append(weight[:24])
        cores |= {f"ebc.embedding_bags.{name}.tt_cores.{k}": c for k, c in enumerate(found)}
    for pooled in ranks.run(from_pretrained, cores):
        torch.testing.assert_close(pooled, torch.stack(dense), rtol=1e-4, atol=1e-4)


def other_placement(rank: int) -> list[str]:
    """State dicts of one placement loaded into another without a checkpoint in between."""
    names = ("t_tw", "t_dp")
    tables = toy.configs(names)
    messages = []
    for owners in ({"t_tw": 0}, {"t_tw": -1}):
        source, target = (
            toy.shard(
                toy.ToyModel(toy.collection(tables, device="meta"), tables),
                toy.generators(names, 2, placed),
            )
            for placed in ({}, owners)
        )
        state = source.state_dict()
        assert isinstance(state["ebc.embedding_bags.t_tw.tt_cores.0"], ShardedTensor)
        try:
            target.load_state_dict(state)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_state_dict_without_this_ranks_values_is_refused_by_name(ranks: RankPool) -> None:
    first, second = ranks.run(other_placement)
    for message in first:
        assert "t_tw.tt_cores.0" in message and "another rank" in message
    assert second == ["", ""]


def few_rows(rank: int, folder: str) -> dict[str, torch.Tensor]:
    tables = [
        EmbeddingBagConfig(num_embeddings=1, embedding_dim=8, name="one", feature_names=["a"]),
        EmbeddingBagConfig(num_embeddings=6, embedding_dim=8, name="six", feature_names=["b"]),
    ]
    tt = {"one": TTSpec(1, (1, 1, 1), (2, 2, 2), (2, 2))}

    def build(owner: int) -> torch.nn.Module:
        return torchrec_shard(
            TTEmbeddingBagCollection(tables, tt, device=torch.device("meta")),
            {"one": tt_table_wise(owner), "six": row_wise(compute_kernel="fused")},
            sharder=TTEmbeddingBagCollectionSharder(toy.SGD),
            device=torch.device("cpu"),
        )

    model, other = build(3), build(1)
    expected = toy.whole_state(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    other.load_state_dict(state)
    torch.testing.assert_close(toy.whole_state(other), expected, rtol=0, atol=0)
    return expected


def test_tables_with_fewer_rows_than_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """A rank whose shard has no rows saves and loads like the others."""
    state = ranks.run(few_rows, str(tmp_path), world_size=4)[0]
    assert state["embedding_bags.one.tt_cores.1"].shape == (1, 2, 2, 2)
    assert all(value.abs().sum() > 0 for value in state.values())
