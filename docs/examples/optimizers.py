"""Optimizers of TT tables: one per table, accumulation, clipping, warm-up, frozen tables, NaN."""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingBagConfig,
    TTSpec,
    get_ecorec_sharders,
    tt_data_parallel,
    tt_table_wise,
)
from ecorec_torchrec.lookup import GroupKeyedOptimizer

TABLES = [
    TTEmbeddingBagConfig(
        1000, 16, "users", feature_names=["user"], tt=TTSpec.suggest(1000, 16, rank=4)
    ),
    TTEmbeddingBagConfig(
        500, 16, "movies", feature_names=["movie"], tt=TTSpec.suggest(500, 16, rank=4)
    ),
]
PLACEMENT = {"users": tt_table_wise(0), "movies": tt_data_parallel()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = TTEmbeddingBagCollection(TABLES, device=torch.device("meta"))
        self.linear = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return (self.linear(self.ebc(features).values()) ** 2).mean()


def shard(model: Model, fused_params: dict) -> DistributedModelParallel:
    plan = construct_module_sharding_plan(
        model.ebc, PLACEMENT, sharder=TTEmbeddingBagCollectionSharder(), device_type="cpu"
    )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=get_ecorec_sharders(fused_params),
    )


def batch() -> KeyedJaggedTensor:
    ids = torch.randint(500, (32,))
    return KeyedJaggedTensor(["user", "movie"], ids, lengths=torch.ones(32, dtype=torch.int64))


def both_optimizers(model: DistributedModelParallel, **options: str) -> CombinedOptimizer:
    # start: both
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,  # table-wise TT tables, and dense ones
            GroupKeyedOptimizer(rest, lambda p: torch.optim.Adam(p, lr=0.01), **options),
        ]
    )
    # end: both
    return optimizer


def one_of_its_own() -> None:
    # start: per_table
    model = Model()
    users = model.ebc.embedding_bags["users"]
    apply_optimizer_in_backward(torch.optim.Adam, users.parameters(), {"lr": 0.004})
    sharded = shard(model, {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05})
    # end: per_table
    print(f"rate of users {sharded.fused_optimizer.param_groups[0]['lr']}")


def accumulate_and_clip() -> None:
    # start: deferred
    fused_params = {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.01,
        "step_in_backward": False,  # gradients stay on the cores until step()
    }
    model = shard(Model(), fused_params)
    optimizer = both_optimizers(model)
    # end: deferred
    # start: accumulate
    optimizer.zero_grad()
    for _ in range(2):
        (model(batch()) / 2).backward()
    optimizer.step()
    # end: accumulate
    # start: clip
    on_one_rank = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    clipped = GradientClippingOptimizer(
        optimizer,
        GradientClipping.NORM,
        max_gradient=1.0,
        enable_global_grad_clip=True,
        param_to_pgs={core: [dist.group.WORLD] for core in on_one_rank.values()},
    )
    clipped.zero_grad()
    model(batch()).backward()
    clipped.step()
    # end: clip
    print(f"norm {float(clipped.last_total_grad_norm):.3f}")


def warm_up() -> None:
    model = shard(Model(), {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1})
    optimizer = both_optimizers(model)
    # start: warm_up
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=100, value=0.1)]
    warm = WarmupOptimizer(optimizer, stages, lr=0.1)
    for _ in range(3):
        warm.zero_grad()
        model(batch()).backward()  # the table-wise tables are updated here, with the rate of now
        warm.step()  # the others here; then the rate rises
    # end: warm_up
    print(f"rate {warm.param_groups[0]['lr']:.4f}")


def freeze() -> None:
    # start: freeze
    model = Model()
    model.ebc.embedding_bags["movies"].requires_grad_(False)
    sharded = shard(model, {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01})
    # end: freeze
    trained = sorted(both_optimizers(sharded).params)
    print(f"trained: {sum('users' in name for name in trained)} cores of users")
    assert not any("movies" in name for name in trained)


def nan_gradients() -> None:
    # start: nonfinite
    fused_params = {
        "optimizer": EmbOptimType.ADAM,
        "learning_rate": 0.01,
        "nonfinite_gradients": "stop",
    }
    model = shard(Model(), fused_params)
    optimizer = both_optimizers(model, nonfinite_gradients="stop")
    # end: nonfinite
    optimizer.zero_grad()
    try:
        (model(batch()) * float("nan")).backward()
    except FloatingPointError as error:
        print(error)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    one_of_its_own()
    accumulate_and_clip()
    warm_up()
    freeze()
    nan_gradients()
    dist.destroy_process_group()
