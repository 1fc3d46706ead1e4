"""How the tables of a sharding type are dealt out to dist groups."""

from types import SimpleNamespace

from ecorec_torchrec.dist import split_dist_groups
from ecorec_torchrec.testing import RankPool, toy


def info(*ranks: int) -> SimpleNamespace:
    return SimpleNamespace(param_sharding=SimpleNamespace(ranks=list(ranks)))


def test_tables_of_each_rank_are_dealt_in_turn() -> None:
    a, b, c, d = info(0), info(0), info(1), info(0)
    assert split_dist_groups({"table_wise": [a, b, c, d]}, 2) == {
        "table_wise": [a, c, d],
        "table_wise#1": [b],
    }


def test_one_group_changes_nothing() -> None:
    infos = {"table_wise": [info(0), info(1)], "row_wise": [info(0, 1)]}
    assert split_dist_groups(infos, 1) == infos


def test_data_parallel_tables_stay_together() -> None:
    infos = {"data_parallel": [info(0, 1), info(0, 1)]}
    assert split_dist_groups(infos, 4) == infos


def sharding_types(rank: int) -> tuple[list[str], list[str]]:
    names = tuple(toy.ROWS)
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables),
        toy.generators(names, 2),
        num_dist_groups=2,
    )
    ebc = model.module.ebc
    events: list[str] = []
    for kind, modules in (("lookup", ebc._lookups), ("dist", ebc._output_dists)):
        for i, module in enumerate(modules):
            module.register_forward_pre_hook(lambda *_, e=f"{kind} {i}": events.append(e))
    ebc(toy.make_batch(names, 0, rank).features)
    return ebc._sharding_types, events


def test_output_of_a_group_is_sent_before_the_next_is_looked_up(ranks: RankPool) -> None:
    for types, events in ranks.run(sharding_types):
        assert types == [
            "table_wise",
            "table_wise#1",
            "data_parallel",
            "row_wise",
            "column_wise",
        ]
        assert events == [f"{kind} {i}" for i in range(len(types)) for kind in ("lookup", "dist")]
