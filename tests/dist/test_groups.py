"""How the tables of a sharding type are dealt out to dist groups."""

from types import SimpleNamespace

import pytest

from ecorec_torchrec.dist import DistGroups, split_dist_groups
from ecorec_torchrec.plan import in_dist_group
from ecorec_torchrec.testing import RankPool, toy


def info(*ranks: int, dist_group: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        param_sharding=SimpleNamespace(ranks=list(ranks), dist_group=dist_group),
        embedding_config=SimpleNamespace(name="users"),
    )


def test_tables_of_each_rank_are_cut_in_their_order() -> None:
    a, b, c, d = info(0), info(0), info(1), info(0)
    assert split_dist_groups({"table_wise": [a, b, c, d]}, DistGroups(2)) == {
        "table_wise": [a, b, c],
        "table_wise#1": [d],
    }


def test_one_group_changes_nothing() -> None:
    infos = {"table_wise": [info(0), info(1)], "row_wise": [info(0, 1)]}
    assert split_dist_groups(infos, DistGroups(1)) == infos


def test_data_parallel_tables_stay_together() -> None:
    infos = {"data_parallel": [info(0, 1), info(0, 1)]}
    assert split_dist_groups(infos, DistGroups(4)) == infos


def test_a_group_that_the_plan_names_goes_before() -> None:
    """Groups are looked up in the order of their numbers; a rank may be without one."""
    a, b, c, d = info(0, dist_group=2), info(0), info(1), info(1, dist_group=0)
    assert list(split_dist_groups({"table_wise": [a, b, c, d]}, DistGroups(2)).items()) == [
        ("table_wise", [b, c, d]),
        ("table_wise#2", [a]),
    ]


def test_a_group_of_a_data_parallel_table_is_ignored_with_a_warning() -> None:
    infos = {"data_parallel": [info(0, 1, dist_group=1)]}
    with pytest.warns(UserWarning, match="dist_group=1 is ignored for table 'users'"):
        assert split_dist_groups(infos, DistGroups(2)) == infos


@pytest.mark.parametrize(
    ("num_tables", "slope", "sizes"),
    [
        (24, 0.0, [6, 6, 6, 6]),
        (24, 0.5, [9, 7, 5, 3]),
        (24, 1.0, [11, 8, 4, 1]),
        (7, 0.0, [2, 2, 2, 1]),
        (4, 1.0, [1, 1, 1, 1]),
        (2, 1.0, [1, 1]),
        (0, 0.0, []),
    ],
)
def test_sizes_slope_as_in_ecorec(num_tables: int, slope: float, sizes: list[int]) -> None:
    assert DistGroups(4, slope).sizes(num_tables) == sizes


def test_no_group_is_empty_and_none_grows() -> None:
    for num_tables in range(1, 40):
        for count in range(1, 12):
            for slope in (0.0, 0.3, 0.7, 1.0):
                sizes = DistGroups(count, slope).sizes(num_tables)
                assert sum(sizes) == num_tables and len(sizes) == min(count, num_tables)
                assert sizes == sorted(sizes, reverse=True) and sizes[-1] >= 1


def types_as_planned(rank: int) -> list[str]:
    names = ("t_tw", "t_tw2", "t_q", "d_tw", "d_rw")
    placed = toy.generators(names, 2)
    groups = {"t_tw": 1, "d_tw": 2, "d_rw": 1}
    plan = {n: in_dist_group(groups[n], g) if n in groups else g for n, g in placed.items()}
    tables = toy.configs(names)
    model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
    ebc = toy.shard(model, plan).module.ebc
    ebc(toy.make_batch(names, 0, rank).features).values()
    return ebc._sharding_types


def test_dense_and_tt_tables_in_groups_of_the_plan(ranks: RankPool) -> None:
    """No rank has a table of every group; the sharder knows of one group only."""
    assert ranks.run(types_as_planned) == [
        ["table_wise", "table_wise#1", "table_wise#2", "row_wise#1"]
    ] * 2


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
