"""Every way to train TT tables equals one process.

The cells are all combinations of collection, placement, optimizer, storage type, number of ranks
and pooling. `make test` takes a seeded sample of them, `make test-long` all.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.testing import RankPool, toy

STEPS = 4
SAMPLE_SIZE = 60
# Gradients of the first steps are small: an eps that counts keeps Adam from blowing up their noise.
ADAM = {"lr": 0.01, "eps": 1e-3}
NAMES = {"table_wise": ("t_tw", "t_tw2", "t_q"), "data_parallel": ("t_dp", "t_dp2")}


@dataclass(frozen=True)
class Method:
    """An optimizer, by `fused_params` and as the library's."""

    fused_params: Mapping[str, Any]
    library: Callable[[list[Tensor]], Optimizer]


METHODS = {
    "sgd": Method(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05},
        lambda params: SGD(params, lr=0.05),
    ),
    "adagrad": Method(
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.02, "eps": 1e-4},
        lambda params: Adagrad(params, lr=0.02, eps=1e-4),
    ),
    "rowwise_adagrad": Method(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-4},
        lambda params: RowWiseAdagrad(params, lr=0.02, eps=1e-4),
    ),
    "adam": Method({"optimizer": EmbOptimType.ADAM, **ADAM}, lambda params: Adam(params, **ADAM)),
    "adamw": Method(
        {"optimizer": AdamW, **ADAM, "weight_decay": 0.5},
        lambda params: AdamW(params, **ADAM, weight_decay=0.5),
    ),
}


@dataclass(frozen=True)
class Cell:
    collection: str
    placement: str
    method: str
    data_type: DataType
    world_size: int
    pooling: str

    def __str__(self) -> str:
        return "-".join(
            [self.collection, self.placement, self.method]
            + [self.data_type.name.lower(), f"{self.world_size}_ranks", self.pooling]
        )

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[self.placement]

    @property
    def is_weighted(self) -> bool:
        return self.pooling == "weighted"

    @property
    def has_master(self) -> bool:
        """Fused optimizers step 16-bit cores through a float32 copy; a user's own does not."""
        return self.placement == "table_wise" and self.data_type is not DataType.FP32

    def model(self, device: str = "cpu") -> toy.ToyModel:
        if self.collection == "sequence":
            configs = toy.sequence_configs(self.names, self.data_type)
            return toy.ToyModel(None, ec=toy.sequence_collection(configs, device))
        pooling = PoolingType.MEAN if self.pooling == "mean" else PoolingType.SUM
        tables = toy.configs(self.names, pooling, self.data_type)
        return toy.ToyModel(toy.collection(tables, self.is_weighted, device), tables)

    def batch(self, step: int, rank: int) -> toy.ToyBatch:
        return toy.make_batch(self.names, step, rank, is_weighted=self.is_weighted)

    def whole_batch(self, step: int) -> toy.ToyBatch:
        """The batches of all ranks as one."""
        batches = [self.batch(step, rank) for rank in range(self.world_size)]
        features = [batch.features.to_dict() for batch in batches]
        keys = batches[0].features.keys()
        parts = [jagged[key] for key in keys for jagged in features]
        return toy.ToyBatch(
            KeyedJaggedTensor(
                keys,
                torch.cat([part.values() for part in parts]),
                torch.cat([part.weights() for part in parts]) if self.is_weighted else None,
                torch.cat([part.lengths() for part in parts]),
            ),
            torch.cat([batch.labels for batch in batches]),
        )


CELLS = [
    Cell(*cell)
    for cell in itertools.product(
        ("pooled", "sequence"),
        NAMES,
        METHODS,
        (DataType.FP32, DataType.BF16),
        (1, 2, 4),
        ("sum", "mean", "weighted"),
    )
    if cell[0] == "pooled" or cell[-1] == "sum"  # sequences are not pooled
]
SAMPLE = random.Random(3).sample(CELLS, SAMPLE_SIZE)


def train_in_one_process(cell: Cell, start: dict[str, Tensor]) -> dict[str, Tensor]:
    model = cell.model()
    model.load_state_dict(start)
    cores = [p for name, p in model.named_parameters() if ".tt_cores." in name]
    # Row-wise optimizers have one value per core row.
    stepped = [
        p.detach().flatten(1).float() if cell.has_master else p.detach().flatten(1) for p in cores
    ]
    optimizers = [METHODS[cell.method].library(stepped), SGD(model.linear.parameters(), lr=0.05)]
    for step in range(STEPS):
        model.zero_grad()
        (model(cell.whole_batch(step))[0].sum() / cell.world_size).backward()
        for weight, core in zip(stepped, cores, strict=True):
            assert core.grad is not None
            weight.grad = core.grad.flatten(1).to(weight.dtype)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for weight, core in zip(stepped, cores, strict=True):
                core.copy_(weight.view(core.shape))
    return model.state_dict()


def train_on_ranks(rank: int, cell: Cell, start: dict[str, Tensor]) -> dict[str, Tensor]:
    method = METHODS[cell.method]
    plan = toy.generators(cell.names, cell.world_size)
    model = toy.shard(cell.model("meta"), plan, dict(method.fused_params))
    model.load_state_dict(copy.copy(start))
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    cores = {name: p for name, p in rest.items() if ".tt_cores." in name}
    dense = {name: p for name, p in rest.items() if name not in cores}
    optimizers = [model.fused_optimizer]
    optimizers.append(GroupKeyedOptimizer(dense, lambda params: SGD(params, lr=0.05)))
    if cores:
        optimizers.append(GroupKeyedOptimizer(cores, method.library))
    batches = [cell.batch(step, rank) for step in range(STEPS)]
    toy.train_sharded(model, CombinedOptimizer(optimizers), batches)
    return toy.whole_state(model)


def relative_error(cell: Cell, ranks: RankPool, trained_as: Cell | None = None) -> float:
    """How far all parameters are from those of one process, by how far training moved them."""
    torch.manual_seed(5)
    start = copy.deepcopy(cell.model().state_dict())
    expected = train_in_one_process(trained_as or cell, start)
    found = ranks.run(train_on_ranks, cell, start, world_size=cell.world_size)[0]
    assert found.keys() == expected.keys()

    def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
        return sum(float((left[k].float() - right[k].float()).square().sum()) for k in left) ** 0.5

    return distance(found, expected) / distance(start, expected)


def tolerance(cell: Cell) -> float:
    """In bf16, roundings are of the size of the first steps; without a master they add up."""
    if cell.data_type is DataType.FP32:
        return 1e-4
    return 0.05 if cell.has_master else 0.1


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_cell_of_the_sample_equals_one_process(cell: Cell, ranks: RankPool) -> None:
    assert relative_error(cell, ranks) < tolerance(cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_cell_equals_one_process(cell: Cell, ranks: RankPool) -> None:
    assert relative_error(cell, ranks) < tolerance(cell)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
def test_another_optimizer_is_told_apart(data_type: DataType, ranks: RankPool) -> None:
    """Negative control: Adam in the place of AdamW, whose decay moves weights by 0.5 % a step."""
    cell = Cell("pooled", "table_wise", "adamw", data_type, 1, "sum")
    error = relative_error(cell, ranks, trained_as=replace(cell, method="adam"))
    assert error > 2 * tolerance(cell)
