"""Synthetic rows: Zipf-distributed ids, labels from a planted model."""

from __future__ import annotations

import numpy as np
import torch

from ecorec_torchrec.train.data.batch import EMPTY_SLOT, Rows, Schema, SparseFeature
from ecorec_torchrec.train.data.dataset import InMemoryDataset
from ecorec_torchrec.train.data.hashing import hash_ids
from ecorec_torchrec.train.data_config import DataConfig

_SIGNAL = 1.5  # scale of the logit: the planted model itself reaches an AUC of about 0.8


def synthetic(config: DataConfig, seed: int) -> InMemoryDataset:
    """Draws rows whose label depends on every id and on the first dense feature.

    Each id has a planted effect; the logit is the sum over features of the mean effect of the bag,
    plus the first dense feature, scaled to a standard deviation of about 1.5.
    """
    options = config.synthetic
    rng = np.random.default_rng(seed)
    num_rows, width = options.num_rows, options.max_bag_size
    features = tuple(
        SparseFeature(name, config.num_embeddings.get(name, options.num_embeddings), width)
        for name in (f"sparse_{i}" for i in range(options.num_sparse_features))
    )
    dense = rng.standard_normal((num_rows, options.num_dense_features)).astype(np.float32)
    logit = dense[:, 0].copy()
    slots = []
    for feature in features:
        popularity = _zipf(rng, feature.num_embeddings, options.zipf_exponent, (num_rows, width))
        ids = hash_ids(popularity, feature.num_embeddings)
        empty = np.arange(width) >= rng.integers(0, width + 1, (num_rows, 1))
        effect = rng.standard_normal(feature.num_embeddings).astype(np.float32)
        size = np.maximum((~empty).sum(axis=1), 1)
        logit += np.where(empty, 0, effect[ids]).sum(axis=1) / size
        slots.append(np.where(empty, EMPTY_SLOT, ids))
    logit *= _SIGNAL / max(float(logit.std()), 1e-6)
    labels = rng.random(num_rows) < 1 / (1 + np.exp(-logit))
    rows = Rows(
        dense=torch.from_numpy(dense),
        ids=torch.from_numpy(np.concatenate(slots, axis=1)),
        labels=torch.from_numpy(labels.astype(np.float32)),
    )
    schema = Schema(
        dense=tuple(f"dense_{i}" for i in range(options.num_dense_features)), sparse=features
    )
    return InMemoryDataset(
        rows,
        schema,
        val_fraction=config.val_fraction,
        test_fraction=config.test_fraction,
        seed=seed,
    )


def _zipf(
    rng: np.random.Generator, num_ids: int, exponent: float, shape: tuple[int, int]
) -> np.ndarray:
    """Draws from [0, num_ids) with weight (k + 1)^-exponent, by inverting the distribution."""
    cumulative = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative, rng.random(shape) * cumulative[-1])
