"""Sequence collections under the planner, alone and beside a pooled one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.modules import TTEmbeddingCollection
from ecorec_torchrec.plan import TT_COMPUTE_KERNEL, load_plan, save_plan
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import ShardedTTEmbeddingCollection, get_ecorec_sharders
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.tt import TTSpec

META = torch.device("meta")
MIB = 2**20
MOVIES = TTSpec(100_000, (40, 50, 50), (4, 4, 4), (8, 8))
MAY_BE_TT = {name: EcoRecConstraints(tt_ranks=(8,)) for name in ("users", "movies")}


class TwoTowers(nn.Module):
    """Users are pooled, the movies of a history are not; both have a small table beside them."""

    def __init__(self, holds_cores: bool = False) -> None:
        super().__init__()
        users = {"users": 200_000, "genders": 3}
        movies = {"movies": 100_000, "weekdays": 7}
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(n, 64, name, feature_names=[name]) for name, n in users.items()],
            device=META,
        )
        tables = [EmbeddingConfig(n, 64, name, feature_names=[name]) for name, n in movies.items()]
        self.ec: EmbeddingCollection = (
            TTEmbeddingCollection(tables, {"movies": MOVIES}, META)
            if holds_cores
            else EmbeddingCollection(tables, device=META)
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, sequences = self.ebc(features), self.ec(features)
        return pooled.values().sum() + sequences["movies"].values().square().sum()


def tt_tables(plan: object) -> set[str]:
    return {
        f"{path}.{name}"
        for path, entries in plan.plan.items()
        for name, entry in entries.items()
        if entry.compute_kernel == TT_COMPUTE_KERNEL
    }


@pytest.mark.parametrize(
    ("cap_mib", "compressed"),
    [(2048, set()), (40, set()), (32, {"ebc.users"}), (8, {"ebc.users", "ec.movies"})],
)
def test_tables_of_both_collections_turn_tt_as_memory_shrinks(
    topology, sharders, cap_mib, compressed
) -> None:
    planner = EcoRecPlanner(topology(cap_mib), batch_size=64, constraints=MAY_BE_TT, debug=False)
    plan = planner.plan(TwoTowers(), sharders)
    assert tt_tables(plan) == compressed
    assert all(rank.needed_bytes <= rank.cap_bytes for rank in planner.report.ranks)


def test_a_collection_that_holds_cores_stays_tt(topology, sharders, tmp_path: Path) -> None:
    """However much memory there is, with the shape it has; and so it is in a plan file."""
    model = TwoTowers(holds_cores=True)
    plan = EcoRecPlanner(topology(2048), batch_size=64, debug=False).plan(model, sharders)
    assert tt_tables(plan) == {"ec.movies"} and plan.plan["ec"]["movies"].tt == MOVIES
    save_plan(plan, tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml", model, world_size=2)
    assert loaded.plan == plan.plan


def train_planned(rank: int) -> tuple[set[str], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, sharders = TwoTowers(), get_ecorec_sharders(toy.SGD)
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=8 * MIB)
    planner = EcoRecPlanner(topology, batch_size=64, constraints=MAY_BE_TT, debug=False)
    plan = planner.collective_plan(model, sharders)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    assert isinstance(dmp.module.ec, ShardedTTEmbeddingCollection)
    before = toy.whole_state(dmp)
    features = KeyedJaggedTensor(
        ["users", "genders", "movies", "weekdays"],
        torch.tensor([7, 2, 99_999, 5, 6]),
        lengths=torch.tensor([1, 1, 2, 1]),
    )
    dmp(features).backward()
    return tt_tables(plan), before, toy.whole_state(dmp)


def test_what_was_planned_trains(ranks: RankPool) -> None:
    tables, before, after = ranks.run(train_planned)[0]
    assert tables == {"ebc.users", "ec.movies"}
    cores = [f"ebc.embedding_bags.users.tt_cores.{k}" for k in range(3)]
    cores += [f"ec.embeddings.movies.tt_cores.{k}" for k in range(3)]
    assert set(cores) <= set(before)
    assert all(not torch.equal(before[name], after[name]) for name in cores)
