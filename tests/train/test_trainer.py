"""Whole runs on tiny data: equal on any number of ranks, resumable, honest about failure."""

import csv
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ecorec_torchrec.train.checkpoint import Checkpoints, read_progress
from ecorec_torchrec.train.config import CheckpointConfig, OptimizerConfig, TrainConfig
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import hashing_rows, run
from ecorec_torchrec.train.run_folder import prepare_run_folder

CPU = torch.device("cpu")


def run_alone(config: TrainConfig) -> dict[str, Any]:
    with process_group("cpu") as device:
        return run(config, device)


def run_on_rank(rank: int, config: TrainConfig) -> dict[str, Any]:
    return run(config, CPU)


def read_rows(config: TrainConfig, split: str, *, folder: str = "") -> list[dict[str, str]]:
    path = Path(config.output.folder) / config.name / folder / "metrics.csv"
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


def read_losses(config: TrainConfig) -> list[float]:
    return [float(row["loss"]) for row in read_rows(config, "train")]


def test_run_folder(tiny_config: TrainConfig) -> None:
    tiny_config.output.plots = True
    summary = run_alone(tiny_config)
    folder = Path(tiny_config.output.folder) / "tiny"
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert yaml.safe_load((folder / "config.yaml").read_text())["name"] == "tiny"
    tables = yaml.safe_load((folder / "plan.yaml").read_text())["modules"].popitem()[1]
    kernels = {name: table["kernel"] for name, table in tables.items()}
    assert kernels == {"sparse_0": "tt", "sparse_1": "tt", "sparse_2": "fused"}
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert 0.5 < summary["auc_tt"] <= 1
    assert summary["world_size"] == 1 and summary["num_test_rows"] == 64
    # Two TT tables of (p_k, r, q_k, r) cores with the two moments of Adam, and their step
    # counters; a dense table of 200 rows with one accumulator each.
    assert summary["embedding_bytes_tt"] == pytest.approx(_expected_bytes(tables), rel=0.01)


def test_metrics_tell_where_the_time_of_a_step_goes(tiny_config: TrainConfig, ranks) -> None:  # type: ignore[no-untyped-def]
    """The parts add up. No times of evaluation, of the twins, and without the option."""
    tiny_config.compare_dense = True
    ranks.run(run_on_rank, tiny_config)
    rows = read_rows(tiny_config, "train")
    for row in rows:
        parts = [float(row[f"{part}_ms"]) for part in ("lookup", "exposed_comm", "dense", "wait")]
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(float(row["step_ms"]))
    untimed = read_rows(tiny_config, "val") + read_rows(tiny_config, "train", folder="dense")
    tiny_config.train.step_times, tiny_config.compare_dense = False, False
    ranks.run(run_on_rank, tiny_config)
    untimed += read_rows(tiny_config, "train")
    assert len(untimed) > len(rows)
    assert not any(row["step_ms"] or row["lookup_ms"] for row in untimed)


def _expected_bytes(tables: dict[str, Any]) -> int:
    weights = 0
    for name in ("sparse_0", "sparse_1"):
        tt = tables[name]["tt"]
        left, right = [1, *tt["ranks"]], [*tt["ranks"], 1]
        factors = zip(tt["row_factors"], left, tt["col_factors"], right, strict=True)
        weights += sum(p * r * q * s for p, r, q, s in factors)
    return 4 * (3 * weights + 200 * 16 + 200)


def test_two_and_three_ranks_train_like_one(tiny_config: TrainConfig, ranks) -> None:  # type: ignore[no-untyped-def]
    """Also with 577 training rows, whose last batch of one row leaves ranks with none, and in
    dist groups."""
    tiny_config.data.synthetic.num_rows = 721
    alone = run_alone(tiny_config)
    losses = read_losses(tiny_config)
    tiny_config.plan.num_dist_groups = 2
    for world_size in (2, 3):
        config = replace(tiny_config, name=f"ranks-{world_size}")
        summaries = ranks.run(run_on_rank, config, world_size=world_size)
        assert all(summary == summaries[0] for summary in summaries)
        assert summaries[0]["world_size"] == world_size
        assert summaries[0]["num_test_rows"] == alone["num_test_rows"] == 72
        assert read_losses(config) == pytest.approx(losses, rel=1e-4)
        assert summaries[0]["loss_tt"] == pytest.approx(alone["loss_tt"], rel=1e-4)
        assert summaries[0]["embedding_bytes_tt"] == alone["embedding_bytes_tt"]


