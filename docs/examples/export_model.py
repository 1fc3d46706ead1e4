"""Trains a small recommender with a TT table, unsharded, and exports it for serving:

python docs/examples/export_model.py model.pt2
"""

import sys

import torch
from torch import Tensor, nn
from torch.export import Dim
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from ecorec_torchrec import TTEmbeddingBagCollection, TTEmbeddingBagConfig, TTSpec

NUM_USERS, DIM, NUM_FLOATS = 1_000_000, 32, 4
FEATURES = ["user", "hour"]

tables = [
    TTEmbeddingBagConfig(
        name="users",
        num_embeddings=NUM_USERS,
        embedding_dim=DIM,
        feature_names=["user"],
        tt=TTSpec.suggest(NUM_USERS, DIM, rank=8),
    ),
    EmbeddingBagConfig(name="hours", num_embeddings=24, embedding_dim=DIM, feature_names=["hour"]),
]
model = DLRM(TTEmbeddingBagCollection(tables), NUM_FLOATS, [32, DIM], [32, 1])


class Served(nn.Module):
    """The model as a function of plain tensors, for programs that have no TorchRec."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, floats: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Probabilities (B,).

        Args:
            floats: (B, 4).
            values: ids, feature after feature, example after example.
            lengths: (F, B) number of ids of every feature and example.
        """
        batch_size = lengths.shape[1]
        features = KeyedJaggedTensor(FEATURES, values, lengths=lengths.flatten(), stride=batch_size)
        return self.model(floats, features).squeeze(1).sigmoid()


def batch(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """One user and up to two hours per example."""
    lengths = torch.stack([torch.ones(batch_size).long(), torch.randint(3, (batch_size,))])
    users = torch.randint(NUM_USERS, (batch_size,))
    hours = torch.randint(24, (int(lengths[1].sum()),))
    return torch.rand(batch_size, NUM_FLOATS), torch.cat([users, hours]), lengths


served = Served(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
for _ in range(10):
    floats, values, lengths = batch(256)
    liked = (values[:256] % 3 == 0).float()
    optimizer.zero_grad()
    nn.functional.binary_cross_entropy(served(floats, values, lengths), liked).backward()
    optimizer.step()

# The number of examples and the number of ids stay free, down to 0.
shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC})
exported = torch.export.export(served.eval(), batch(8), dynamic_shapes=shapes, strict=True)
torch.export.save(exported, sys.argv[1])

example = torch.rand(1, NUM_FLOATS), torch.tensor([999_999, 7]), torch.tensor([[1], [1]])
torch.save(example, sys.argv[1] + ".example")
print(f"probability {served(*example).item():.6f}")
