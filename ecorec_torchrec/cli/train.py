"""`ecorec train`."""

from __future__ import annotations

from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.launch import launch


def run(arguments: list[str]) -> None:
    launch(parse_options(TrainConfig, arguments, command="train"))
