"""Trained dense tables become TT tables, and TT tables dense ones, on disk."""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.embedding_configs import EmbeddingConfig

from ecorec_torchrec.cli import main
from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.plan import tt_data_parallel, tt_table_wise
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.train.convert import RankChoice, compress, decompress
from ecorec_torchrec.train.saved_state import open_state
from ecorec_torchrec.train.saved_tables import model_names, read_tt_specs
from ecorec_torchrec.tt import TTSpec, from_dense, to_dense

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS = {"users": 5000, "products": 3000, "hours": 24}
DIM, RANK = 16, 8


def low_rank_weight(num_rows: int) -> Tensor:
    """A table that cores of rank 8 hold but for a little noise."""
    padded = TTSpec.suggest(num_rows, DIM, rank=RANK)
    spec = TTSpec(padded.num_padded_rows, padded.row_factors, padded.col_factors, padded.ranks)
    weight = to_dense([torch.randn(shape) for shape in spec.core_shapes], spec)[:num_rows]
    return weight / weight.norm() + 1e-4 * torch.randn_like(weight) / weight.numel() ** 0.5


def configs(config_type: Any = EmbeddingBagConfig) -> list[Any]:
    return [
        config_type(num_embeddings=n, embedding_dim=DIM, name=name, feature_names=[f"f_{name}"])
        for name, n in ROWS.items()
    ]


