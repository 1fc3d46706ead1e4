"""The examples of the documentation run as written."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
