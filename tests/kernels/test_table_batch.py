"""TableBatch: where tables lie in the flat cores, and messages that name what does not fit."""

import pytest
from ecorec_torchrec.kernels.tt_index import TableBatch

GOOD = {
    "table_names": ("user", "item"),
    "num_embeddings": (90, 50),
    "row_factors": ((4, 5, 5), (3, 4, 5)),
    "col_factors": (2, 2, 2),
    "ranks": (8, 8),
    "feature_names": ("u", "i", "last_i"),
    "feature_tables": (0, 1, 1),
}


def test_layout():
    batch = TableBatch(**GOOD)
    assert batch.core_shapes == ((7, 1, 2, 8), (9, 8, 2, 8), (10, 8, 2, 1))
    assert batch.core_offsets == ((0, 4), (0, 5), (0, 5))
    assert batch.row_offsets == (0, 100)
    assert batch.embedding_dim == 8


def test_key_holds_all():
    batch = TableBatch(**GOOD)
    assert TableBatch.from_key(batch.key) == batch
    assert hash(TableBatch.from_key(batch.key)) == hash(batch)


def test_names_may_hold_any_character():
    odd = ("it's", 'a "table"\n')
    batch = TableBatch(**GOOD | {"table_names": odd})
    assert TableBatch.from_key(batch.key).table_names == odd


def test_lists_become_tuples():
    batch = TableBatch(**GOOD | {"row_factors": [[4, 5, 5], [3, 4, 5]], "ranks": [8, 8]})
    assert batch == TableBatch(**GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_embeddings": (90, 61)}, "table 'item': num_embeddings=61 must lie in 1..60"),
        ({"num_embeddings": (0, 50)}, "table 'user': num_embeddings=0"),
        ({"row_factors": ((4, 5, 5), (12, 5))}, r"table 'item': row_factors=\(12, 5\)"),
        ({"num_embeddings": (90,)}, "one entry per table, got 2, 1 and 2"),
        ({"ranks": (8,)}, r"ranks=\(8,\)"),
        ({"col_factors": (2, 0, 2)}, "not positive"),
        ({"feature_tables": (0, 1)}, "one entry per feature, got 3 and 2"),
        ({"feature_tables": (0, 1, 2)}, r"feature 'last_i': table 2 is not within 0\.\.1"),
        ({"row_factors": ((2**31, 1, 1), (3, 4, 5))}, "core 0 has 2147483651 rows"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        TableBatch(**GOOD | change)
