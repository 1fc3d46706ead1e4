"""Which library optimizer TorchRec's `fused_params` ask for, and with which arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchrec.optim as torchrec_optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

RowWiseAdagrad = torchrec_optim.RowWiseAdagrad

_LIBRARY_CLASSES: Mapping[Any, type[Optimizer]] = {
    EmbOptimType.SGD: SGD,
    EmbOptimType.EXACT_SGD: SGD,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    EmbOptimType.ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: Adam,
    SGD: SGD,
    Adagrad: Adagrad,
    Adam: Adam,
    AdamW: AdamW,
    torchrec_optim.SGD: SGD,
    torchrec_optim.Adagrad: Adagrad,
    torchrec_optim.Adam: Adam,
    RowWiseAdagrad: RowWiseAdagrad,
}

# The values FBGEMM takes when `fused_params` is silent, so that the TT and the dense tables of one
# collection are trained alike.
_FBGEMM_DEFAULTS: Mapping[str, float] = {"lr": 0.01, "eps": 1e-8}
_FBGEMM_BETAS = {"beta1": 0.9, "beta2": 0.999}

# Settings of `fused_params` that speak of an optimizer, by FBGEMM's name or by torch's.
OPTIMIZER_SETTINGS = frozenset(
    ["optimizer", "learning_rate", "lr", "eps", "betas", "beta1", "beta2", "momentum"]
    + ["weight_decay", "weight_decay_mode", "lr_decay", "initial_accumulator_value", "dampening"]
    + ["nesterov", "amsgrad", "maximize", "eta", "max_norm"]
    + ["stochastic_rounding", "optimizer_state_dtypes", "counter_based_regularization"]
    + ["cowclip_regularization", "ensemble_mode", "emainplace_mode", "global_weight_decay"]
    + ["extra_optimizer_config"]
)


@dataclass(frozen=True)
class OptimizerSpec:
    """A library optimizer and its arguments; hashable, since TorchRec groups tables by it.

    `cls` is None for tables that are frozen (`EmbOptimType.NONE`).

    Example::

        spec = OptimizerSpec.from_fused_params("users", {
            "optimizer": EmbOptimType.ADAM, "learning_rate": 0.01, "beta1": 0.8,
        })
        spec.build(parameters)   # Adam(parameters, lr=0.01, betas=(0.8, 0.999), eps=1e-8, ..)
    """

    cls: type[Optimizer] | None
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_fused_params(cls, table: str, fused_params: Mapping[str, Any]) -> OptimizerSpec | None:
        """Maps TorchRec's `fused_params`; None when they name no optimizer.

        Raises:
            ValueError: the optimizer, or its kind of weight decay, has no library counterpart; or
                that one refuses a setting, such as a negative learning rate.
        """
        kind = fused_params.get("optimizer")
        if kind is None:
            return None
        if kind is EmbOptimType.NONE:
            return cls(None)
        if kind not in _LIBRARY_CLASSES:
            raise ValueError(
                f"TT table {table!r}: optimizer {_name(kind)} is not supported; the supported ones "
                f"are {', '.join(_name(kind) for kind in _LIBRARY_CLASSES)}"
            )
        library_class = _LIBRARY_CLASSES[kind]
        settings = {
            name: value
            for name, value in fused_params.items()
            if name in OPTIMIZER_SETTINGS - {"optimizer"}
            and value is not None
            and value is not False
        }
        decay_mode = settings.pop("weight_decay_mode", None)
        if settings.get("weight_decay"):
            library_class = _with_weight_decay(table, kind, library_class, decay_mode)
        spec = cls(library_class, _arguments(library_class, settings))
        try:  # here, on every rank, and not on the table's owner only
            spec.build([nn.Parameter(torch.zeros(1, 1))])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"TT table {table!r}: {_name(kind)} cannot be made of {settings}: {error}"
            ) from error
        return spec

    def build(self, params: Iterable[Tensor]) -> Optimizer:
        assert self.cls is not None, "a frozen group has no optimizer"
        return self.cls(params, **dict(self.arguments))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else str(kind)


def _with_weight_decay(
    table: str, kind: Any, library_class: type[Optimizer], mode: WeightDecayMode | None
) -> type[Optimizer]:
    """The class whose weight decay is that of `mode`."""
    if kind in (EmbOptimType.ADAM, torchrec_optim.Adam) and mode is not WeightDecayMode.L2:
        mode = WeightDecayMode.DECOUPLE  # how FBGEMM's Adam decays
    if mode in (None, WeightDecayMode.NONE, WeightDecayMode.L2):
        return library_class
    if mode is WeightDecayMode.DECOUPLE and library_class in (Adam, AdamW):
        return AdamW
    raise ValueError(
        f"TT table {table!r}: weight_decay_mode={mode} is not supported with {_name(kind)}"
    )


def _arguments(
    library_class: type[Optimizer], settings: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Constructor arguments, FBGEMM's names turned into torch's; warns of what does not apply."""
    settings = dict(settings)
    if "learning_rate" in settings:
        settings["lr"] = settings.pop("learning_rate")
    known = inspect.signature(library_class).parameters
    if "betas" in known and "betas" not in settings:
        settings["betas"] = tuple(
            settings.pop(name, default) for name, default in _FBGEMM_BETAS.items()
        )
    unused = sorted(settings.keys() - known.keys())
    if unused:
        warnings.warn(
            f"fused_params {unused} do not apply to {library_class.__name__} and are ignored for "
            "TT tables",
            stacklevel=2,
        )
    arguments = {
        name: tuple(value) if isinstance(value, list) else value  # hashable
        for name, value in settings.items()
        if name in known
    }
    for name, default in _FBGEMM_DEFAULTS.items():
        if name in known:
            arguments.setdefault(name, default)
    # Not fused=True: on CPU its last bits depend on where in the tensor an element lies, and so
    # on the neighbours of a table.
    if "foreach" in known:
        arguments["foreach"] = True
    return tuple(sorted(arguments.items()))