def test_every_epoch_trains(tiny_config: TrainConfig) -> None:
    """A pipelined trainer can run dry after its first epoch and go on without training."""
    tiny_config.train = replace(tiny_config.train, epochs=3, log_every_steps=1)
    run_alone(tiny_config)
    rows = read_rows(tiny_config, "train")
    assert [int(row["step"]) for row in rows] == list(range(1, 25)), "3 epochs of 8 batches"
    assert [int(row["epoch"]) for row in rows] == [1] * 8 + [2] * 8 + [3] * 8
    assert len({row["loss"] for row in rows}) == 24
    epoch_losses = [sum(map(float, (r["loss"] for r in rows[k : k + 8]))) for k in (0, 8, 16)]
    assert epoch_losses[0] > epoch_losses[1] > epoch_losses[2]
    assert len(read_rows(tiny_config, "val")) == 3


@pytest.mark.parametrize("steps_done", [8, 11], ids=["at an epoch's end", "inside an epoch"])
def test_a_resumed_run_equals_an_unbroken_one(tiny_config: TrainConfig, steps_done: int) -> None:
    """Weights, optimizer state, position, dropout and the best epoch so far all go on."""
    tiny_config.model.dropout = 0.3
    tiny_config.train = replace(tiny_config.train, epochs=3, log_every_steps=1)
    tiny_config.checkpoint = replace(tiny_config.checkpoint, every_steps=1, keep=100)
    unbroken = run_alone(tiny_config)
    losses = read_losses(tiny_config)
    folder = Path(tiny_config.output.folder) / "tiny"
    for checkpoint in (folder / "checkpoints").iterdir():
        if read_progress(checkpoint).steps > steps_done:  # as if killed before it was written
            shutil.rmtree(checkpoint)
    resumed = run_alone(replace(tiny_config, resume=True))
    assert read_losses(tiny_config) == losses
    for figure in ("auc_tt", "loss_tt", "best_epoch_tt", "embedding_bytes_tt"):
        assert resumed[figure] == unbroken[figure]


def test_a_run_that_was_cut_short_goes_on_inside_its_epoch(tiny_config: TrainConfig) -> None:
    tiny_config.train = replace(tiny_config.train, log_every_steps=1)
    run_alone(tiny_config)
    losses = read_losses(tiny_config)
    short = replace(tiny_config, name="short", train=replace(tiny_config.train, max_steps=11))
    run_alone(short)
    assert read_losses(short) == losses[:11]
    run_alone(replace(tiny_config, name="short", resume=True))
    assert read_losses(short) == losses


def test_resuming_with_other_data_or_tables_is_an_error(tiny_config: TrainConfig) -> None:
    run_alone(tiny_config)
    other = replace(tiny_config, resume=True, seed=1)
    with pytest.raises(ValueError, match="resume=True: seed was 0, and is now 1"):
        run_alone(other)
    rank = tiny_config.tt.rank
    other = replace(tiny_config, resume=True, tt=replace(tiny_config.tt, rank=rank + 1))
    with pytest.raises(ValueError, match=rf"tt\.rank was {rank}, and is now {rank + 1}$"):
        run_alone(other)


def test_tensorboard_events(tiny_config: TrainConfig) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_config.output.tensorboard = True
    summary = run_alone(tiny_config)
    folder = Path(tiny_config.output.folder) / "tiny" / "tensorboard"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Scalars("test/auc")[-1].value == pytest.approx(summary["auc_tt"])
    expected = {"train/loss", "train/samples_per_second", "train/lookup_ms", "val/ne"}
    assert expected <= set(events.Tags()["scalars"])


def test_resuming_nothing_is_an_error(tiny_config: TrainConfig) -> None:
    with pytest.raises(ValueError, match="there is no run in .*tiny"):
        run_alone(replace(tiny_config, resume=True))


def test_an_earlier_run_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for content in ("first", "second", "third"):
        prepare_run_folder(folder, resume=False)
        (folder / "config.yaml").write_text(content)
    names = {path.name: (path / "config.yaml").read_text() for path in tmp_path.iterdir()}
    assert names == {"run": "third", "run.1": "first", "run.2": "second"}


def test_a_mistake_moves_no_earlier_run_aside(tiny_config: TrainConfig) -> None:
    run_alone(tiny_config)
    tt = tiny_config.tt
    tiny_config.tt = replace(tt, tables=("sparse_99",))
    with pytest.raises(ValueError, match="no table 'sparse_99'"):
        run_alone(tiny_config)
    tiny_config.tt = tt
    plan = Path(tiny_config.output.folder) / "tiny" / "plan.yaml"
    tiny_config.plan.file = str(plan.with_name("other.yaml"))
    other_rows = plan.read_text().replace("num_embeddings: 200", "num_embeddings: 300")
    Path(tiny_config.plan.file).write_text(other_rows)
    with pytest.raises(ValueError, match="num_embeddings"):
        run_alone(tiny_config)
    folder = Path(tiny_config.output.folder)
    assert [path.name for path in folder.iterdir()] == ["tiny"]
    assert (folder / "tiny" / "summary.json").is_file()


