"""Checkpoints of a model with TT tables in a loop of your own. Runs on one process or several:

torchrun --nproc-per-node 2 docs/examples/checkpoints.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecorec_torchrec import (
    EcoRecPlanner,
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTSpec,
    get_ecorec_sharders,
)
from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.train.convert import RankChoice, compress
from ecorec_torchrec.train.initial_weights import load_weights
from ecorec_torchrec.train.saved_tables import read_tt_specs

NUM_USERS, DIM, STEPS, DEVICE = 5000, 16, 4, torch.device("cpu")
FOLDER = Path(sys.argv[1])
USERS = TTSpec.suggest(NUM_USERS, DIM, rank=8)


def tables(tt: TTSpec | None) -> list[EmbeddingBagConfig]:
    users = {"num_embeddings": NUM_USERS, "embedding_dim": DIM, "feature_names": ["user"]}
    hours = EmbeddingBagConfig(
        name="hours", num_embeddings=24, embedding_dim=DIM, feature_names=["hour"]
    )
    if tt is None:
        return [EmbeddingBagConfig(name="users", **users), hours]
    return [TTEmbeddingBagConfig(name="users", tt=tt, **users), hours]


class Model(nn.Module):
    def __init__(self, ebc: nn.Module, num_outputs: int = 1) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(2 * DIM, num_outputs)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


def build(num_outputs: int = 1) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    ebc = EmbeddingBagCollection(tables=tables(USERS), device=torch.device("meta"))
    model: nn.Module = Model(ebc, num_outputs)
    sharders = get_ecorec_sharders(
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    )
    world_size = dist.get_world_size()
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=world_size, local_world_size=world_size),
        kernel_config=KernelConfig(compute_device="cpu"),
    )
    planner = EcoRecPlanner(topology=topology, batch_size=32)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=sharders)
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = GroupKeyedOptimizer(rest, lambda params: torch.optim.Adam(params, lr=0.01))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam])


def train(model: nn.Module, optimizer: CombinedOptimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    users = torch.randint(NUM_USERS, (32,), generator=generator)
    hours = torch.randint(24, (32,), generator=generator)
    ones = torch.ones(64, dtype=torch.int64)
    features = KeyedJaggedTensor(["user", "hour"], torch.cat([users, hours]), lengths=ones)
    optimizer.zero_grad()
    loss = (model(features)[:, 0] - (users % 3).float()).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# start: save
def save(model: nn.Module, optimizer: CombinedOptimizer, step: int) -> None:
    """On all ranks together. The folder has its name once it is whole."""
    partial, final = FOLDER / "partial", FOLDER / f"step-{step:08d}"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["step"] = torch.tensor(step)
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(final)
    dist.barrier()


def load(model: nn.Module, optimizer: CombinedOptimizer, folder: Path) -> int:
    """Into a model of any placement, on any number of ranks."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["step"] = torch.tensor(0)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


# end: save


def main() -> None:
    torch.manual_seed(0)
    model, optimizer = build()
    for step in range(STEPS):
        train(model, optimizer, step)
    save(model, optimizer, STEPS)
    straight = train(model, optimizer, STEPS)
    checkpoint = FOLDER / f"step-{STEPS:08d}"

    model, optimizer = build()
    step = load(model, optimizer, checkpoint)
    print(f"resumed at {step}: equal {train(model, optimizer, step) == straight}")

    # start: unsharded
    unsharded = Model(TTEmbeddingBagCollection(tables(USERS), tt={"users": USERS}))
    state = {"model": unsharded.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint)
    unsharded.load_state_dict(state["model"])
    # end: unsharded
    print("unsharded: loaded", len(state["model"]), "tensors")

    # start: partial
    model, optimizer = build(num_outputs=2)  # the last layer is another one
    match = load_weights(checkpoint, model, may_differ=["over.*"])
    print(match.describe())
    # end: partial

    if dist.get_rank() == 0:
        dense = Model(EmbeddingBagCollection(tables=tables(None)))
        torch.save(dense.state_dict(), FOLDER / "dense.pt")
        # start: convert
        result = compress(
            FOLDER / "dense.pt", FOLDER / "converted", RankChoice(rank=16), tables=["users"]
        )
        # For TTEmbeddingBagCollection(tables, tt=specs):
        specs = read_tt_specs(FOLDER / "converted")
        # end: convert
        print(f"converted: {sorted(specs)} to {result.tensor_bytes} bytes")


if __name__ == "__main__":
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29531}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
