"""Data sets behind the trainer: rows in disjoint splits, shared out over ranks.

They stand in for TorchRec's `InMemoryBinaryCriteoIterDataPipe` and random data pipes, and give
batches that are `torchrec.datasets.utils.Batch`.
"""

import warnings

from ecorec_torchrec.train.data.batch import RankBatch, Schema, SparseFeature, fold_ids
from ecorec_torchrec.train.data.dataset import SPLITS, Dataset, InMemoryDataset, Split
from ecorec_torchrec.train.data_config import CriteoConfig, DataConfig, SyntheticConfig

__all__ = [
    "SPLITS",
    "Dataset",
    "InMemoryDataset",
    "RankBatch",
    "Schema",
    "SparseFeature",
    "Split",
    "fold_ids",
    "load_dataset",
]


def load_dataset(config: DataConfig, seed: int) -> Dataset:
    """The data set that the configuration names.

    Raises:
        ValueError: its files are not there or not readable, or `num_embeddings` names a feature
            that the data set does not have.
    """
    _warn_of_ignored_options(config)
    if config.name == "tables":
        raise ValueError("data.name=tables is a list of tables without data: only `ecorec plan`")
    dataset: Dataset
    if config.name == "movielens-100k":
        from ecorec_torchrec.train.data.movielens import movielens_100k

        dataset = movielens_100k(config, seed)
    elif config.name == "criteo":
        from ecorec_torchrec.train.data.criteo import Criteo

        dataset = Criteo(config, seed)
    else:
        from ecorec_torchrec.train.data.synthetic import synthetic

        dataset = synthetic(config, seed)
    names = [feature.name for feature in dataset.schema.sparse]
    for name in config.num_embeddings:
        if name not in names:
            raise ValueError(
                f"data.num_embeddings.{name}: {config.name} has no such feature; "
                f"it has {', '.join(names)}"
            )
    return dataset


def _warn_of_ignored_options(config: DataConfig) -> None:
    ignored = {
        "data.path": config.path is not None and config.name == "synthetic",
        "data.criteo": config.criteo != CriteoConfig() and config.name != "criteo",
        "data.synthetic": config.synthetic != SyntheticConfig() and config.name != "synthetic",
    }
    for option, is_ignored in ignored.items():
        if is_ignored:
            warnings.warn(f"{option} is ignored: data.name is {config.name}", stacklevel=3)
