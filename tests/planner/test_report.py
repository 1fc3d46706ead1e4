"""The report's numbers are those of the tensors, and its totals those of its lines."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.plan import load_plan
from ecorec_torchrec.planner import EcoRecPlanner, PlanReport
from ecorec_torchrec.tt import TTSpec

USERS = TTSpec(10_000, (20, 20, 25), (4, 4, 4), (8, 8))
MOVIES = TTSpec(4_000, (10, 20, 20), (2, 2, 4), (4, 4))


def collection() -> TTEmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[name],
                           data_type=data_type)
        for name, rows, dim, data_type in (
            ("users", 10_000, 64, DataType.FP32),
            ("movies", 4_000, 16, DataType.BF16),
            ("genders", 3, 8, DataType.FP32),
        )
    ]  # fmt: skip
    return TTEmbeddingBagCollection(tables, tt={"users": USERS, "movies": MOVIES})


def planned(topology, sharders) -> tuple[TTEmbeddingBagCollection, PlanReport]:
    model = collection()
    planner = EcoRecPlanner(topology(100), 64, debug=False)
    planner.plan(nn.ModuleDict({"ebc": model}), sharders)
    assert planner.report is not None
    return model, planner.report


def test_bytes_are_those_of_the_core_tensors_and_of_the_file(topology, sharders, tmp_path):
    """A checkpoint of kilobytes where gigabytes were expected: right, and the report says so."""
    model, report = planned(topology, sharders)
    for table in report.tables:
        tensors = list(model.embedding_bags[table.name].parameters())
        assert table.stored_bytes == sum(t.numel() * t.element_size() for t in tensors)
        assert table.ratio == table.dense_bytes / table.stored_bytes
        assert (table.kernel == "tt") == (len(tensors) == 3)
        torch.save([t.detach() for t in tensors], tmp_path / "cores.pt")
        file_bytes = (tmp_path / "cores.pt").stat().st_size
        assert table.stored_bytes <= file_bytes < table.stored_bytes + 3000
    users, movies, genders = report.tables
    assert (users.dense_bytes, users.tt) == (10_000 * 64 * 4, USERS)
    assert movies.dense_bytes == 4_000 * 16 * 2
    assert genders.dense_bytes == genders.stored_bytes == 3 * 8 * 4


def test_totals_are_the_sums(topology, sharders):
    _, report = planned(topology, sharders)
    assert report.dense_bytes == sum(table.dense_bytes for table in report.tables)
    assert report.stored_bytes == sum(table.stored_bytes for table in report.tables)
    on_ranks = sum(sum(table.weight_bytes.values()) for table in report.tables)
    assert sum(rank.weight_bytes for rank in report.ranks) == on_ranks >= report.stored_bytes
    assert all(rank.weight_bytes < rank.needed_bytes < rank.cap_bytes for rank in report.ranks
               if rank.weight_bytes)  # fmt: skip
    assert all(rank.step_ms > 0 for rank in report.ranks if rank.weight_bytes)


def test_plain_text_where_nobody_watches(topology, sharders):
    _, report = planned(topology, sharders)
    file = io.StringIO()
    report.print(file)
    lines = file.getvalue().splitlines()
    assert lines[0].split()[:4] == ["table", "kernel", "sharding", "ranks"]
    assert lines[1].split()[:2] == ["users", "tt"]
    assert "p=20x20x25 q=4x4x4 r=8x8" in lines[1]
    assert f"{report.stored_bytes:,}" in lines[4]
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize(("columns", "drawn"), [("200", True), ("60", False)])
def test_drawn_table_where_the_terminal_has_room(topology, sharders, monkeypatch, columns, drawn):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    _, report = planned(topology, sharders)
    file = Terminal()
    report.print(file)
    assert "users" in file.getvalue()
    assert ("┃" in file.getvalue()) == drawn


def test_plan_that_no_planner_made(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "schema_version: 1\nworld_size: 3\ndevice: cpu\nmodules:\n  '':\n"
        "    users: {kernel: tt, sharding: table_wise, ranks: [2]}\n"
        "    movies: {kernel: tt, sharding: data_parallel}\n"
        "    genders: {kernel: fused, sharding: row_wise}\n"
    )
    model = collection()
    report = PlanReport.of(load_plan(path, model, 3), model)
    movies = MOVIES.nbytes(torch.bfloat16)
    assert [rank.weight_bytes for rank in report.ranks] == [
        movies + 32, movies + 32, USERS.nbytes() + movies + 32,
    ]  # fmt: skip
    assert all(rank.needed_bytes is None for rank in report.ranks)
    assert "0-2" in report.text()
