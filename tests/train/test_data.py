"""Batches: every row once, on one rank, in the same number of batches on all ranks."""

from collections.abc import Iterator

import pytest
import torch

from ecorec_torchrec.train.data import (
    SPLITS,
    InMemoryDataset,
    RankBatch,
    Schema,
    SparseFeature,
    fold_ids,
    load_dataset,
)
from ecorec_torchrec.train.data.batch import EMPTY_SLOT, Rows, make_batch, share_of_rank
from ecorec_torchrec.train.data.hashing import hash_ids
from ecorec_torchrec.train.data_config import DataConfig, SyntheticConfig

SCHEMA = Schema(dense=("row",), sparse=(SparseFeature("a", 100), SparseFeature("b", 50, width=2)))


def numbered_rows(num_rows: int) -> Rows:
    """Rows that carry their own number as their dense feature."""
    numbers = torch.arange(num_rows)
    b = torch.stack([numbers % 50, torch.full_like(numbers, EMPTY_SLOT)], dim=1)
    ids = torch.cat([(numbers % 100)[:, None], b], dim=1)
    return Rows(numbers[:, None].float(), ids, (numbers % 2).float())


def numbered_dataset(num_rows: int, seed: int = 0) -> InMemoryDataset:
    rows = numbered_rows(num_rows)
    return InMemoryDataset(rows, SCHEMA, val_fraction=0.1, test_fraction=0.1, seed=seed)


def row_numbers(batches: Iterator[RankBatch]) -> list[int]:
    return [int(x) for batch in batches for x in batch.dense_features[:, 0]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("num_rows", "batch_size", "world_size"), [(1000, 64, 2), (101, 10, 4)])
def test_no_row_is_dropped_or_counted_twice(
    split: str, num_rows: int, batch_size: int, world_size: int
) -> None:
    """The last, smaller batch counts too, and ranks never differ in their number of batches."""
    dataset = numbered_dataset(num_rows)
    shares = [
        list(
            dataset.batches(split, batch_size=batch_size, rank=rank, world_size=world_size)  # type: ignore[arg-type]
        )
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == dataset.num_batches(split, batch_size)  # type: ignore[arg-type]
    seen = [number for share in shares for number in row_numbers(iter(share))]
    expected = dataset.split_rows(split).dense[:, 0].tolist()  # type: ignore[arg-type]
    assert sorted(seen) == sorted(expected)


def test_splits_are_disjoint_complete_and_shown() -> None:
    dataset = numbered_dataset(1000)
    numbers = {split: set(row_numbers(dataset.batches(split, batch_size=99))) for split in SPLITS}
    assert [len(numbers[split]) for split in SPLITS] == [800, 100, 100]
    assert set.union(*numbers.values()) == set(range(1000))
    assert dataset.describe() == "1,000 rows: train 800, val 100, test 100"


def test_splits_and_order_follow_from_the_seed() -> None:
    one, same, other = numbered_dataset(200), numbered_dataset(200), numbered_dataset(200, seed=1)

    def order(dataset: InMemoryDataset, epoch: int) -> list[int]:
        return row_numbers(dataset.batches("train", batch_size=32, epoch=epoch))

    assert order(one, 0) == order(same, 0)
    assert order(one, 0) != order(one, 1)
    assert sorted(order(one, 0)) == sorted(order(one, 1))
    assert sorted(order(one, 0)) != sorted(order(other, 0))


def test_a_run_can_go_on_inside_an_epoch() -> None:
    dataset = numbered_dataset(200)
    whole = row_numbers(dataset.batches("train", batch_size=32, epoch=1))
    rest = row_numbers(dataset.batches("train", batch_size=32, epoch=1, start_batch=3))
    assert rest == whole[3 * 32 :]


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the val split of 5 rows is empty"):
        numbered_dataset(5)


def test_one_row_on_two_ranks() -> None:
    """A batch of one row leaves a rank with none; its loss has no weight then."""
    batches = [
        make_batch(
            numbered_rows(1).select(torch.arange(1)[share_of_rank(1, rank, 2)]), SCHEMA, 1, 2
        )
        for rank in range(2)
    ]
    assert [batch.labels.numel() for batch in batches] == [0, 1]
    assert [batch.sparse_features.lengths().numel() for batch in batches] == [0, 2]
    assert all(float(batch.loss_scale) == 2.0 for batch in batches)


def test_bags_keep_their_order_and_empty_slots_take_no_room() -> None:
    """Rows [7 | 1, 2] and [8 | (nothing)] of features a and b."""
    rows = Rows(
        torch.zeros(2, 1), torch.tensor([[7, 1, 2], [8, EMPTY_SLOT, EMPTY_SLOT]]), torch.ones(2)
    )
    kjt = make_batch(rows, SCHEMA, 2, 1).sparse_features
    assert kjt.keys() == ["a", "b"]
    assert kjt.values().tolist() == [7, 8, 1, 2]
    assert kjt.lengths().tolist() == [1, 1, 2, 0]


def test_folding_reduces_only_the_named_feature() -> None:
    batch = make_batch(numbered_rows(60), SCHEMA, 60, 1)
    [folded] = fold_ids(iter([batch]), {"a": 7})
    assert folded.sparse_features["a"].values().tolist() == [n % 7 for n in range(60)]
    assert torch.equal(folded.sparse_features["b"].values(), batch.sparse_features["b"].values())
    assert batch.sparse_features["a"].values().max() == 59, "the batch itself is not changed"


def test_batches_move_and_pin_as_the_pipelines_ask() -> None:
    batch = make_batch(numbered_rows(3), SCHEMA, 3, 1)
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, RankBatch)
    tensors = (moved.dense_features, moved.labels, moved.loss_scale, moved.sparse_features.values())
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_hashed_ids_are_spread_and_in_range() -> None:
    raw = torch.arange(100_000).numpy()
    ids = hash_ids(raw, 1000)
    assert ids.min() >= 0 and ids.max() < 1000
    counts = torch.bincount(torch.from_numpy(ids), minlength=1000)
    assert counts.min() > 50 and counts.max() < 150
    with pytest.raises(ValueError, match="num_embeddings=0"):
        hash_ids(raw, 0)


def test_synthetic_ids_are_popular_as_asked_and_labels_follow_the_planted_model() -> None:
    options = SyntheticConfig(num_rows=20_000, num_embeddings=500, zipf_exponent=1.2)
    dataset = load_dataset(DataConfig(name="synthetic", synthetic=options), seed=0)
    assert isinstance(dataset, InMemoryDataset)
    rows = dataset.split_rows("train")
    ids = rows.ids[rows.ids != EMPTY_SLOT]
    assert int(ids.max()) < 500
    counts = torch.bincount(ids).sort(descending=True).values
    assert 1.5 < counts[0] / counts[1] < 3.5  # 2^1.2 = 2.3, over four tables with hashed ids
    assert 0.3 < float(rows.labels.mean()) < 0.7
    positive = rows.labels == 1
    signal = rows.dense[positive, 0].mean() - rows.dense[~positive, 0].mean()
    assert signal > 0.3, "the first dense feature carries signal"


def test_options_of_another_data_set_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="data.path is ignored: data.name is synthetic"):
        load_dataset(DataConfig(name="synthetic", path="folder"), seed=0)


def test_a_table_that_the_data_set_lacks_is_named() -> None:
    config = DataConfig(name="synthetic", num_embeddings={"sparse_9": 10})
    with pytest.raises(
        ValueError, match="sparse_9: synthetic has no such feature; it has sparse_0"
    ):
        load_dataset(config, seed=0)
