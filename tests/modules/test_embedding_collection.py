"""TTEmbeddingCollection, unsharded, against a stock collection with the same tables dense."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.tensor_dict import TensorDict

from ecorec_torchrec.modules import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTEmbeddingCollection,
    TTEmbeddingConfig,
)
from ecorec_torchrec.tt import TTSpec, to_dense

SPECS = {
    "users": TTSpec(97, (4, 5, 5), (2, 2, 2), (5, 3)),
    "movies": TTSpec(60, (8, 8), (2, 4), (7,)),
}
ROWS = {"users": 97, "movies": 60, "genders": 3}
FEATURES = {"users": ["user", "shared"], "movies": ["history"], "genders": ["gender", "shared"]}


def _tables(data_type: DataType = DataType.FP32) -> list[EmbeddingConfig]:
    """Two TT tables (one with two features), a dense one; feature "shared" reads two tables."""
    return [
        EmbeddingConfig(rows, 8, name, data_type, feature_names=FEATURES[name])
        for name, rows in ROWS.items()
    ]


def _ours(**options: object) -> TTEmbeddingCollection:
    return TTEmbeddingCollection(_tables(), tt=SPECS, **options)  # type: ignore[arg-type]


def _features(dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Sequences of 0, 1, 5 and 2 ids, in another feature order than the tables'."""
    rows = {"gender": 3, "unused": 1, "history": 60, "shared": 3, "user": 97}
    lengths = torch.tensor([0, 1, 5, 2]).repeat(len(rows))
    values = torch.cat([torch.randint(limit, (8,)) for limit in rows.values()])
    return KeyedJaggedTensor(list(rows), values.to(dtype), lengths=lengths.to(dtype))


def _twin(ec: TTEmbeddingCollection) -> EmbeddingCollection:
    """A stock collection that holds the same tables, dense."""
    twin = EmbeddingCollection(ec.embedding_configs(), need_indices=ec.need_indices())
    for name, table in ec.embeddings.items():
        spec = ec.tt_specs.get(name)
        weight = table.weight if spec is None else to_dense(list(table.tt_cores), spec)
        twin.embeddings[name].weight.data.copy_(weight)
    return twin


def _check_equal(ours: dict[str, JaggedTensor], theirs: dict[str, JaggedTensor]) -> None:
    assert list(ours) == list(theirs)
    for name, found in ours.items():
        expected = theirs[name]
        torch.testing.assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-6)
        assert found.values().dtype is torch.float32
        assert torch.equal(found.lengths(), expected.lengths())
        assert (found.weights_or_none() is None) == (expected.weights_or_none() is None)
        if expected.weights_or_none() is not None:
            assert torch.equal(found.weights(), expected.weights())


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_the_dense_collection(need_indices: bool, dtype: torch.dtype) -> None:
    """Rows in the order of the ids, lengths, and the ids as weights where they are asked for."""
    ec = _ours(need_indices=need_indices)
    assert isinstance(ec, EmbeddingCollection)
    found = ec(_features(dtype))
    assert list(found) == ["user", "shared@users", "history", "gender", "shared@genders"]
    features = _features(dtype)
    _check_equal(ec(features), _twin(ec)(features))


def test_trains_unsharded_as_a_bag_of_its_rows() -> None:
    """The sum of a sequence's rows is the pooled row: outputs and updates must agree."""
    bag_tables = [
        TTEmbeddingBagConfig(ROWS[n], 8, n, feature_names=FEATURES[n], tt=SPECS[n]) for n in SPECS
    ]
    ebc = TTEmbeddingBagCollection(bag_tables)
    ec = TTEmbeddingCollection(
        [TTEmbeddingConfig(ROWS[n], 8, n, feature_names=FEATURES[n], tt=SPECS[n]) for n in SPECS]
    )
    names = {name: name.replace("embeddings", "embedding_bags") for name in ec.state_dict()}
    ec.load_state_dict({name: ebc.state_dict()[other] for name, other in names.items()})
    optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.1) for module in (ec, ebc)]
    for _ in range(3):
        features = _features()
        pooled = ebc(features)
        for name, rows in ec(features).items():
            sums = [part.sum(0) for part in rows.values().split(rows.lengths().tolist())]
            torch.testing.assert_close(torch.stack(sums), pooled[name], rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (pooled.values() ** 2).sum().backward()
        total = 0.0
        for rows in ec(features).values():
            sums = [part.sum(0) for part in rows.values().split(rows.lengths().tolist())]
            total = total + (torch.stack(sums) ** 2).sum()
        total.backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, other in names.items():
        torch.testing.assert_close(
            ec.state_dict()[name], ebc.state_dict()[other], rtol=1e-3, atol=1e-5
        )


def test_names_of_parameters() -> None:
    ec = _ours()
    names = [f"embeddings.users.tt_cores.{k}" for k in range(3)]
    names += [f"embeddings.movies.tt_cores.{k}" for k in range(2)]
    names += ["embeddings.genders.weight"]
    assert list(ec.state_dict()) == names == [name for name, _ in ec.named_parameters()]
    assert ec.tt_specs == SPECS and ec.embedding_dim() == 8
    assert ec.device == torch.device("cpu")


def test_start_values_are_those_of_pooled_tables() -> None:
    """Equal random state gives equal cores, whatever the collection does with their rows."""
    torch.manual_seed(5)
    ec = _ours()
    torch.manual_seed(5)
    ebc = TTEmbeddingBagCollection(
        [TTEmbeddingBagConfig(ROWS[n], 8, n, feature_names=FEATURES[n], tt=SPECS[n]) for n in SPECS]
    )
    for name in SPECS:
        cores = zip(ec.embeddings[name].tt_cores, ebc.embedding_bags[name].tt_cores, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in cores)


def test_state_survives_copies_and_reset_draws_anew() -> None:
    ec, features = _ours(), _features()
    expected = ec(features)["user"].values()
    for copied in (copy.deepcopy(ec), pickle.loads(pickle.dumps(ec))):
        assert torch.equal(copied(features)["user"].values(), expected)
        copied.reset_parameters()
        assert not torch.equal(copied(features)["user"].values(), expected)
    assert torch.equal(ec(features)["user"].values(), expected)


@pytest.mark.parametrize("values", [torch.empty(0, dtype=torch.int64), torch.tensor([])])
def test_a_batch_without_examples(values: Tensor) -> None:
    ec = _ours()
    lengths = torch.empty(0, dtype=torch.int32)
    found = ec(KeyedJaggedTensor(_features().keys(), values, lengths=lengths, stride=0))
    for rows in found.values():
        assert rows.values().shape == (0, 8) and rows.lengths().shape == (0,)
    sum(rows.values().sum() for rows in found.values()).backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in ec.parameters())


