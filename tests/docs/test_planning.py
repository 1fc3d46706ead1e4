"""The commands of the planning guide are commands of the program, with options that it has."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
OPTIONS = {"train": TrainConfig} | {
    name: getattr(importlib.import_module(f"ecorec_torchrec.cli.{name}"), f"{name.title()}Options")
    for name in ("plan", "profile")
}
NAMES = "|".join(OPTIONS)
COMMANDS = re.findall(rf"^ecorec ({NAMES}) (.*?)(?:\s+#.*)?$", GUIDE, re.MULTILINE)


def test_there_are_commands() -> None:
    assert {name for name, _ in COMMANDS} == set(OPTIONS)


@pytest.mark.parametrize(("name", "arguments"), COMMANDS)
def test_command_of_the_guide(
    name: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configuration file that the guide shows."""
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"```yaml\n(data:.*?)```", GUIDE, re.DOTALL)
    for file in re.findall(r"--config (\S+\.yaml)", arguments):
        Path(file).write_text(shown)
    options = parse_options(OPTIONS[name], shlex.split(arguments), command=name)
    for option, value in re.findall(r"--(out|plots|json|trace) (\S+)", arguments):
        assert getattr(options, option) == value
    for option, value in re.findall(r"--(plan|profile) (\S+)", arguments):
        chosen = options.plan.file if option == "plan" else options.plan.profile
        assert chosen == (None if value == "auto" else value)
