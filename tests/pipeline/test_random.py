"""Random models, placements, dist groups and batches in the pipeline equal one process."""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingCollection
from ecorec_torchrec.plan import in_dist_group, tt_data_parallel, tt_table_wise
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.tt import TTSpec

STEPS = 3


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dim: int
    tt: TTSpec | None
    sharding: str
    owner: int
    dist_group: int | None
    features: int

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}_{i}" for i in range(self.features)]

    def placement(self, world_size: int) -> ParameterShardingGenerator:
        generator = {
            "tt_table_wise": lambda: tt_table_wise(self.owner, tt=self.tt),
            "tt_data_parallel": lambda: tt_data_parallel(tt=self.tt),
            "table_wise": lambda: table_wise(self.owner, compute_kernel="fused"),
            "row_wise": lambda: row_wise(compute_kernel="fused"),
            "column_wise": lambda: column_wise([self.owner], compute_kernel="fused"),
            "data_parallel": data_parallel,
        }[self.sharding]()
        return generator if self.dist_group is None else in_dist_group(self.dist_group, generator)


@dataclass(frozen=True)
class Case:
    world_size: int
    sequence: bool
    tables: tuple[Table, ...]
    batch_sizes: tuple[tuple[int, ...], ...]
    """By step, then by rank."""
    num_dist_groups: int

    @staticmethod
    def draw(seed: int) -> "Case":
        rng = random.Random(seed)
        world_size, sequence = rng.randint(1, 4), rng.random() < 0.3
        even = rng.random() < 0.5
        shardings = ["tt_table_wise"] * 4 + ["tt_data_parallel", "table_wise"]
        if not sequence:  # FBGEMM pools data-parallel dense tables of sequences on the CPU
            shardings += ["data_parallel", "column_wise"]
        if even:  # gloo has no all-gather of unequal sizes, which row-wise gradients need
            shardings.append("row_wise")
        tables = []
        for i in range(rng.randint(1, 9)):
            rows, dim = rng.randint(world_size, 90), toy.DIM if sequence else rng.choice([4, 8, 16])
            sharding = rng.choice(shardings)
            tt = TTSpec.suggest(rows, dim, rank=rng.randint(2, 4)) if "tt" in sharding else None
            may_choose = "data_parallel" not in sharding and rng.random() < 0.3
            dist_group = rng.randint(0, 4) if may_choose else None
            owner, features = rng.randrange(world_size), rng.randint(1, 2)
            tables.append(Table(f"t{i}", rows, dim, tt, sharding, owner, dist_group, features))
        batch_sizes = []
        for _ in range(STEPS):
            sizes = [rng.randint(1, 9) for _ in range(world_size)]
            batch_sizes.append(tuple(sizes[:1] * world_size if even else sizes))
        return Case(
            world_size, sequence, tuple(tables), tuple(batch_sizes), rng.choice([1, 2, 3, 5, 8])
        )

    def model(self, device: str = "cpu") -> toy.ToyModel:
        specs = {table.name: table.tt for table in self.tables if table.tt is not None}
        common = [
            {"name": t.name, "num_embeddings": t.rows, "embedding_dim": t.dim,
             "feature_names": t.feature_names}
            for t in self.tables
        ]  # fmt: skip
        if self.sequence:
            configs = [EmbeddingConfig(**fields) for fields in common]
            ec = TTEmbeddingCollection(configs, tt=specs, device=torch.device(device))
            return toy.ToyModel(None, ec=ec)
        bags = [EmbeddingBagConfig(**fields, pooling=PoolingType.SUM) for fields in common]
        ebc = TTEmbeddingBagCollection(bags, tt=specs, device=torch.device(device))
        model = toy.ToyModel(ebc, bags)
        model.linear = nn.Linear(sum(t.dim * t.features for t in self.tables), 1)
        return model

    def batch(self, step: int, rank: int) -> toy.ToyBatch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        size = self.batch_sizes[step][rank]
        values, lengths, keys = [], [], []
        for table in self.tables:
            for feature in table.feature_names:
                keys.append(feature)
                lengths.append(torch.randint(0, 4, (size,), generator=generator))
                count = int(lengths[-1].sum())
                values.append(torch.randint(0, table.rows, (count,), generator=generator))
        features = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
        return toy.ToyBatch(features, torch.randn(size, generator=generator))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=toy.SGD["learning_rate"])


def pipelined(rank: int, case: Case, init: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plan = {table.name: table.placement(case.world_size) for table in case.tables}
    model = toy.shard(case.model("meta"), plan, num_dist_groups=case.num_dist_groups)
    model.load_state_dict(copy.copy(init))
    pipeline = EcoRecTrainPipeline(model, toy.optimizer_of(model, sgd), torch.device("cpu"))
    batches = iter([case.batch(step, rank) for step in range(STEPS)])
    for _ in range(STEPS):
        pipeline.progress(batches)
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    return toy.whole_state(model)


def check(ranks: RankPool, seed: int) -> None:
    case = Case.draw(seed)
    torch.manual_seed(seed)
    model = case.model()
    init = copy.deepcopy(model.state_dict())
    steps = [[case.batch(s, r) for r in range(case.world_size)] for s in range(STEPS)]
    toy.train_unsharded(model, sgd, steps)
    found = ranks.run(pipelined, case, init, world_size=case.world_size)[0]
    truth = model.state_dict()
    assert sorted(found) == sorted(truth)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=f"{name} {case}")


@pytest.mark.parametrize("seed", range(6))
def test_six_random_cases_equal_one_process(ranks: RankPool, seed: int) -> None:
    check(ranks, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 200))
def test_random_cases_equal_one_process(ranks: RankPool, seed: int) -> None:
    check(ranks, seed)
