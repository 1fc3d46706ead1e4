"""Which tables are compressed: never more than needed, the cheapest first."""

from __future__ import annotations

import itertools
import random

import pytest

from ecorec_torchrec.planner.compression import Form, least_compression

MIB = 2**20


def table(dense_mib: int, *tt: tuple[float, int], dense: bool = True) -> list[Form]:
    """Forms of one table: dense, then (compression, MiB) per TT shape."""
    forms = [Form(None, 0.0, dense_mib * MIB)] if dense else []
    return forms + [Form(None, compression, mib * MIB) for compression, mib in tt]


def fits_in(cap_mib: int):
    return lambda forms: [] if sum(form.num_bytes for form in forms) <= cap_mib * MIB else None


def levels(tables: dict[str, list[Form]], cap_mib: int) -> dict[str, int] | None:
    chosen = least_compression(tables, fits_in(cap_mib))
    return chosen and {name: tables[name].index(form) for name, form in chosen.items()}


def test_dense_where_it_fits_and_none_where_nothing_does():
    tables = {"a": table(100, (7.0, 1)), "b": table(50, (6.0, 1))}
    assert levels(tables, 150) == {"a": 0, "b": 0}
    assert levels(tables, 149) == {"a": 1, "b": 0}
    assert levels(tables, 50) == {"a": 1, "b": 1}
    assert levels(tables, 1) is None


def test_what_was_compressed_in_vain_goes_back():
    """`a` frees more per compression and goes first, but only `b` frees enough."""
    tables = {"a": table(10, (1.0, 1)), "b": table(100, (50.0, 1))}
    assert levels(tables, 15) == {"a": 0, "b": 1}


def test_highest_rank_that_fits():
    tables = {"a": table(1000, (5.0, 30), (7.0, 10), (9.0, 2))}
    assert [levels(tables, cap)["a"] for cap in (1000, 30, 29, 9)] == [0, 1, 2, 3]


def test_table_without_dense_form_starts_at_its_shape():
    tables = {"own": table(0, (7.0, 3), dense=False), "b": table(10, (3.0, 1))}
    assert levels(tables, 13) == {"own": 0, "b": 0}
    assert levels(tables, 12) == {"own": 0, "b": 1}


@pytest.mark.parametrize("seed", range(20))
def test_no_table_could_be_compressed_less(seed):
    """Not one alone; and of tables read equally often, as few as possible are compressed."""
    draw = random.Random(seed)
    equally_read = seed % 2 == 0
    tables = {}
    for name in "abcde":
        mib = draw.randint(20, 400)
        lookups = 1.0 if equally_read else draw.uniform(0.5, 20)
        tables[name] = table(mib, (lookups * 4, mib // 8), (lookups * 7, 1))
    cap = draw.randint(10, 800)
    chosen = levels(tables, cap)
    assert chosen is not None
    picked = tuple(chosen.values())

    def size(combination: tuple[int, ...]) -> int:
        pairs = zip(tables.values(), combination, strict=True)
        return sum(forms[level].num_bytes for forms, level in pairs)

    assert size(picked) <= cap * MIB
    for i, level in itertools.product(range(5), range(2)):
        if level < picked[i]:
            assert size((*picked[:i], level, *picked[i + 1 :])) > cap * MIB
    if equally_read:
        fitting = [c for c in itertools.product(range(3), repeat=5) if size(c) <= cap * MIB]
        fewest = min(sum(level > 0 for level in combination) for combination in fitting)
        assert sum(level > 0 for level in picked) <= fewest + 1