def test_only_the_newest_checkpoints_are_kept(tiny_config: TrainConfig) -> None:
    tiny_config.checkpoint = replace(tiny_config.checkpoint, keep=2, every_steps=3)
    run_alone(tiny_config)
    folder = Path(tiny_config.output.folder) / "tiny" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000015", "step-00000016"]
    (folder / "step-00000099.partial").mkdir()
    assert Checkpoints(folder, keep=2).newest() == folder / "step-00000016"


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tiny_config: TrainConfig, ranks) -> None:  # type: ignore[no-untyped-def]
    tiny_config.train = replace(tiny_config.train, log_every_steps=1)
    run_alone(tiny_config)
    losses = read_losses(tiny_config)
    config = replace(tiny_config, name="moved")
    config.train = replace(config.train, epochs=1)
    run_alone(config)
    config.train = replace(config.train, epochs=2)
    ranks.run(run_on_rank, replace(config, resume=True), world_size=2)
    assert read_losses(config) == pytest.approx(losses, rel=1e-4)


def test_comparison_with_both_twins(tiny_config: TrainConfig, ranks) -> None:  # type: ignore[no-untyped-def]
    tiny_config.compare_dense = True
    tiny_config.data.synthetic.num_embeddings = 1000
    summary = ranks.run(run_on_rank, tiny_config, world_size=2)[0]
    for variant in ("tt", "dense", "hash_equal_bytes"):
        assert 0 < summary[f"auc_{variant}"] <= 1
        assert summary[f"samples_per_second_{variant}"] > 0
    dense_bytes = 3 * 1000 * (16 + 1) * 4
    assert summary["embedding_bytes_dense"] == dense_bytes
    assert summary["embedding_bytes_tt"] < dense_bytes
    # The hashing twin takes no more bytes, and less by no more than a row per table.
    spare = summary["embedding_bytes_tt"] - summary["embedding_bytes_hash_equal_bytes"]
    assert 0 <= spare < 2 * (16 + 1) * 4
    ratio = summary["bytes_ratio_dense_to_tt"]
    assert ratio == pytest.approx(dense_bytes / summary["embedding_bytes_tt"])
    assert summary["embedding_bytes_dense_rows_that_occur"] < dense_bytes


def test_finished_twins_are_not_trained_again(tiny_config: TrainConfig) -> None:
    tiny_config.compare_dense = True
    first = run_alone(tiny_config)
    folder = Path(tiny_config.output.folder) / "tiny" / "dense"
    before = (folder / "metrics.csv").stat().st_mtime_ns
    resumed = run_alone(replace(tiny_config, resume=True))
    assert (folder / "metrics.csv").stat().st_mtime_ns == before
    assert resumed["auc_dense"] == first["auc_dense"]
    assert resumed["auc_tt"] == first["auc_tt"]


def test_hashing_rows_count_optimizer_state() -> None:
    rowwise, adagrad = (OptimizerConfig(name=name) for name in ("rowwise_adagrad", "adagrad"))
    assert hashing_rows({"a": 26_000, "b": 1}, 64, rowwise) == {"a": 100, "b": 1}
    assert hashing_rows({"a": 51_200}, 64, adagrad) == {"a": 100}


def test_a_loss_that_is_not_finite_stops_the_run(tiny_config: TrainConfig) -> None:
    tiny_config.optim.dense = OptimizerConfig(name="sgd", learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="loss is nan at step 5 .*not finite on rank 0"):
        run_alone(tiny_config)


def test_spoilt_weights_do_not_replace_the_last_good_checkpoint(
    tiny_config: TrainConfig, tmp_path: Path
) -> None:
    """Also where checkpoints are more frequent than lines of the log, which is where one looks."""
    tiny_config.optim.dense = OptimizerConfig(name="sgd", learning_rate=1e30)
    tiny_config.train.log_every_steps = 1000
    tiny_config.checkpoint = CheckpointConfig(keep=1, every_steps=1)
    with pytest.raises(FloatingPointError, match="not finite at step .*on rank 0: "):
        run_alone(tiny_config)
    (checkpoint,) = Path(tiny_config.output.folder).rglob("step-*")
    dcp_to_torch_save(checkpoint, tmp_path / "state.pt")
    weights = torch.load(tmp_path / "state.pt", weights_only=False)["model"]
    assert weights and all(torch.isfinite(weight).all() for weight in weights.values())


