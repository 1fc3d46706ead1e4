"""Training on several ranks equals training in one process on the batches of all of them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import DataType, PoolingType, data_type_to_dtype

from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.testing import RankPool, toy

STEPS = 10
LR = 0.05
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR, "eps": 1e-8}


class RowWiseAdagrad(torch.optim.Optimizer):
    """Independent statement of the rule: one accumulator per core row, the mean of its squares."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.dim() < 4:
                p -= LR * p.grad
                continue
            squares = p.grad.square().mean(dim=(1, 2, 3), keepdim=True)
            self.state[p]["sum"] = self.state[p].get("sum", 0) + squares
            p -= LR * p.grad / (self.state[p]["sum"].sqrt() + 1e-8)


@dataclass(frozen=True)
class Case:
    world_size: int = 2
    names: tuple[str, ...] = tuple(toy.ROWS)
    batch_sizes: tuple[int, ...] = (6, 6, 6, 6)
    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    ids: torch.dtype = torch.int64
    max_length: int = 3
    fused_params: tuple[tuple[str, Any], ...] = tuple(toy.SGD.items())
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    truth: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    num_dist_groups: int = 1
    sequence: bool = False

    def make_optimizer(self, params: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=LR)

    def model(self, device: str = "cpu") -> toy.ToyModel:
        if self.sequence:
            return toy.sequence_model(self.names, device)
        tables = toy.configs(self.names, self.pooling)
        return toy.ToyModel(toy.collection(tables, self.is_weighted, device), tables)

    def batch(self, step: int, rank: int) -> toy.ToyBatch:
        return toy.make_batch(
            self.names,
            step,
            rank,
            # The rank without examples is another one in every other step.
            self.batch_sizes[(rank + step % 2) % self.world_size],
            self.is_weighted,
            self.ids,
            self.max_length,
        )


# Row-wise dense tables need equal batches under gloo: the backward pass of TorchRec's
# reduce-scatter is an all-gather of unequal sizes there, which gloo does not have.
UNEVEN = tuple(name for name in toy.ROWS if name != "d_rw")
CASES = {
    "all_shardings": Case(),
    "four_ranks": Case(world_size=4),
    "four_ranks_uneven": Case(names=UNEVEN, world_size=4, batch_sizes=(5, 0, 7, 2)),
    "one_process": Case(world_size=1),
    "table_wise": Case(names=("t_tw", "t_tw2", "t_q")),
    "data_parallel": Case(names=("t_dp", "t_dp2")),
    "one_table_on_four_ranks": Case(names=("t_q",), world_size=4),
    "a_rank_without_samples": Case(names=UNEVEN, batch_sizes=(4, 0)),
    "mean": Case(pooling=PoolingType.MEAN, ids=torch.int32),
    "mean_uneven": Case(names=UNEVEN, pooling=PoolingType.MEAN, batch_sizes=(3, 8)),
    "weighted": Case(names=UNEVEN, is_weighted=True, batch_sizes=(5, 2)),
    "many_empty_bags": Case(max_length=1, names=("t_tw", "t_tw2", "t_dp", "d_rw", "d_cw")),
    "adagrad": Case(
        fused_params=tuple(ADAGRAD.items()),
        optimizer=lambda params: torch.optim.Adagrad(params, lr=LR, eps=1e-8),
    ),
    "rowwise_adagrad": Case(
        names=("t_tw", "t_tw2", "t_q"),
        fused_params=tuple((ADAGRAD | {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}).items()),
        truth=RowWiseAdagrad,
    ),
    "adam": Case(
        names=("t_tw", "t_tw2", "t_q", "t_dp", "t_dp2", "d_dp"),
        fused_params=(("optimizer", EmbOptimType.ADAM), ("learning_rate", 0.01), ("eps", 1e-4)),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    ),
    "dist_groups": Case(num_dist_groups=3),
    "sequence": Case(names=toy.SEQUENCE_NAMES, sequence=True),
    "sequence_four_ranks": Case(
        names=toy.SEQUENCE_NAMES, world_size=4, sequence=True, ids=torch.int32
    ),
    "sequence_one_process": Case(names=toy.SEQUENCE_NAMES, world_size=1, sequence=True),
    "sequence_uneven": Case(
        names=("t_tw", "t_tw2", "t_q", "t_dp", "d_tw"),
        world_size=4,
        batch_sizes=(5, 0, 7, 2),
        sequence=True,
        max_length=1,
    ),
    "sequence_adam_in_groups": Case(
        names=("t_tw", "t_tw2", "t_q", "t_dp", "t_dp2"),
        fused_params=(("optimizer", EmbOptimType.ADAM), ("learning_rate", 0.01), ("eps", 1e-4)),
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
        num_dist_groups=3,
        sequence=True,
    ),
    "settings_of_tt_tables_beside_dense_ones": Case(
        fused_params=tuple(
            (toy.SGD | {"workspace_bytes": 1 << 20, "backend": "reference"}).items()
        ),
    ),
}


