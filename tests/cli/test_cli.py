"""The `ecorec` program as its users call it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ecorec_torchrec.cli import main
from ecorec_torchrec.cli.main import run_command
from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig

TINY = [
    "--config", "synthetic_tiny", "--data.synthetic.num-rows", "640", "--train.batch-size", "64",
    "--train.epochs", "1", "--output.no-plots",
]  # fmt: skip
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def start(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **NO_GPU, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def summary_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / "runs" / "synthetic-tiny" / "summary.json").read_text())


def test_help_lists_the_commands_without_loading_torch(tmp_path: Path) -> None:
    code = "import sys; from ecorec_torchrec.cli import main; main(['--help']);"
    done = start("-c", code + "print('torch' in sys.modules)", folder=tmp_path)
    for command in ("train", "plan", "export", "bench", "env"):
        assert f"\n  {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command `trian`; did you mean `train`?"),
        (["train", "--config", "nope"], "no such file.*synthetic_tiny"),
        (["train", "--config", "/"], "--config /: a folder, not a file"),
        (["train", "--config"], "--config needs a file or a name"),
        (["train", "--config=a", "--config=b"], "--config is given twice"),
        (["train", "--config", "synthetic_tiny", "--train.epochs", "0"], "epochs=0 must be >= 1"),
        (["train", "--optim.dense.name", "rowwise_adagrad"], "biases of the MLPs have no rows"),
        (["train", "--plan.file", "nope.yaml"], "plan.file='nope.yaml' does not exist"),
        (["bench", "qualty"], "no benchmark 'qualty'; there are .*quality"),
        (
            ["bench", "quality", "--variants", "dense", "tt_r99"],
            "tt_r99 is not one of dense, tt_r8",
        ),
        (["env", "--verbose"], "takes no options"),
        (["export", "--run", "nowhere", "--table", "t"], "no checkpoint in nowhere"),
        (["export", "--run", "r", "--table", "t", "--out", "t.csv"], "end in .npy or .pt"),
    ],
)
def test_mistakes_are_messages_not_tracebacks(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error, re.DOTALL)


def test_help_of_several_lines_reads_as_one_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    assert " torchrun, torchrun's own number counts. (default: 1) " in printed
    assert " tables of the bytes of the TT tables) on the same batches, and write " in printed
    assert "Attributes:" not in printed


def test_flags_override_the_configuration_file() -> None:
    arguments = ["--train.epochs", "7", "--config", "synthetic_tiny", "--data", "folder"]
    config = parse_options(TrainConfig, arguments, command="train")
    assert config.train.epochs == 7
    assert config.data.path == "folder"
    assert config.name == "synthetic-tiny"
    assert config.tt.tables == ("sparse_0", "sparse_1")


def test_env_reports_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["env"])
    lines = capsys.readouterr().out.splitlines()
    report = {line[:16].strip(): line[16:].strip() for line in lines}
    assert report["torch"] == importlib.metadata.version("torch")
    assert {"python", "torchrec", "triton", "numba", "cpu", "cores"} <= set(report)


def test_an_interrupt_is_a_word_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run_command(run, [])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "ecorec: interrupted\n"


def test_train_then_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", *TINY])
    assert "synthetic: 640 rows: train 512, val 64, test 64" in capsys.readouterr().out
    for table, out in (("sparse_0", None), ("sparse_2", "exports/dense.pt")):
        options = [] if out is None else ["--out", out]
        main(["export", "--run", "runs/synthetic-tiny", "--table", table, *options])
    weights = np.load("runs/synthetic-tiny/sparse_0.npy")
    assert weights.shape == (1000, 16) and weights.dtype == np.float32
    assert torch.load("exports/dense.pt").shape == (1000, 16)
    with pytest.raises(SystemExit):
        main(["export", "--run", "runs/synthetic-tiny", "--table", "sparse_9"])
    assert "'sparse_9' is not in the checkpoint, which has sparse_0" in capsys.readouterr().err


def test_plan_is_shown_saved_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["plan", *TINY, "--nproc", "1", "--out", "plan.yaml"])
    assert "sparse_0  tt" in capsys.readouterr().out
    main(["train", *TINY, "--plan.file", "plan.yaml"])
    assert (tmp_path / "runs/synthetic-tiny/plan.yaml").read_text() == Path("plan.yaml").read_text()
    main(["plan", *TINY, "--nproc", "2", "--out", "two.yaml"])
    with pytest.raises(SystemExit):
        main(["train", *TINY, "--plan.file", "two.yaml"])
    assert "the plan is for world_size=2" in capsys.readouterr().err


def test_five_steps_on_a_machine_without_gpu_and_triton(tmp_path: Path) -> None:
    """Imports alone used to fail there."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from ecorec_torchrec.cli import main\n"
        f"main(['train', *{TINY!r}, '--train.max-steps', '5', '--train.log-every-steps', '1'])"
    )
    done = start("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/synthetic-tiny/metrics.csv").read_text().splitlines()
    assert sum(",train," in row for row in rows) == 5


@pytest.mark.long
def test_processes_of_ours_and_of_torchrun_train_alike(tmp_path: Path) -> None:
    module = ["-m", "ecorec_torchrec.cli", "train", *TINY]
    runs = {}
    for name, command in {
        "ours": [*module, "--nproc", "2"],
        "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", *module],
    }.items():
        (tmp_path / name).mkdir()
        done = start(*command, folder=tmp_path / name)
        assert done.returncode == 0, done.stderr
        runs[name] = summary_of(tmp_path / name)
    assert runs["ours"]["world_size"] == runs["torchrun"]["world_size"] == 2
    assert runs["ours"]["auc_tt"] == runs["torchrun"]["auc_tt"]


LAUNCHERS = {
    "ours": (["-m", "ecorec_torchrec.cli"], ["--nproc", "2"]),
    "torchrun": (
        ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "ecorec_torchrec.cli"],
        [],
    ),
}


@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=pytest.mark.long)])
def test_an_error_on_one_rank_ends_all_with_the_first_error(tmp_path: Path, launcher: str) -> None:
    """The other ranks wait in a collective for up to half an hour otherwise, or say first that
    their connection was closed."""
    lines = ["\t".join(["0", *["1"] * 13, *["a"] * 26])] * 1000
    for name in ("val.txt", "test.txt"):
        (tmp_path / name).write_text("\n".join(lines))
    # Only rank 1 parses this line: it is in the second half of its global batch.
    lines[63] = lines[63].replace("a", "broken", 1)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    program, flags = LAUNCHERS[launcher]
    started_s = time.monotonic()
    done = start(
        *program, "train", "--config", "criteo_kaggle", "--data", ".", *flags,
        "--train.batch-size", "64", "--model.embedding-dim", "8",
        "--data.criteo.shuffle-buffer-rows", "1", "--data.criteo.num-embeddings", "100",
        "--data.criteo.val-files", "val.txt", "--data.criteo.test-files", "test.txt",
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert time.monotonic() - started_s < 120
    error = "train.txt:64: not a Criteo row"
    if launcher == "ours":
        # Python's own resource tracker may speak last.
        said = [line for line in done.stderr.splitlines() if line.startswith("ecorec: ")]
        assert said[-1].startswith(f"ecorec: the run failed: rank 1: {error}")
    else:
        assert f"ecorec: rank 1: {error}" in done.stderr
        assert f"ValueError: {error}" in done.stderr.partition("Root Cause")[2]
        assert "Connection closed" not in done.stderr