def test_sequences_without_ids() -> None:
    ec = _ours()
    keys = _features().keys()
    lengths = torch.zeros(len(keys) * 3, dtype=torch.int64)
    found = ec(KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=lengths))
    assert all(
        r.values().shape == (0, 8) and r.lengths().tolist() == [0] * 3 for r in found.values()
    )


def test_tensor_dict() -> None:
    ec, features = _ours(), _features()
    tensor_dict = TensorDict(
        {
            key: torch.nested.nested_tensor_from_jagged(feature.values(), feature.offsets())
            for key, feature in features.to_dict().items()
        }
    )
    _check_equal(ec(tensor_dict), ec(features))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_data_type_of_the_config(data_type: DataType) -> None:
    """Dense tables too are stored as the config says, and the output is float32."""
    ec = TTEmbeddingCollection(_tables(data_type), tt=SPECS)
    wanted = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]
    assert {p.dtype for p in ec.parameters()} == {wanted}
    features = _features()
    exact = copy.deepcopy(ec).float()(features)
    for name, rows in ec(features).items():
        assert rows.values().dtype is torch.float32
        torch.testing.assert_close(rows.values(), exact[name].values(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("key", "bad", "message"),
    [
        ("user", 97, "(?=.*'user')(?=.*'users')(?=.*97)"),  # rows 97..99 exist as padding
        ("history", -1, "(?=.*'history')(?=.*'movies')(?=.*-1)"),
        ("gender", 3, r"table 'genders', feature 'gender': id 3 is outside 0..2 \(1 such ids\)"),
    ],
)
def test_ids_outside_a_table(key: str, bad: int, message: str) -> None:
    features = _features()
    features.values()[features.keys().index(key) * 8] = bad
    with pytest.raises(ValueError, match=message):
        _ours()(features)


def test_broken_input_is_refused_by_feature() -> None:
    features = _features()
    with pytest.raises(ValueError, match=r"sum to 40 .*39 values.*'user'"):
        _ours()(
            KeyedJaggedTensor(features.keys(), features.values()[1:], lengths=features.lengths())
        )
    with pytest.raises(ValueError, match=r"\['shared', 'history', 'gender'\] are missing"):
        _ours()(KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1])))


def test_tables_are_checked_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="'users' has num_embeddings=97 .* its TT shape 60 and 8"):
        TTEmbeddingCollection(_tables(), tt={"users": SPECS["movies"]})
    with pytest.raises(ValueError, match="'users' has num_embeddings=97"):
        TTEmbeddingConfig(97, 8, "users", feature_names=["user"], tt=SPECS["movies"])
    with pytest.raises(TypeError, match="'users': tt must be a TTSpec, got 16"):
        TTEmbeddingConfig(97, 8, "users", feature_names=["user"], tt=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'users' occurs twice"):
        TTEmbeddingCollection([_tables()[0], _tables()[0]])
    with pytest.raises(ValueError, match=r"tt names tables \['ages'\]"):
        TTEmbeddingCollection(_tables(), tt={"ages": SPECS["users"]})


def test_the_dense_table_of_a_tt_table_is_never_allocated() -> None:
    """256 TB if it were."""
    config = EmbeddingConfig(10**12, 64, "huge", feature_names=["f"])
    ec = TTEmbeddingCollection([config], tt={"huge": TTSpec.suggest(10**12, 64, rank=2)})
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 10**12 - 1]), lengths=torch.tensor([2]))
    assert (ec(features)["f"].values().abs().sum(1) > 0).all()
    assert all(p.is_meta for p in _ours(device="meta").parameters())


def test_symbolic_trace() -> None:
    ec, features = _ours(need_indices=True), _features()
    _check_equal(torch.fx.symbolic_trace(ec)(features), ec(features))