def sharded(rank: int, case: Case, init: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = toy.shard(
        case.model("meta"),
        toy.generators(case.names, case.world_size),
        dict(case.fused_params),
        case.num_dist_groups,
    )
    missing = model.load_state_dict(copy.copy(init))
    assert not missing.missing_keys and not missing.unexpected_keys
    optimizer = toy.optimizer_of(model, case.optimizer or case.make_optimizer)
    toy.train_sharded(model, optimizer, [case.batch(step, rank) for step in range(STEPS)])
    return toy.whole_state(model)


def unsharded(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = case.model()
    init = copy.deepcopy(model.state_dict())
    toy.train_unsharded(
        model,
        case.truth or case.optimizer or case.make_optimizer,
        [[case.batch(step, r) for r in range(case.world_size)] for step in range(STEPS)],
    )
    return init, dict(model.state_dict())


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert sorted(a) == sorted(b)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(ranks: RankPool, name: str) -> None:
    """Other world sizes, empty ranks and shared features must not change what is learnt."""
    case = CASES[name]
    init, truth = unsharded(case)
    found = ranks.run(sharded, case, init, world_size=case.world_size)[0]
    assert difference(found, truth) < 1e-5
    # Every tensor moved by far more than the tolerance, so equality says something.
    assert min(float((truth[key] - init[key]).abs().max()) for key in init) > 3e-4


def test_the_comparison_can_fail(ranks: RankPool) -> None:
    case = Case(names=("t_tw", "t_dp"))
    init, truth = unsharded(case)
    wrong = Case(
        names=case.names, fused_params=tuple((toy.SGD | {"learning_rate": LR * 0.9}).items())
    )
    assert difference(ranks.run(sharded, wrong, init)[0], truth) > 1e-4


def test_dist_groups_change_no_bit(ranks: RankPool) -> None:
    """Slices of the features differ in what overlaps only, Adam's last bits included."""
    adam = CASES["adam"]
    case = Case(names=adam.names, fused_params=adam.fused_params, optimizer=adam.optimizer)
    init, _ = unsharded(case)
    found = [
        ranks.run(
            sharded,
            Case(
                names=case.names,
                fused_params=case.fused_params,
                optimizer=case.optimizer,
                num_dist_groups=num_dist_groups,
            ),
            init,
        )[0]
        for num_dist_groups in (1, 2, 5)
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)


def grouped_optimizer(rank: int, init: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    case = CASES["adam"]
    model = toy.shard(case.model("meta"), toy.generators(case.names, 2), dict(case.fused_params))
    model.load_state_dict(copy.copy(init))
    optimizer = toy.optimizer_of(model, case.optimizer, GroupKeyedOptimizer)
    toy.train_sharded(model, optimizer, [case.batch(step, rank) for step in range(STEPS)])
    return toy.whole_state(model)


def test_grouped_optimizer_of_data_parallel_tables_changes_no_bit(ranks: RankPool) -> None:
    case = CASES["adam"]
    init, _ = unsharded(case)
    plain = ranks.run(sharded, case, init)[0]
    grouped = ranks.run(grouped_optimizer, init)[0]
    assert difference(plain, grouped) < 1e-7


def replicas(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # unlike start values on the ranks must not matter
    case = Case(names=("t_dp", "t_dp2", "t_tw"))
    model = toy.shard(case.model("meta"), toy.generators(case.names, 2))
    optimizer = toy.optimizer_of(model, case.make_optimizer)
    toy.train_sharded(model, optimizer, [case.batch(step, rank) for step in range(20)])
    cores = model.module.ebc.embedding_bags["t_dp"].tt_cores
    assert all(isinstance(core, torch.nn.Parameter) and core.grad_fn is None for core in cores)
    with pytest.raises(TypeError, match="cannot be converted"):
        model.bfloat16()
    return [core.detach().clone() for core in cores]


def test_data_parallel_replicas_stay_equal(ranks: RankPool) -> None:
    """Data-parallel tables are leaves to the user, stay bit-equal, and cannot be cast apart."""
    first, second = ranks.run(replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def losses(rank: int, data_type: DataType) -> list[float]:
    names = ("t_tw", "t_dp", "d_tw")
    tables = toy.configs(names, tt_data_type=data_type)
    torch.manual_seed(0)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables), toy.generators(names, 2)
    )
    for table in ("t_tw", "t_dp"):
        for core in getattr(model.module.ebc.embedding_bags[table], "tt_cores", []):
            assert core.dtype is data_type_to_dtype(data_type)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=LR))
    batch = toy.make_batch(names, 0, rank)
    assert model.module.ebc(batch.features).values().dtype is torch.float32
    found = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(batch)[0]
        loss.sum().backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_16_bit_cores_train_like_float32_ones(ranks: RankPool, data_type: DataType) -> None:
    expected = torch.tensor(ranks.run(losses, DataType.FP32))
    found = torch.tensor(ranks.run(losses, data_type))
    gain = expected[:, 0] - expected[:, -1]
    assert (gain > 0.1 * expected[:, 0]).all()
    assert ((found - expected).abs() < 0.05 * gain[:, None]).all()
