"""The examples of the documentation run as written."""

import contextlib
import difflib
import io
import os
import random
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from ecorec_torchrec import TTEmbeddingBagCollection, TTSpec
from ecorec_torchrec.testing import RankPool

ROOT = Path(__file__).parents[2]


def run_program(rank: int, name: str, arguments: list[str], port: int) -> list[str]:
    """The lines that an example prints, run in a kept process: imports are what takes long."""
    dist.destroy_process_group()  # it makes its own
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv = [name, *arguments]
    torch.manual_seed(0)  # not what the tests before have left
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "docs" / "examples" / name), run_name="__main__")
    return printed.getvalue().splitlines()


def run_example(ranks: RankPool, name: str, *arguments: object, world_size: int = 1) -> list[str]:
    """As `torchrun docs/examples/NAME ARGUMENTS` does; what rank 0 prints."""
    texts = [str(argument) for argument in arguments]
    return ranks.run(run_program, name, texts, free_port(), world_size=world_size)[0]


def free_port() -> int:
    """Below those that systems hand out, which a test in another process may be given meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise RuntimeError("no free port found")


def test_quickstart_runs_on_two_ranks() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, ROOT / "docs" / "examples" / "quickstart.py"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert "saved and loaded 6 cores" in done.stdout


def test_exported_model_is_served_where_torchrec_cannot_be_imported(tmp_path: Path) -> None:
    """In another process, and with the numbers of the model that was trained."""
    examples, model = ROOT / "docs" / "examples", tmp_path / "model.pt2"
    without_torchrec = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('torchrec', 'fbgemm_gpu', 'fbgemm')))\n"
        f"sys.argv = ['serve', {str(model)!r}]\n"
        f"runpy.run_path({str(examples / 'serve_model.py')!r})\n"
    )
    outputs = []
    for arguments in ([examples / "export_model.py", model], ["-c", without_torchrec]):
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout.splitlines())
    (trained,), (served, nobody) = outputs
    assert served == trained and trained.startswith("probability 0.")
    assert nobody == "0 probabilities of no examples"


def test_migration_changes_at_most_five_lines() -> None:
    plain, migrated = (
        (ROOT / "docs" / "examples" / name).read_text().partition('"""\n\nimport')[2].splitlines()
        for name in ("plain_torchrec.py", "migrated.py")
    )
    changed = [line for line in difflib.ndiff(plain, migrated) if line.startswith("+ ")]
    assert 0 < len([line for line in changed if line.strip() != "+"]) <= 5


@pytest.mark.parametrize(
    ("name", "user_parameters"), [("plain_torchrec", 6_400_000), ("migrated", 64_256)]
)
def test_model_trains_before_and_after_its_migration(
    ranks: RankPool, name: str, user_parameters: int
) -> None:
    *steps, last = run_example(ranks, f"{name}.py", world_size=2)
    losses = [float(line.split()[-1]) for line in steps]
    assert losses[-1] < 0.5 * losses[0]
    assert last == f"{user_parameters} user parameters"


def test_cores_of_fbtt_give_the_rows_that_they_give_there() -> None:
    """Theirs are `(tables, p, r q r)`; a row is the product of its slices, last index fastest."""
    spec = TTSpec(30, row_factors=(2, 3, 5), col_factors=(2, 2, 4), ranks=(3, 4))
    config = EmbeddingBagConfig(name="t", num_embeddings=30, embedding_dim=16, feature_names=["f"])
    ebc = TTEmbeddingBagCollection([config], tt={"t": spec})
    theirs = [torch.randn(2, 2, 1 * 2 * 3), torch.randn(2, 3, 3 * 2 * 4), torch.randn(2, 5, 4 * 4)]
    convert = runpy.run_path(str(ROOT / "docs" / "examples" / "from_fbtt.py"))["cores_from_fbtt"]
    convert(ebc, "t", theirs, number=1)
    row = 17  # = (1 * 3 + 0) * 5 + 2
    first, second, third = theirs[0][1, 1], theirs[1][1, 0], theirs[2][1, 2]
    product = first.view(2, 3) @ second.view(3, 2 * 4)
    expected = (product.view(2 * 2, 4) @ third.view(4, 4)).flatten()
    ids = KeyedJaggedTensor(["f"], torch.tensor([row]), lengths=torch.tensor([1]))
    torch.testing.assert_close(ebc(ids).values()[0], expected)


def test_optimizers(ranks: RankPool) -> None:
    own, norm, *rest = run_example(ranks, "optimizers.py")
    assert own == "rate of users 0.004"
    assert norm.startswith("norm ")
    assert rest == [
        "rate 0.0127",
        "trained: 3 cores of users",
        "the gradient of users is not finite; nothing was updated",
    ]


def test_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    resumed, unsharded, partial, *_, converted = run_example(ranks, "checkpoints.py", tmp_path)
    assert resumed == "resumed at 4: equal True"
    assert unsharded == "unsharded: loaded 6 tensors"
    assert partial.startswith("4 tensors of ")
    assert converted.startswith("converted: ['users'] to ")
