"""`ecorec profile`, and what `ecorec plan` and `ecorec train` make of its file."""

import json
import re
from pathlib import Path

import pytest
import yaml

from ecorec_torchrec.cli import main
from ecorec_torchrec.planner import load_profile

PNG = b"\x89PNG"
SKEWED = ["--config", "synthetic_tiny", "--data.synthetic.zipf-exponent", "1.5"]


def test_profile_of_a_data_set_changes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Skewed ids make lookups cheaper than the uniform ones that are assumed without a profile."""
    monkeypatch.chdir(tmp_path)
    main(["profile", *SKEWED, "--plots", "plots", "--samples-per-second", "2e6"])
    printed = capsys.readouterr().out
    assert re.search(r"3,200 samples of synthetic", printed)
    assert "training 2,000,000 samples/s, D = 16" in printed
    profile = load_profile("profile.yaml")
    assert profile.samples == 3200 and list(profile.tables) == ["sparse_0", "sparse_1", "sparse_2"]
    assert len(profile.tables["sparse_0"].hot_ids) > 100
    assert [path.name for path in Path("plots").iterdir()] == ["profile_sparse_0.png"]
    assert Path("plots/profile_sparse_0.png").read_bytes().startswith(PNG)

    def step_ms(*arguments: str) -> float:
        main(["plan", *SKEWED, "--nproc", "2", *arguments, "--json", "figures.json"])
        return json.loads(Path("figures.json").read_text())["step_ms"]

    skewed, uniform = load_profile("profile.yaml"), yaml.safe_load(Path("profile.yaml").read_text())
    lookups = skewed.tables["sparse_0"].all_lookups_per_sample
    for table in uniform["tables"].values():  # as many lookups, hardly any of them repeated
        counts = [min(size * lookups, 900.0) for size in table["batch_sizes"]]
        table["distinct_by_id"] = [[count / 2**k for k in range(8)] for count in counts]
    Path("uniform.yaml").write_text(yaml.safe_dump(uniform))
    assert step_ms("--profile", "profile.yaml") < step_ms("--profile", "uniform.yaml")


def test_plan_files_and_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--train.max-steps", "4", "--output.no-plots"]
    main(["profile", *SKEWED, "--max-samples", "500"])
    with_profile = [*SKEWED, "--profile", "profile.yaml"]
    main(["plan", *with_profile, "--out", "plan.yaml", "--plots", "charts"])
    assert sorted(path.name for path in Path("charts").iterdir()) == ["ranks.png", "tables.png"]
    assert all(path.read_bytes().startswith(PNG) for path in Path("charts").iterdir())
    capsys.readouterr()
    main(["train", *with_profile, *short, "--plan", "auto", "--name", "auto"])
    main(["train", *SKEWED, *short, "--plan", "plan.yaml", "--name", "file"])
    plans = [Path("runs", name, "plan.yaml").read_text() for name in ("auto", "file")]
    assert plans[0] == plans[1] == Path("plan.yaml").read_text()
    with pytest.warns(UserWarning, match=r"plan.profile is ignored: plan.file is a finished plan"):
        main(["plan", *with_profile, "--plan", "plan.yaml"])
    with pytest.warns(UserWarning, match=r"plan.profile is ignored: without tt.tables"):
        main(["plan", "--profile", "profile.yaml"])


def test_profile_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("users.txt").write_text("".join(f"{i % 7}\n" for i in range(70)))
    arguments = ["--trace", "users.txt", "--trace-lookups-per-sample", "2", "--trace-rows", "10"]
    main(["profile", *arguments, "--batch-size", "5", "--out", "users.yaml"])
    users = load_profile("users.yaml").tables["users"]
    assert users.num_embeddings == 10 and users.lookups_per_sample == (2.0,)
    assert sorted(users.hot_ids.tolist()) == list(range(7))
    assert users.reuse.batch_size == 5 and users.reuse.miss_ratio(8) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "--trace", "none.txt"], "trace 'none.txt': no such file"),
        (["profile", "--max-samples", "0"], "--max-samples 0 must be > 0"),
        (["profile", "--data.name", "tables"], "list of tables without data"),
        (["plan", "--config", "synthetic_tiny", "--profile", "none.yaml"], "none.yaml: No such"),
        (["plan", "--config", "synthetic_tiny", "--profile", "broken.yaml"], "broken.yaml: "),
    ],
)
def test_mistakes_are_messages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("schema_version: 1\n")
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
