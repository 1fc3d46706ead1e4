"""Random table batches, the materialised truth in float64, and memory that starts as NaN."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import backends, batched_tt_embedding_bag
from torch import Tensor
from torch.nn.functional import embedding_bag

INT_POISON = -1_234_567_891


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN (or a wild integer), never a lucky zero."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))
        monkeypatch.setattr(np, name, _poisoning(getattr(np, name)))
    monkeypatch.setattr(Tensor, "new_empty", _poisoning(Tensor.new_empty))


def _poisoning(allocate: Callable) -> Callable:
    def poisoned(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        result = allocate(*args, **kwargs)
        if isinstance(result, np.ndarray):
            if result.dtype.kind in "fi":
                result.fill(np.nan if result.dtype.kind == "f" else INT_POISON)
        elif result.is_floating_point():
            result.fill_(float("nan"))
        elif result.dtype in (torch.int32, torch.int64):
            result.fill_(INT_POISON)
        return result

    return poisoned


@dataclass
class LookupCase:
    """One call: tables, ids, and what to do with them."""

    batch: TableBatch
    indices_L: Tensor
    offsets: Tensor
    cores: list[Tensor]
    weights_L: Tensor | None
    mode: str
    device: str = "cpu"
    """Where `run` computes; its results are on the CPU."""

    @property
    def bags_per_feature(self) -> int:
        return (len(self.offsets) - 1) // self.batch.num_features

    def run(self, **options) -> tuple[Tensor, list[Tensor], Tensor | None]:  # noqa: ANN003
        """Output, core gradients and weights gradient for the loss sum(output * fixed numbers)."""
        cores = [core.to(self.device, copy=True).requires_grad_() for core in self.cores]
        weights = None
        if self.weights_L is not None:
            weights = self.weights_L.to(self.device, copy=True).requires_grad_()
        output = batched_tt_embedding_bag(
            self.indices_L.to(self.device),
            self.offsets.to(self.device),
            cores,
            self.batch,
            mode=self.mode,
            per_sample_weights=weights,
            **options,
        )
        output.backward(self.grad(output.dtype).to(self.device))
        weights_grad = None if weights is None else weights.grad.cpu()
        return output.detach().cpu(), [core.grad.cpu() for core in cores], weights_grad

    def grad(self, dtype: torch.dtype) -> Tensor:
        num_bags, width = self.bags_per_feature, self.batch.num_features * self.batch.embedding_dim
        grad = (torch.arange(num_bags * width, dtype=torch.float64) * 0.7 + 1).sin()
        return grad.view(num_bags, width).to(dtype)

    def truth(self) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The same as `run`, by materialised tables and `embedding_bag` in float64."""
        cores = [core.detach().double().clone().requires_grad_() for core in self.cores]
        weights = self.weights_L
        if weights is not None:
            weights = weights.detach().double().clone().requires_grad_()
        tables = [_materialise(cores, self.batch, t) for t in range(self.batch.num_tables)]
        offsets, num_bags = self.offsets.long(), self.bags_per_feature
        outputs = []
        for feature, table in enumerate(self.batch.feature_tables):
            bounds = offsets[feature * num_bags : (feature + 1) * num_bags + 1]
            own = slice(int(bounds[0]), int(bounds[-1]))
            output = embedding_bag(
                self.indices_L[own].long(),
                tables[table],
                bounds - bounds[0],
                mode="sum",
                per_sample_weights=None if weights is None else weights[own],
                include_last_offset=True,
            )
            if self.mode == "mean":
                output = output / bounds.diff().clamp(min=1).unsqueeze(1)
            outputs.append(output)
        output = torch.cat(outputs, 1)
        output.backward(self.grad(torch.float64))
        weights_grad = None if weights is None else weights.grad
        return output.detach(), [core.grad for core in cores], weights_grad


def _materialise(cores: list[Tensor], batch: TableBatch, table: int) -> Tensor:
    """All rows `(num_embeddings, D)` of one table of the batch."""
    rows = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for k, core in enumerate(cores):
        own = core.narrow(0, batch.core_offsets[k][table], batch.row_factors[table][k])
        rows = torch.einsum("imr,jrqs->ijmqs", rows, own).flatten(2, 3).flatten(0, 1)
    return rows[: batch.num_embeddings[table], :, 0]


def _random_case(
    seed: int,
    dtype: torch.dtype = torch.float64,
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
) -> LookupCase:
    rng = np.random.default_rng(seed)
    if shapes is None:
        num_cores = int(rng.integers(2, 5))
        col_factors = tuple(rng.integers(1, 6, num_cores).tolist())
        ranks = tuple(rng.integers(1, 10, num_cores - 1).tolist())
    else:
        col_factors, ranks = shapes[seed % len(shapes)]
        num_cores = len(col_factors)
    num_tables, num_features = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    row_factors = tuple(
        tuple(rng.integers(1, 9 - num_cores, num_cores).tolist()) for _ in range(num_tables)
    )
    num_embeddings = tuple(int(rng.integers(1, np.prod(p) + 1)) for p in row_factors)
    feature_tables = tuple(rng.integers(0, num_tables, num_features).tolist())
    batch = TableBatch(
        tuple(f"t{t}" for t in range(num_tables)),
        num_embeddings,
        row_factors,
        col_factors,
        ranks,
        tuple(f"f{f}" for f in range(num_features)),
        feature_tables,
    )
    num_bags = int(rng.integers(0, 7))
    lengths = rng.integers(0, int(rng.integers(1, 9)), num_features * num_bags)
    offsets = np.concatenate([[0], lengths.cumsum()])
    ids = [
        (rng.random(int(n)) ** 3 * num_embeddings[feature_tables[bag // num_bags]]).astype(int)
        for bag, n in enumerate(lengths)
    ]
    indices = np.concatenate([np.empty(0, int), *ids])
    int_dtypes = (torch.int32, torch.int64)
    weights = torch.from_numpy(rng.normal(size=len(indices))).to(dtype)
    return LookupCase(
        batch,
        torch.from_numpy(indices).to(int_dtypes[seed % 2]),
        torch.from_numpy(offsets).to(int_dtypes[seed // 2 % 2]),
        [torch.from_numpy(rng.normal(size=shape)).to(dtype) for shape in batch.core_shapes],
        weights if rng.random() < 0.5 else None,
        "mean" if rng.random() < 0.5 else "sum",
    )


@pytest.fixture
def random_case() -> Callable[..., LookupCase]:
    """`random_case(seed, dtype=float64, shapes=None)`; shapes: (col_factors, ranks)."""
    return _random_case


@pytest.fixture
def materialise() -> Callable[[list[Tensor], TableBatch, int], Tensor]:
    """`materialise(cores, batch, table)`: a table's rows, differentiable."""
    return _materialise


@pytest.fixture
def lookup_case() -> type[LookupCase]:
    return LookupCase


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The `cpu` backend as on a machine without numba: the grouped form in PyTorch."""
    from ecorec_torchrec.kernels.tt_index import op

    for module in (op, backends):
        monkeypatch.setattr(module, "numba_error", lambda: "hidden by a test")
    yield
