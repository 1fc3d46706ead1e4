"""Real data: a model that cannot tell liked films from others shows here."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import load_config
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import run


@pytest.mark.skipif(
    importlib.util.find_spec("recbole") is None,
    reason="recbole, whose wheel ships MovieLens-100K, is not installed",
)
def test_hundred_steps_on_movielens_beat_chance_by_far(tmp_path: Path) -> None:
    """Training that leaves the AUC at 0.5 is a known failure of DLRM set-ups."""
    config = load_config("movielens_100k", TrainConfig)
    config.train = replace(config.train, epochs=1, batch_size=512, max_steps=100)
    config.output = replace(config.output, folder=str(tmp_path), plots=False)
    config.data.num_embeddings = {"user_id": 100_000, "item_id": 100_000}
    with process_group("cpu"):
        summary = run(config, torch.device("cpu"))
    assert summary["auc_tt"] > 0.70
    assert summary["num_test_rows"] == 10_000
