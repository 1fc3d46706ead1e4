"""A recommender with TT tables from model to checkpoint, in stock TorchRec. Runs on CPUs:

torchrun --nproc-per-node 2 docs/examples/quickstart.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import KernelConfig, TopologyFactory, TrainerConfig
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecorec_torchrec import EcoRecPlanner, TTEmbeddingBagConfig, TTSpec, get_ecorec_sharders

NUM_USERS, NUM_ITEMS, DIM, BATCH_SIZE, STEPS = 1_000_000, 40_000_000, 32, 512, 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

# The model: two TT tables beside a dense one. Nothing of N x D size is ever allocated for TT.
tables = [
    TTEmbeddingBagConfig(
        name="users",
        num_embeddings=NUM_USERS,
        embedding_dim=DIM,
        feature_names=["user"],
        tt=TTSpec.suggest(NUM_USERS, DIM, rank=16),
    ),
    TTEmbeddingBagConfig(
        name="products",
        num_embeddings=NUM_ITEMS,
        embedding_dim=DIM,
        feature_names=["clicked"],
        tt=TTSpec.suggest(NUM_ITEMS, DIM, max_bytes=4 * 2**20),
    ),
    EmbeddingBagConfig(name="hours", num_embeddings=24, embedding_dim=DIM, feature_names=["hour"]),
]
model: nn.Module = DLRMTrain(
    DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=4,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )
)

# The plan: dense or TT, table-wise or data-parallel, under the ranks' memory.
fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
sharders = get_ecorec_sharders(fused_params)
topology = TopologyFactory.create_topology(
    TrainerConfig(world_size=world_size, local_world_size=world_size),
    kernel_config=KernelConfig(compute_device=DEVICE.type),
)
planner = EcoRecPlanner(topology=topology, batch_size=BATCH_SIZE)
plan = planner.collective_plan(model, sharders, dist.group.WORLD)

model = DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=sharders)
dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = CombinedOptimizer(
    [
        model.fused_optimizer,
        KeyedOptimizerWrapper(dense_parameters, lambda p: torch.optim.Adam(p, lr=0.001)),
    ]
)


def batch(generator: torch.Generator) -> Batch:
    """One user, up to three clicked items and an hour per sample; users divisible by 3 like it."""
    user = torch.randint(NUM_USERS, (BATCH_SIZE,), generator=generator)
    clicks = torch.randint(0, 4, (BATCH_SIZE,), generator=generator)
    clicked = torch.randint(NUM_ITEMS, (int(clicks.sum()),), generator=generator)
    hour = torch.randint(24, (BATCH_SIZE,), generator=generator)
    one = torch.ones_like(clicks)
    features = KeyedJaggedTensor(
        ["user", "clicked", "hour"],
        torch.cat([user, clicked, hour]),
        lengths=torch.cat([one, clicks, one]),
    )
    return Batch(torch.rand(BATCH_SIZE, 4, generator=generator), features, (user % 3 == 0).float())


generator = torch.Generator().manual_seed(rank)
batches = iter([batch(generator) for _ in range(STEPS)])
pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
for step in range(STEPS):
    loss, _, _ = pipeline.progress(batches)
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}")

# The checkpoint: TorchRec's names, one tensor per core, loadable on any number of ranks.
folder = [tempfile.mkdtemp()] if rank == 0 else [None]
dist.broadcast_object_list(folder)
state = {"model": model.state_dict()}
cores = [name for name in state["model"] if "tt_cores" in name]
dcp.save(state, checkpoint_id=folder[0])
dcp.load(state, checkpoint_id=folder[0])
model.load_state_dict(state["model"])
if rank == 0:
    print(f"saved and loaded {len(cores)} cores, for example {cores[0]}")
dist.destroy_process_group()
