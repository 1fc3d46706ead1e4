"""A group of two TT tables without a model, for tests of optimizers.

The truth of such a test is torch's optimizer on copies of the group's leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torchrec.optim as torchrec_optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn

from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.lookup import GroupCores, OptimizerSpec

BATCH = TableBatch(
    table_names=("user", "item"),
    num_embeddings=(90, 50),
    row_factors=((4, 5, 5), (3, 4, 5)),
    col_factors=(2, 2, 2),
    ranks=(3, 4),
    feature_names=("u", "i"),
    feature_tables=(0, 1),
)
# The optimizer by TorchRec's name, and the same in torch, both from FBGEMM's defaults.
OPTIMIZERS: Mapping[str, tuple[dict[str, Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (
        {"optimizer": EmbOptimType.EXACT_SGD},
        lambda params: torch.optim.SGD(params, lr=0.01),
    ),
    "sgd_momentum": (
        {"optimizer": EmbOptimType.SGD, "momentum": 0.8, "weight_decay": 0.1},
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.8, weight_decay=0.1),
    ),
    "adagrad": (
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 1e-4, "weight_decay": 0.1},
        lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-4, weight_decay=0.1),
    ),
    "rowwise_adagrad": (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-5},
        lambda params: torchrec_optim.RowWiseAdagrad(params, lr=0.01, eps=1e-5),
    ),
    "adam": (
        {"optimizer": EmbOptimType.ADAM, "beta1": 0.8, "eps": 1e-6},
        lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.999), eps=1e-6),
    ),
    "adam_l2": (
        {
            "optimizer": EmbOptimType.ADAM,
            "weight_decay": 0.2,
            "weight_decay_mode": WeightDecayMode.L2,
        },
        lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.2),
    ),
    "adamw": (
        {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.2},
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.2),
    ),
}


def make_group(dtype: torch.dtype = torch.float32, batch: TableBatch = BATCH) -> GroupCores:
    """The cores of `batch`, equal on every call."""
    cores = GroupCores(batch, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for flat in cores.flat:
            flat.copy_(torch.randn(flat.shape, generator=generator))
    return cores


def spec_of(fused_params: dict[str, Any]) -> OptimizerSpec:
    spec = OptimizerSpec.from_fused_params("user", fused_params)
    assert spec is not None
    return spec


def loss(tensors: Iterable[Tensor], step: int) -> Tensor:
    """A loss whose gradients depend on the values and on the step."""
    generator = torch.Generator().manual_seed(100 + step)
    terms = [
        (t.float() * torch.randn(t.shape, generator=generator)).sum() + (t.float() ** 2).sum() / 2
        for t in tensors
    ]
    return torch.stack(terms).sum()


def backward(tensors: Iterable[Tensor], step: int) -> None:
    loss(tensors, step).backward()


def twins(group: GroupCores) -> list[nn.Parameter]:
    """Copies of the leaves as ordinary parameters: one row of a core is one row of the matrix."""
    return [nn.Parameter(flat.detach().clone()) for flat in group.flat]
