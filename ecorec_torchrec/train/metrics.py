"""Quality of predictions over all ranks: AUC, loss and normalised entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.classification import BinaryAUROC
from torchrec.metrics.ne import compute_ne, get_ne_states

_ETA = 1e-12  # predictions are clamped this far from 0 and 1, as in TorchRec's NE


@dataclass(frozen=True)
class Quality:
    """Quality on one split.

    Attributes:
        auc: area under the ROC curve; NaN where the rows have one label only.
        loss: mean log loss in nats.
        ne: normalised entropy: the loss over that of always predicting the mean label.
        num_rows: rows evaluated, over all ranks.
    """

    auc: float
    loss: float
    ne: float
    num_rows: int


class BinaryQuality:
    """Collects logits and labels batch by batch; `compute` sums up over all ranks.

    Example::

        quality = BinaryQuality(torch.device("cpu"))
        quality.update(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.0]))
        quality.compute().auc  # 1.0
    """

    def __init__(self, device: torch.device) -> None:
        self._auroc = BinaryAUROC(validate_args=False).to(device)
        self._ne_states: dict[str, Tensor] = {}

    def update(self, logits_B: Tensor, labels_B: Tensor) -> None:
        predictions_B = torch.sigmoid(logits_B.detach().float())
        self._auroc.update(predictions_B, labels_B.long())
        labels_B = labels_B.double()
        states = get_ne_states(labels_B, predictions_B, torch.ones_like(labels_B), _ETA)
        for name, value in states.items():
            self._ne_states[name] = self._ne_states.get(name, 0) + value

    def compute(self) -> Quality:
        sums = torch.stack([value.double() for value in self._ne_states.values()])
        if dist.is_initialized():
            dist.all_reduce(sums)
        states = dict(zip(self._ne_states, sums, strict=True))
        cross_entropy, num_rows = states["cross_entropy_sum"], int(states["weighted_num_samples"])
        positive, negative = states["pos_labels"], states["neg_labels"]
        ne = compute_ne(cross_entropy, states["weighted_num_samples"], positive, negative, _ETA)
        auc = float(self._auroc.compute()) if positive > 0 and negative > 0 else math.nan
        return Quality(
            auc=auc,
            loss=float(cross_entropy) * math.log(2) / num_rows,
            ne=float(ne),
            num_rows=num_rows,
        )
