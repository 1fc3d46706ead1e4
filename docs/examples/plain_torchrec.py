"""A model in plain TorchRec, before its migration; migrated.py is the same with TT tables.

torchrun --nproc-per-node 2 docs/examples/plain_torchrec.py
"""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


class Model(nn.Module):
    def __init__(self, tables: list[EmbeddingBagConfig]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = nn.Linear(sum(table.embedding_dim for table in tables), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model(
    [
        EmbeddingBagConfig(
            embedding_dim=32, num_embeddings=200_000, name="users", feature_names=["u"]
        ),
        EmbeddingBagConfig(embedding_dim=32, num_embeddings=24, name="hours", feature_names=["h"]),
    ]
)
fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05}
sharders = [EmbeddingBagCollectionSharder(fused_params)]
topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
constraints = {"users": ParameterConstraints(pooling_factors=[1.0])}
planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
dense_optimizer = KeyedOptimizerWrapper(dense_parameters, lambda p: torch.optim.Adam(p, lr=0.01))
optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])

for step in range(20):
    users, hours = torch.randint(200_000, (64,)), torch.randint(24, (64,))
    ids, lengths = torch.cat([users, hours]), torch.ones(128, dtype=torch.int64)
    features = KeyedJaggedTensor(["u", "h"], ids, lengths=lengths)
    optimizer.zero_grad()
    logits = model(features)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, (hours < 12).float())
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(sum(p.numel() for n, p in model.named_parameters() if ".users." in n), "user parameters")
dist.destroy_process_group()
