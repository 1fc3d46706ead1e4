"""AUC, loss and normalised entropy, on one rank and over several."""

import math

import pytest
import torch

from ecorec_torchrec.train.metrics import BinaryQuality, Quality

CPU = torch.device("cpu")


def quality_of(logits: torch.Tensor, labels: torch.Tensor, batch: int = 1000) -> Quality:
    quality = BinaryQuality(CPU)
    for some_logits, some_labels in zip(logits.split(batch), labels.split(batch), strict=True):
        quality.update(some_logits, some_labels)
    return quality.compute()


def sample(num_rows: int = 1001) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, generator=generator)
    labels = (torch.rand(num_rows, generator=generator) < torch.sigmoid(2 * logits)).float()
    return logits, labels


def test_against_the_definitions() -> None:
    """AUC is the share of (positive, negative) pairs in the right order."""
    logits, labels = sample()
    quality = quality_of(logits, labels, batch=64)
    pairs = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    assert quality.auc == pytest.approx(float((pairs > 0).double().mean()), abs=1e-6)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert quality.loss == pytest.approx(float(loss), rel=1e-5)
    rate = float(labels.mean())
    base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert quality.ne == pytest.approx(float(loss) / base, rel=1e-5)
    assert quality.num_rows == 1001


def test_one_label_only_has_no_auc() -> None:
    quality = quality_of(torch.randn(10), torch.ones(10))
    assert math.isnan(quality.auc)
    assert math.isfinite(quality.loss)


def _quality_on_rank(rank: int, shares: list[tuple[torch.Tensor, torch.Tensor]]) -> Quality:
    return quality_of(*shares[rank], batch=64)


def test_ranks_with_uneven_and_empty_shares_equal_one_process(ranks) -> None:  # type: ignore[no-untyped-def]
    logits, labels = sample()
    sizes = [700, 301, 0]
    shares = list(zip(logits.split(sizes), labels.split(sizes), strict=True))
    expected = quality_of(logits, labels)
    for quality in ranks.run(_quality_on_rank, shares, world_size=3):
        assert quality.auc == pytest.approx(expected.auc, abs=1e-6)
        assert quality.loss == pytest.approx(expected.loss, rel=1e-9)
        assert quality.num_rows == 1001
