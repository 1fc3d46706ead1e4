"""Configurations and data for the tests of the trainer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import load_config


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny operations only lose by more threads, and by much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def tiny_config(tmp_path: Path) -> TrainConfig:
    """A few hundred synthetic rows, two TT tables and a dense one, no plots."""
    config = load_config("synthetic_tiny", TrainConfig)
    config.name = "tiny"
    config.data.synthetic.num_rows = 640
    config.data.synthetic.num_embeddings = 200
    config.train.batch_size = 64
    config.output.folder = str(tmp_path / "runs")
    config.output.plots = False
    return config


@pytest.fixture(scope="session")
def criteo_folder() -> Path:
    """A folder with train.csv, dev.csv and test.csv of Criteo Kaggle rows."""
    beside_the_checkout = Path(__file__).parents[3] / "shared" / "data"
    root = Path(os.environ.get("ECOREC_TEST_DATA", beside_the_checkout))
    folder = root / "criteo-kaggle-8k"
    if not folder.is_dir():
        pytest.skip("no Criteo sample: set ECOREC_TEST_DATA to the folder of criteo-kaggle-8k")
    return folder
