"""Which optimizer updates which parameter.

Sharded tables are updated in the backward pass (TorchRec's fused optimizers, and ours for TT
cores), each table by its own settings; the MLPs and data-parallel tables by optimizers that step
after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torchrec.optim
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecorec_torchrec.lookup import GroupKeyedOptimizer
from ecorec_torchrec.train.config import OptimConfig, OptimizerConfig
from ecorec_torchrec.train.saved_tables import table_of
from ecorec_torchrec.tt import TTSpec

_CLASSES: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def attach_table_optimizers(
    collection: EmbeddingBagCollection, specs: Mapping[str, TTSpec], config: OptimConfig
) -> None:
    """Gives every table its optimizer, where TorchRec's sharding and planning look for it."""
    for table, module in collection.embedding_bags.items():
        settings = config.tt if table in specs else config.embedding
        apply_optimizer_in_backward(
            _CLASSES[settings.name], module.parameters(), _arguments(settings)
        )


def build_optimizer(
    model: DistributedModelParallel, tt_tables: Mapping[str, TTSpec], config: OptimConfig
) -> CombinedOptimizer:
    """The fused optimizers of the sharded tables together with those of all other parameters."""
    parameters: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        table = table_of(name)
        group = "dense" if table is None else "tt" if table in tt_tables else "embedding"
        parameters[group][name] = parameter
    after_backward: KeyedOptimizer = CombinedOptimizer(
        [
            GroupKeyedOptimizer(
                named_parameters,
                partial(_make_optimizer, getattr(config, group)),
                nonfinite_gradients=config.nonfinite_gradients,
            )
            for group, named_parameters in parameters.items()
        ]
    )
    if config.max_gradient_norm is not None:
        after_backward = GradientClippingOptimizer(
            after_backward, GradientClipping.NORM, config.max_gradient_norm
        )
    return CombinedOptimizer([model.fused_optimizer, after_backward])


def warm_up(optimizer: Optimizer, num_steps: int, steps_done: int) -> LambdaLR:
    """A schedule, to be stepped after every training step, of rates that rise to their values."""

    def share(steps: int) -> float:
        return min(1.0, (steps_done + steps + 1) / max(num_steps, 1))

    return LambdaLR(optimizer, share)


def _make_optimizer(settings: OptimizerConfig, parameters: list[nn.Parameter]) -> Optimizer:
    return _CLASSES[settings.name](parameters, **_arguments(settings))


def _arguments(settings: OptimizerConfig) -> dict[str, Any]:
    arguments = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    return arguments if settings.name == "sgd" else arguments | {"eps": settings.eps}
