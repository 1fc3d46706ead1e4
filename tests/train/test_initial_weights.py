"""Starting from a checkpoint of another model: loaded where it fits, told where it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.train.checkpoint import Checkpoints
from ecorec_torchrec.train.config import OptimizerConfig, TrainConfig
from ecorec_torchrec.train.convert import RankChoice, compress
from ecorec_torchrec.train.initial_weights import load_weights, match_weights
from ecorec_torchrec.train.launch import process_group
from ecorec_torchrec.train.run import run
from ecorec_torchrec.train.saved_state import SavedState, open_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_alone(config: TrainConfig) -> dict[str, Any]:
    with process_group("cpu") as device:
        return run(config, device)


def run_on_rank(rank: int, config: TrainConfig) -> dict[str, Any]:
    return run(config, torch.device("cpu"))


def state_of(config: TrainConfig) -> SavedState:
    newest = Checkpoints(Path(config.output.folder) / config.name / "checkpoints", 1).newest()
    assert newest is not None
    return open_state(newest)


@pytest.fixture
def frozen_config(tiny_config: TrainConfig) -> TrainConfig:
    """One epoch that changes nothing."""
    nothing = OptimizerConfig(name="sgd", learning_rate=0.0)
    tiny_config.optim = replace(tiny_config.optim, tt=nothing, embedding=nothing, dense=nothing)
    tiny_config.train = replace(tiny_config.train, epochs=1)
    return tiny_config


def test_a_dense_run_goes_on_with_tt_tables(
    tiny_config: TrainConfig, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train dense, convert, and train the TT model from there, on two ranks."""
    tt = replace(tiny_config.tt, rank=12)
    dense = replace(tiny_config, name="dense", tt=replace(tt, tables=()))
    before = run_alone(dense)
    folder = Path(dense.output.folder)
    converted = folder / "converted"
    choice = RankChoice(rank=tt.rank)
    result = compress(folder / "dense", converted, choice, tables=tiny_config.tt.tables)
    worst = max(table.relative_error or 0 for table in result.tables)
    assert 0 < worst < 0.8
    config = replace(tiny_config, tt=tt)
    nothing = OptimizerConfig(name="sgd", learning_rate=0.0)
    config.optim = replace(config.optim, tt=nothing, embedding=nothing, dense=nothing)
    config.checkpoint = replace(config.checkpoint, init_from=str(folder / "dense"))
    with pytest.raises(ValueError, match="`ecorec convert` makes TT cores of dense tables"):
        run_alone(config)
    config.checkpoint = replace(config.checkpoint, init_from=str(converted))
    after = ranks.run(run_on_rank, config, world_size=2)[0]
    started, source = state_of(config), open_state(converted)
    values, expected = (state.read(source.tensors).values() for state in (started, source))
    for name, value, wanted in zip(source.tensors, values, expected, strict=True):
        assert torch.equal(value, wanted), name
    assert after["auc_tt"] == pytest.approx(before["auc_dense"], abs=0.1)


def test_a_model_with_another_table(frozen_config: TrainConfig, ranks: RankPool) -> None:
    run_alone(frozen_config)
    other = replace(frozen_config, name="other", seed=1)
    synthetic = replace(other.data.synthetic, num_sparse_features=4)
    other.data = replace(other.data, synthetic=synthetic)
    source = Path(frozen_config.output.folder) / "tiny"
    other.checkpoint = replace(other.checkpoint, init_from=str(source))
    with pytest.raises(ValueError) as refused:
        run_alone(other)
    message = str(refused.value)
    assert "1 missing in the checkpoint: model.sparse_arch" in message
    assert "sparse_3.weight" in message
    assert (
        "1 of another shape: model.over_arch.model.0._mlp.0._linear.weight (there [32, 22]"
        in message
    )
    assert not (source.parent / "other").exists(), "found before the run began"

    other.checkpoint = replace(other.checkpoint, init_may_differ=("sparse_3", "*.over_arch.*"))
    ranks.run(run_on_rank, other, world_size=2)
    old, new = state_of(frozen_config), state_of(other)
    names = [name for name in old.tensors if "sparse_" in name or "dense_arch" in name]
    assert len(names) > 7
    for name, value in new.read(names).items():
        assert torch.equal(value, old.read([name])[name]), name


class Net(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(size, 2))


def test_nothing_is_changed_before_the_report(tmp_path: Path) -> None:
    saved, model = Net(a=3, b=4, gone=1), Net(a=3, b=5, new=1)
    dcp.save({"app": {"net": saved.state_dict()}}, checkpoint_id=tmp_path / "c")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    match = match_weights(open_state(tmp_path / "c"), model)
    assert match.prefix == "app.net."
    assert match.matching == ("a.weight", "a.bias", "b.bias")
    assert match.missing == ("new.weight", "new.bias")
    assert match.unexpected == ("gone.bias", "gone.weight")
    assert match.other_shapes == {"b.weight": ((2, 4), (2, 5))}
    with pytest.raises(ValueError, match="2 missing .*\n.*2 unexpected .*\n.*1 of another shape"):
        load_weights(tmp_path / "c", model, may_differ=["new.*"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_weights(tmp_path / "c", model, may_differ=["new.*", "gone.*", "b.weight"])
    assert torch.equal(model.a.weight, saved.a.weight)
    assert torch.equal(model.b.bias, saved.b.bias)
    assert torch.equal(model.b.weight, before["b.weight"])


def test_a_checkpoint_of_which_nothing_fits(tmp_path: Path) -> None:
    dcp.save({"model": Net(a=3).state_dict()}, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match=r"(?s)0 tensors of .*nothing was loaded"):
        load_weights(tmp_path / "c", Net(b=3), may_differ=["*"])


def load_toy(rank: int, folder: str) -> dict[str, Any]:
    """Another placement, a table less, and a new one."""
    names = ("t_tw", "t_dp", "d_tw")
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables),
        toy.generators(names, 2, {"t_tw": -1, "t_dp": 0}),
    )
    match = load_weights(folder, model, may_differ=["t_q", "d_tw", "linear.*"])
    state = toy.whole_state(model)
    return {name: state[name] for name in match.matching}


def test_sharded_models_load_what_fits(ranks: RankPool, tmp_path: Path) -> None:
    tables = toy.configs(("t_tw", "t_dp", "t_q"))
    saved = toy.ToyModel(toy.collection(tables), tables)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "c")
    loaded = ranks.run(load_toy, str(tmp_path / "c"))[0]
    expected = saved.state_dict()
    assert sum("tt_cores" in name for name in loaded) == 6
    for name, value in loaded.items():
        assert torch.equal(value, expected[name]), name
