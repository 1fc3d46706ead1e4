"""Types of cores, outputs and gradients, without sharding: nothing is rounded more than once."""

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from ecorec_torchrec.tt import TTSpec

SPECS = [  # 2, 3 and 4 cores: the last is multiplied down to 3 before the kernels see it
    TTSpec(97, (10, 10), (2, 4), (5,)),
    TTSpec(97, (4, 5, 5), (2, 2, 2), (5, 3)),
    TTSpec(97, (2, 5, 2, 5), (2, 2, 1, 2), (3, 4, 3)),
]
HALVES = [DataType.FP16, DataType.BF16]


def _collection(spec: TTSpec, data_type: DataType, std: float = 0.4) -> TTEmbeddingBagCollection:
    config = TTEmbeddingBagConfig(
        97,
        8,
        name="users",
        feature_names=["user"],
        data_type=data_type,
        init_fn=lambda weight: nn.init.normal_(weight, std=std),
        tt=spec,
    )
    return TTEmbeddingBagCollection([config])


def _features() -> KeyedJaggedTensor:
    lengths = torch.tensor([0, 1, 9, 2, 7, 1])
    return KeyedJaggedTensor(["user"], torch.randint(97, (20,)), lengths=lengths)


def _reference(cores: list[Tensor], features: KeyedJaggedTensor) -> Tensor:
    """Pooled rows in float64, from the stored values of the cores."""
    rows = torch.ones(1, 1, 1, dtype=torch.float64)
    for core in cores:
        rows = torch.einsum("pqr,arbt->paqbt", rows, core).flatten(2, 3).flatten(0, 1)
    return nn.functional.embedding_bag(
        features.values(),
        rows.flatten(1),
        features.offsets(),
        mode="sum",
        include_last_offset=True,
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{len(spec.row_factors)} cores")
@pytest.mark.parametrize("data_type", [DataType.FP32, *HALVES])
def test_half_precision_cores_are_only_stored_as_such(spec: TTSpec, data_type: DataType) -> None:
    """As in TorchRec the output is float32; sums too, so only the gradients are rounded, once."""
    ebc, features = _collection(spec, data_type), _features()
    pooled = ebc(features).values()
    dtype = data_type_to_dtype(data_type)
    cores = list(ebc.embedding_bags["users"].tt_cores)
    exact = [core.detach().double().requires_grad_() for core in cores]
    expected = _reference(exact, features)
    assert pooled.dtype is torch.float32 and {core.dtype for core in cores} == {dtype}
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(pooled)
    pooled.backward(upstream)
    expected.backward(upstream.double())
    rounding = torch.finfo(dtype).eps
    for core, truth in zip(cores, exact, strict=True):
        assert core.grad is not None and core.grad.dtype is dtype and truth.grad is not None
        largest = float(truth.grad.abs().max())
        torch.testing.assert_close(
            core.grad.double(), truth.grad, rtol=rounding, atol=max(rounding, 1e-6) * largest
        )


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.INT4, DataType.UINT8])
def test_types_that_cores_cannot_have_are_refused_with_those_they_can(data_type: DataType) -> None:
    """When the table is configured, not when a step is run."""
    with pytest.raises(ValueError, match=rf"'users'.*{data_type.name}.*'FP32', 'FP16', 'BF16'"):
        _collection(SPECS[1], data_type)
    plain = EmbeddingBagConfig(97, 8, name="users", feature_names=["user"], data_type=data_type)
    with pytest.raises(ValueError, match=rf"'users'.*{data_type.name}.*'FP32', 'FP16', 'BF16'"):
        TTEmbeddingBagCollection([plain], tt={"users": SPECS[1]})


class _Model(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.linear(self.ebc(features).values())


@pytest.mark.parametrize("amp_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("data_type", [DataType.FP32, *HALVES])
def test_autocast_leaves_embeddings_alone(amp_dtype: torch.dtype, data_type: DataType) -> None:
    """The dense part runs in 16 bit; embeddings and their gradients have the types they had."""
    model, features = _Model(_collection(SPECS[1], data_type)), _features()
    exact = model.ebc(features).values()
    with torch.autocast("cpu", amp_dtype):
        pooled = model.ebc(features).values()
        logits = model(features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
    assert logits.dtype is amp_dtype and torch.equal(pooled, exact)
    loss.backward()
    cores = list(model.ebc.embedding_bags["users"].tt_cores)
    under_autocast = [core.grad for core in cores]
    model.zero_grad()
    logits = model(features)
    nn.functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)).backward()
    for core, found in zip(cores, under_autocast, strict=True):
        assert core.grad is not None and found is not None and found.dtype is core.dtype
        largest = float(core.grad.abs().max())
        torch.testing.assert_close(found, core.grad, rtol=0.03, atol=0.03 * largest)


def test_autocast_trains() -> None:
    model, features = _Model(_collection(SPECS[1], DataType.FP32)), _features()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(features).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