def test_guessing_is_warned_of(tiny_config: TrainConfig) -> None:
    """A model that stays at an AUC of 0.5 goes unnoticed for hours otherwise."""
    nothing = OptimizerConfig(name="sgd", learning_rate=0.0)
    tiny_config.optim = replace(tiny_config.optim, tt=nothing, embedding=nothing, dense=nothing)
    tiny_config.data.synthetic.num_rows = 40_000  # so that chance is within 0.005 of 0.5
    tiny_config.data.synthetic.num_dense_features = 1
    tiny_config.train = replace(tiny_config.train, epochs=1, max_steps=1, batch_size=4000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_alone(tiny_config)
    auc = float(read_rows(tiny_config, "val")[0]["auc"])
    guessing = [w for w in caught if "the model is guessing" in str(w.message)]
    assert bool(guessing) == (abs(auc - 0.5) <= 0.005)


def test_zero_learning_rate_freezes_tt_tables(tiny_config: TrainConfig) -> None:
    from ecorec_torchrec.train.export import export_table

    tables = []
    for name, epochs in (("short", 1), ("long", 3)):
        config = replace(tiny_config, name=name, train=replace(tiny_config.train, epochs=epochs))
        config.optim = replace(config.optim, tt=OptimizerConfig(name="sgd", learning_rate=0.0))
        run_alone(config)
        checkpoint = Checkpoints(Path(config.output.folder) / name / "checkpoints", 1).newest()
        assert checkpoint is not None
        for table in ("sparse_0", "sparse_2"):
            out = checkpoint / f"{table}.pt"
            assert export_table(checkpoint, table, out).table.num_embeddings == 200
            tables.append(torch.load(out))
    assert torch.equal(tables[0], tables[2]), "the TT table did not move"
    assert not torch.equal(tables[1], tables[3]), "the dense table did"
    assert 0.005 < float(tables[0].std()) < 0.05, "initial entries have the wanted spread"


def test_entry_std_of_the_config_reaches_the_cores(tiny_config: TrainConfig) -> None:
    from ecorec_torchrec.train.export import export_table

    tiny_config.tt = replace(tiny_config.tt, entry_std=0.2)
    tiny_config.optim = replace(
        tiny_config.optim, tt=OptimizerConfig(name="sgd", learning_rate=0.0)
    )
    tiny_config.train = replace(tiny_config.train, epochs=1)
    run_alone(tiny_config)
    checkpoint = Checkpoints(Path(tiny_config.output.folder) / "tiny" / "checkpoints", 1).newest()
    assert checkpoint is not None
    export_table(checkpoint, "sparse_0", checkpoint / "t.pt")
    assert float(torch.load(checkpoint / "t.pt").std()) == pytest.approx(0.2, rel=0.25)


def test_the_planner_may_leave_tables_dense(tiny_config: TrainConfig) -> None:
    """With tt.choice=auto, tables are compressed only where memory asks for it."""
    tiny_config.tt = replace(tiny_config.tt, choice="auto")
    tiny_config.data.synthetic.num_embeddings = 20_000
    roomy = run_alone(tiny_config)
    tight_plan = replace(tiny_config.plan, ddr_cap_gib=3 / 1024)
    tight = run_alone(replace(tiny_config, name="tight", plan=tight_plan))
    assert roomy["embedding_bytes_tt"] == 3 * 20_000 * 17 * 4
    assert tight["embedding_bytes_tt"] < 0.8 * roomy["embedding_bytes_tt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": ("sparse_0", "sparse_7")}, "no table 'sparse_7'; there are sparse_0, sparse_1"),
        ({"num_cores": 7}, "7"),
    ],
)
def test_tt_settings_that_do_not_fit(
    tiny_config: TrainConfig, change: dict[str, Any], message: str
) -> None:
    tiny_config.tt = replace(tiny_config.tt, **change)
    if "num_cores" in change:
        run_alone(tiny_config)  # any number of cores works
        return
    with pytest.raises(ValueError, match=message):
        run_alone(tiny_config)


def test_data_parallel_tables_by_plan_file(tiny_config: TrainConfig, ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A hand-written plan: TT data-parallel, TT table-wise and dense row-wise, trained like one."""
    tiny_config.optim.embedding = OptimizerConfig(name="sgd", learning_rate=0.1)
    alone = run_alone(tiny_config)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "schema_version: 1\nworld_size: 2\ndevice: cpu\nmodules:\n"
        "  model.sparse_arch.embedding_bag_collection:\n"
        "    sparse_0: {kernel: tt, sharding: data_parallel}\n"
        "    sparse_1: {kernel: tt, sharding: table_wise, ranks: [1]}\n"
        "    sparse_2: {kernel: fused, sharding: row_wise}\n"
    )
    config = replace(tiny_config, name="by-plan", plan=replace(tiny_config.plan, file=str(plan)))
    summary = ranks.run(run_on_rank, config, world_size=2)[0]
    assert read_losses(config) == pytest.approx(read_losses(tiny_config), rel=1e-3)
    assert summary["embedding_bytes_tt"] == alone["embedding_bytes_tt"], "replicas count once"
    with pytest.raises(ValueError, match="plan is for world_size=2, this run has world_size=1"):
        run_alone(replace(config, name="one-rank"))
