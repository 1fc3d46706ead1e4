"""torch.compile and torch.export of unsharded models: whole graphs, any number of ids.

In processes of their own: Dynamo keeps what it saw of torch while other tests patch it.
"""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingCollection
from ecorec_torchrec.testing import RankPool
from ecorec_torchrec.tt import TTSpec

ROWS = {"user": 97, "item": 60, "gender": 3}
SPECS = {
    "users": TTSpec(97, (4, 5, 5), (2, 2, 2), (5, 3)),
    "movies": TTSpec(60, (2, 5, 2, 3), (2, 2, 1, 3), (2, 4, 3)),
}


class Model(nn.Module):
    """Two TT tables and a dense one, pooled, and a TT table in sequence; takes plain tensors."""

    def __init__(self, is_weighted: bool = False) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(97, 8, name="users", feature_names=["user"]),
            EmbeddingBagConfig(
                60, 12, name="movies", feature_names=["item"], pooling=PoolingType.MEAN
            ),
            EmbeddingBagConfig(3, 4, name="genders", feature_names=["gender"]),
        ]
        if is_weighted:
            tables[1].pooling = PoolingType.SUM
        self.ebc = TTEmbeddingBagCollection(tables, SPECS, is_weighted)
        sequence = EmbeddingConfig(97, 8, name="users", feature_names=["user"])
        self.ec = TTEmbeddingCollection([sequence], {"users": SPECS["users"]})
        self.linear = nn.Linear(24, 1)

    def forward(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        features = KeyedJaggedTensor(
            list(ROWS), values, weights, lengths.flatten(), stride=lengths.shape[1]
        )
        rows = self.ec(features)["user"].values()
        return self.linear(self.ebc(features).values()) + rows.square().sum()


def batch(num_values: int, batch_size: int, is_weighted: bool = False) -> tuple[Tensor, ...]:
    """`num_values` ids spread over three features and all examples."""
    lengths = torch.zeros(3 * batch_size, dtype=torch.int64)
    for place in torch.randint(3 * batch_size, (num_values,)) if batch_size else ():
        lengths[place] += 1
    lengths = lengths.view(3, batch_size)
    counts = zip(ROWS.values(), lengths.sum(1).tolist(), strict=True)
    values = torch.cat([torch.randint(rows, (count,)) for rows, count in counts])
    return (values, lengths, torch.rand(num_values)) if is_weighted else (values, lengths)


BATCHES = ((37, 3), (0, 3), (1, 3), (36, 1), (0, 1), (1, 1), (50, 7), (0, 0))


def export(rank: int, is_weighted: bool, strict: bool) -> None:
    model = Model(is_weighted)
    shapes: list[dict] = [{0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}]
    exported = torch.export.export(
        model,
        batch(37, 3, is_weighted),
        dynamic_shapes=tuple(shapes[: 2 + is_weighted]),
        strict=strict,
    )
    module = exported.module()
    for num_values, batch_size in BATCHES:
        example = batch(num_values, batch_size, is_weighted)
        assert torch.equal(module(*example), model(*example)), (num_values, batch_size)
    bad = list(batch(4, 1, is_weighted))
    bad[0], bad[1] = torch.tensor([3, 97, 1, 2]), torch.tensor([[2], [1], [1]])
    with pytest.raises(ValueError, match="'user': id 97 is out of range for table 'users'"):
        module(*bad)


@pytest.mark.parametrize(("is_weighted", "strict"), [(False, True), (True, False)])
def test_exports_for_any_number_of_ids_and_examples(
    ranks: RankPool, is_weighted: bool, strict: bool
) -> None:
    """Exporters take the sizes 0 and 1 for special ones; ids are checked in the graph too."""
    ranks.run(export, is_weighted, strict, world_size=1)


def compile_and_train(rank: int) -> int:
    model = Model()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for num_values in (37, 36, 50, 0):
        example = batch(num_values, 3)
        found, expected = compiled(*example), model(*example)
        torch.testing.assert_close(found, expected)
        upstream = torch.randn_like(expected)
        gradients = [
            torch.autograd.grad(output, list(model.parameters()), upstream)
            for output in (found, expected)
        ]
        for mine, eager in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, eager)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(*example), model(*example))
    return counter.frame_count


def test_compiles_as_one_graph_that_batches_share(ranks: RankPool) -> None:
    """One graph for the first number of ids, one for all others, and one of PyTorch's for 0."""
    (num_graphs,) = ranks.run(compile_and_train, world_size=1)
    assert num_graphs <= 3 + 1  # and one under autocast