class Model(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(3 * DIM, 1)


@pytest.fixture
def dense_model() -> Model:
    model = Model(EmbeddingBagCollection(configs()))
    with torch.no_grad():
        for name in ("users", "products"):
            model.ebc.embedding_bags[name].weight.copy_(low_rank_weight(ROWS[name]))
    return model


def save(model: nn.Module, path: Path, form: str) -> Path:
    """In the forms that users save: with or without an optimizer, by DCP or torch.save."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # makes state, changes no weight
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    state = model.state_dict()
    by_name = {name: optimizer.state[p] for name, p in model.named_parameters()}
    if form == "dcp":
        dcp.save({"model": state, "optimizer": {"state": by_name}}, checkpoint_id=path)
    elif form == "dcp of the model alone":
        dcp.save(state, checkpoint_id=path)
    else:
        torch.save({"net": state, "opt": optimizer.state_dict()}, path)
    return path


def check_loads(model: Model, converted: Path, prefix: str) -> Model:
    """The TT model takes every tensor of the converted checkpoint, and nothing is missing."""
    tt = TTEmbeddingBagCollection(configs(), tt=read_tt_specs(converted))
    loaded = Model(tt)
    state = open_state(converted)
    assert set(state.tensors) == {prefix + name for name in loaded.state_dict()}
    values = state.read(state.tensors)
    loaded.load_state_dict({name.removeprefix(prefix): v for name, v in values.items()})
    assert torch.equal(loaded.over.weight, model.over.weight)
    return loaded


@pytest.mark.parametrize(
    ("form", "prefix", "dropped"),
    [("dcp", "model.", 15), ("dcp of the model alone", "", 0), ("torch.save", "net.", 15)],
)
def test_dense_checkpoints_of_every_form(
    dense_model: Model, tmp_path: Path, form: str, prefix: str, dropped: int
) -> None:
    source = save(dense_model, tmp_path / "dense", form)
    weights = {n: t.weight.detach() for n, t in dense_model.ebc.embedding_bags.items()}
    out = tmp_path / "tt"
    result = compress(source, out, RankChoice(rank=RANK), min_bytes=100_000)
    assert result.dropped == dropped
    loaded = check_loads(dense_model, out, prefix)
    for table in result.tables:
        bag = loaded.ebc.embedding_bags[table.name]
        if table.name == "hours":
            assert torch.equal(bag.weight, weights["hours"])
            continue
        assert table.spec is not None and table.spec.ranks == (RANK, RANK)
        rows = to_dense(list(bag.tt_cores), table.spec)
        error = float((rows - weights[table.name]).norm() / weights[table.name].norm())
        assert table.relative_error == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert error < 0.05

    back = decompress(out, tmp_path / "back")
    assert all(table.spec is None for table in back.tables)
    values = open_state(tmp_path / "back").read([f"{prefix}ebc.embedding_bags.users.weight"])
    [users] = values.values()
    cores = list(loaded.ebc.embedding_bags.users.tt_cores)
    assert torch.equal(users, to_dense(cores, read_tt_specs(out)["users"]))


def test_reported_bytes_are_those_of_the_tensors_and_of_the_file(
    dense_model: Model, tmp_path: Path
) -> None:
    """A file of a megabyte where a gigabyte was expected: is it right?"""
    source = save(dense_model, tmp_path / "dense", "dcp of the model alone")
    result = compress(source, tmp_path / "tt", RankChoice(rank=RANK), min_bytes=100_000)
    state = open_state(tmp_path / "tt")
    values = state.read(state.tensors)
    for table in result.tables:
        assert table.dense_bytes == ROWS[table.name] * DIM * 4
        own = [v for n, v in values.items() if f"embedding_bags.{table.name}." in n]
        assert table.stored_bytes == sum(v.nbytes for v in own)
        if table.spec is not None:
            assert table.stored_bytes == table.spec.nbytes(torch.float32)
    assert result.tensor_bytes == sum(v.nbytes for v in values.values())
    assert result.file_bytes == sum(f.stat().st_size for f in (tmp_path / "tt").iterdir())
    overhead = result.file_bytes - result.tensor_bytes
    assert 0 < overhead < 4000 * (len(values) + 2), "headers, and nothing else"


def test_the_smallest_rank_within_an_error(dense_model: Model, tmp_path: Path) -> None:
    source = save(dense_model, tmp_path / "dense", "dcp of the model alone")
    weight = dense_model.ebc.embedding_bags["users"].weight.detach()
    result = compress(source, tmp_path / "tt", RankChoice(max_error=0.3), tables=["users"])
    [users] = [table for table in result.tables if table.name == "users"]
    assert users.spec is not None and users.relative_error is not None
    assert users.relative_error <= 0.3
    rank = users.spec.ranks[0]
    assert 1 < rank <= 8
    assert from_dense(weight, TTSpec.suggest(5000, DIM, rank=rank - 1))[1] > 0.3


def test_the_largest_rank_within_a_budget(dense_model: Model, tmp_path: Path) -> None:
    source = save(dense_model, tmp_path / "dense", "torch.save")
    result = compress(source, tmp_path / "tt", RankChoice(max_bytes=9000), tables=["products"])
    spec = next(table.spec for table in result.tables if table.name == "products")
    assert spec == TTSpec.suggest(3000, DIM, max_bytes=9000)
    with pytest.raises(ValueError, match="table 'products': max_bytes=10 is below the .* bytes"):
        compress(source, tmp_path / "small", RankChoice(max_bytes=10), tables=["products"])
    assert not (tmp_path / "small").exists()


def test_tables_that_would_not_shrink_stay_dense(tmp_path: Path) -> None:
    model = EmbeddingBagCollection(configs())  # noise
    source = save(model, tmp_path / "dense", "dcp of the model alone")
    result = compress(source, tmp_path / "tt", RankChoice(max_error=0.01), min_bytes=1)
    notes = {table.name: table.note for table in result.tables}
    assert "the largest that saves bytes" in notes["users"]
    assert all(table.stored_bytes == table.dense_bytes for table in result.tables)
    assert open_state(tmp_path / "tt").tensors == open_state(source).tensors
    result = compress(source, tmp_path / "big", RankChoice(rank=500), tables=["hours"])
    notes = {table.name: table.note for table in result.tables}
    assert "would take no fewer bytes" in notes["hours"] and not notes["users"]


def test_one_table_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ecorec_torchrec.train import saved_state

    source = save(EmbeddingBagCollection(configs()), tmp_path / "dense", "dcp of the model alone")
    read, seen, most = saved_state._DcpState.read, [], []

    def counting_read(self: Any, names: Any) -> dict[str, Tensor]:
        values = read(self, names)
        seen.extend(weakref.ref(value) for value in values.values() if value.dim() == 2)
        gc.collect()
        most.append(sum(ref() is not None for ref in seen))
        return values

    monkeypatch.setattr(saved_state._DcpState, "read", counting_read)
    compress(source, tmp_path / "tt", RankChoice(rank=4), tables=["users"])
    assert len(seen) == 3 and max(most) == 1
    compress(source, tmp_path / "tt2", RankChoice(rank=4), tables=["users", "products"])
    assert max(most) == 1


def test_sequence_tables_are_found_too(tmp_path: Path) -> None:
    source = save(EmbeddingCollection(configs(EmbeddingConfig)), tmp_path / "ec", "dcp")
    compress(source, tmp_path / "tt", RankChoice(rank=4), tables=["users"])
    names = set(open_state(tmp_path / "tt").tensors)
    assert {f"model.embeddings.users.tt_cores.{k}" for k in range(3)} <= names


def test_tables_of_one_name_in_two_collections(tmp_path: Path) -> None:
    """Their numbers of rows, which cores do not tell, are not mixed up."""
    rows = {"pooled": 3000, "recent": 5000}
    model = nn.ModuleDict(
        {
            name: EmbeddingBagCollection([EmbeddingBagConfig(n, DIM, "users", feature_names=["f"])])
            for name, n in rows.items()
        }
    )
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dense")
    compress(tmp_path / "dense", tmp_path / "tt", RankChoice(rank=4), tables=["users"])
    decompress(tmp_path / "tt", tmp_path / "back")
    found = open_state(tmp_path / "back").tensors
    assert {name.partition(".")[0]: info.shape[0] for name, info in found.items()} == rows


def test_modules_named_as_parts_of_optimizers_are_kept(tmp_path: Path) -> None:
    model = nn.ModuleDict({"state": nn.Sequential(nn.Linear(2, 2)), "ebc": Model(nn.Linear(1, 1))})
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "m")
    state = open_state(tmp_path / "m")
    assert model_names(state) == list(state.tensors)


TOY_TABLES = ("t_tw", "t_dp", "d_rw")


def toy_model(folder: str, device: str) -> tuple[toy.ToyModel, dict[str, TTSpec]]:
    tables, specs = toy.configs(TOY_TABLES), read_tt_specs(folder)
    collection = TTEmbeddingBagCollection(tables, specs, device=torch.device(device))
    return toy.ToyModel(collection, tables), specs


def load_sharded(rank: int, folder: str) -> list[Tensor]:
    model, specs = toy_model(folder, "meta")
    plan = {
        "t_tw": tt_table_wise(1, tt=specs["t_tw"]),
        "t_dp": tt_data_parallel(tt=specs["t_dp"]),
        "d_rw": row_wise(compute_kernel="fused"),
    }
    sharded = toy.shard(model, plan)
    state = {"model": sharded.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    return outputs(sharded.module)


def outputs(model: nn.Module) -> list[Tensor]:
    pooled = model.ebc(toy.make_batch(TOY_TABLES, 0, 0).features)
    return [pooled[name].detach().clone() for name in sorted(pooled.keys())]


def test_a_converted_checkpoint_loads_sharded(ranks: RankPool, tmp_path: Path) -> None:
    tables = toy.configs(TOY_TABLES)
    dense = toy.ToyModel(EmbeddingBagCollection(tables), tables)
    dcp.save({"model": dense.state_dict()}, checkpoint_id=tmp_path / "dense")
    converted = tmp_path / "tt"
    compress(tmp_path / "dense", converted, RankChoice(rank=4), tables=["t_tw", "t_dp"])
    unsharded, specs = toy_model(str(converted), "cpu")
    assert set(specs) == {"t_tw", "t_dp"}
    state = {"model": unsharded.state_dict()}
    dcp.load(state, checkpoint_id=converted)
    unsharded.load_state_dict(state["model"])
    for found in ranks.run(load_sharded, str(converted)):
        for output, wanted in zip(found, outputs(unsharded), strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)


def test_rows_that_nobody_has_told(dense_model: Model, tmp_path: Path) -> None:
    """The cores of a table that another program has saved: 5,000 rows are padded to 5,040."""
    source = save(dense_model, tmp_path / "dense", "dcp")
    compress(source, tmp_path / "tt", RankChoice(rank=4), tables=["users"])
    (tmp_path / "tt" / "tables.json").unlink()
    with pytest.raises(ValueError, match="'users': its cores do not tell .*users ROWS"):
        decompress(tmp_path / "tt", tmp_path / "back")
    back = tmp_path / "back"
    with pytest.raises(ValueError, match="'users': num_embeddings=5041 must lie in 1..5040,"):
        decompress(tmp_path / "tt", back, num_embeddings={"users": 5041})
    with pytest.raises(ValueError, match=r"no TT table usrs in the checkpoint \(users\)"):
        decompress(tmp_path / "tt", back, num_embeddings={"usrs": 5000})
    flags = ["--checkpoint", str(tmp_path / "tt"), "--out", str(back), "--to-dense"]
    main(["convert", *flags, "--num-embeddings", "users", "5000"])
    assert open_state(tmp_path / "back").tensors["model.ebc.embedding_bags.users.weight"].shape == (
        5000,
        DIM,
    )


def test_the_program(
    dense_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = save(dense_model, tmp_path / "dense.pt", "torch.save"), tmp_path / "tt"
    where = ["--checkpoint", str(source), "--out", str(out)]
    main(["convert", *where, "--max-error", "0.05", "--min-bytes", "100000"])
    printed = capsys.readouterr().out
    state = open_state(out)
    total = sum(info.nbytes for info in state.tensors.values())
    assert re.search(r"users .* 5,000 .* 16 .* TT r=8x8 .* 320,000 ", printed)
    assert f"{out}: {total:,} bytes of tensors" in printed
    assert "optimizer state is not converted: 15 tensors" in printed
    shapes = yaml.safe_load(printed.partition("`ecorec train`:")[2])["tt"]
    assert shapes["tables"] == ["users", "products"]
    spec = read_tt_specs(out)["users"]
    assert tuple(shapes["shapes"]["users"]["row_factors"]) == spec.row_factors
    main(["convert", "--checkpoint", str(out), "--out", str(tmp_path / "back"), "--to-dense"])
    assert "optimizer state" not in capsys.readouterr().out
    assert open_state(tmp_path / "back").tensors["net.ebc.embedding_bags.users.weight"]
    with pytest.raises(SystemExit):
        main(["convert", *where, "--rank", "4"])
    assert f"{out} exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "exactly one of --rank, --max-error and --max-bytes"),
        (["--rank", "4", "--max-error", "0.1"], "exactly one of"),
        (["--to-dense", "--rank", "4"], "--to-dense takes no --rank"),
        (["--max-error", "2"], "max_error=2.0 must lie between 0 and 1"),
        (["--rank", "4"], "no checkpoint in nowhere: neither a folder"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "--checkpoint", "nowhere", "--out", "somewhere", *flags])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_files_that_hold_more_than_tensors(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ValueError, match="module.pt holds a torch.*Linear: it must be"):
        open_state(tmp_path / "module.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="list.pt holds a list, not a state dict"):
        open_state(tmp_path / "list.pt")


def test_a_damaged_source_is_told_and_nobody_is_asked_to_remove_it(
    dense_model: Model, tmp_path: Path
) -> None:
    source = save(dense_model, tmp_path / "dense", "dcp of the model alone")
    next(source.glob("*.distcp")).unlink()
    with pytest.raises(ValueError, match=r"dense cannot be read \(.*\)$"):
        compress(source, tmp_path / "tt", RankChoice(rank=4), tables=["users"])
    assert not (tmp_path / "tt").exists()


def test_a_table_that_is_not_there(dense_model: Model, tmp_path: Path) -> None:
    source = save(dense_model, tmp_path / "dense", "dcp")
    with pytest.raises(ValueError, match="no dense table usrs in the checkpoint"):
        compress(source, tmp_path / "tt", RankChoice(rank=4), tables=["usrs"])
    with pytest.raises(ValueError, match=r"no TT table users in the checkpoint \(none\)"):
        decompress(source, tmp_path / "tt", tables=["users"])
