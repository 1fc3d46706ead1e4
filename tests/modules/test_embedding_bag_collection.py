"""TTEmbeddingBagCollection, unsharded, against a stock collection with the same tables dense."""

import copy
import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from ecorec_torchrec.modules import TTEmbeddingBagCollection, TTEmbeddingBagConfig
from ecorec_torchrec.tt import TTSpec, from_dense, init_cores_, to_dense

ROWS = {"users": 97, "movies": 60, "genders": 3}
SPECS = {
    "users": TTSpec(97, (4, 5, 5), (2, 2, 2), (5, 3)),
    "movies": TTSpec(60, (8, 8), (2, 6), (7,)),
}


def _tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Two TT tables (one with two features), a dense one; feature "shared" reads two tables."""
    features = {"users": ["user", "shared"], "movies": ["item"], "genders": ["gender", "shared"]}
    dims = {"users": 8, "movies": 12, "genders": 4}
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=dims[name],
            feature_names=features[name],
            pooling=pooling,
        )
        for name in ROWS
    ]


def _features(lengths: Tensor | None = None, weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of 0, 1 and 5 ids in another feature order than the tables'."""
    keys = ["gender", "unused", "item", "shared", "user"]
    rows = {"gender": 3, "unused": 1, "item": 60, "shared": 3, "user": 97}
    if lengths is None:
        lengths = torch.tensor([0, 1, 5, 2]).repeat(len(keys))
    parts = lengths.view(len(keys), -1).sum(dim=1).tolist()
    values = [torch.randint(rows[key], (n,)) for key, n in zip(keys, parts, strict=True)]
    weights = torch.rand(sum(parts)) - 0.3 if weighted else None
    return KeyedJaggedTensor(keys, torch.cat(values), weights, lengths)


def _dense_table(cores: list[Tensor], spec: TTSpec) -> Tensor:
    """All rows of a table, differentiable in its cores."""
    rows = torch.ones(1, 1, 1, dtype=cores[0].dtype)
    for core in cores:
        rows = torch.einsum("pqr,arbt->paqbt", rows, core)
        rows = rows.flatten(2, 3).flatten(0, 1)
    return rows.flatten(1)[: spec.num_embeddings]


def _twin(ebc: TTEmbeddingBagCollection) -> EmbeddingBagCollection:
    """A stock collection that holds the same tables, dense."""
    twin = EmbeddingBagCollection(ebc.embedding_bag_configs(), ebc.is_weighted())
    for name, bag in ebc.embedding_bags.items():
        spec = ebc.tt_specs.get(name)
        weight = bag.weight if spec is None else to_dense(list(bag.tt_cores), spec)
        twin.embedding_bags[name].weight.data.copy_(weight)
    return twin


def _check_against_twin(ebc: TTEmbeddingBagCollection, features: KeyedJaggedTensor) -> None:
    """Outputs, names and the gradients of all parameters."""
    twin = _twin(ebc)
    ours, theirs = ebc(features), twin(features)
    assert ours.keys() == theirs.keys()
    assert ours.length_per_key() == theirs.length_per_key()
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(ours.values())
    ours.values().backward(upstream)
    theirs.values().backward(upstream)
    for name, bag in ebc.embedding_bags.items():
        weight_grad = twin.embedding_bags[name].weight.grad
        if name not in ebc.tt_specs:
            torch.testing.assert_close(bag.weight.grad, weight_grad)
            continue
        cores = [core.detach().clone().requires_grad_() for core in bag.tt_cores]
        _dense_table(cores, ebc.tt_specs[name]).backward(weight_grad)
        for core, expected in zip(bag.tt_cores, cores, strict=True):
            torch.testing.assert_close(core.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_equals_the_dense_collection(pooling: PoolingType) -> None:
    """Shared features keep both outputs, under TorchRec's names; bags of 0, 1 and 5 ids."""
    ebc = TTEmbeddingBagCollection(_tables(pooling), tt=SPECS)
    assert isinstance(ebc, EmbeddingBagCollection | EmbeddingBagCollectionInterface)
    pooled = ebc(_features())
    assert pooled.keys() == ["user", "shared@users", "item", "gender", "shared@genders"]
    assert pooled.length_per_key() == [8, 8, 12, 4, 4]
    assert (pooled.values()[0] == 0).all()  # every bag of the first example is empty
    _check_against_twin(ebc, _features())


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16, torch.float64])
def test_weighted_bags(weights_dtype: torch.dtype) -> None:
    """Zero and negative weights too; gradients scale with them."""
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS, is_weighted=True)
    features = _features(weighted=True)
    features.weights()[::4] = 0.0
    twin_output = _twin(ebc)(features).values()
    exact = features.weights().to(weights_dtype)
    low = KeyedJaggedTensor(features.keys(), features.values(), exact, features.lengths())
    tolerance = 1e-2 if weights_dtype == torch.float16 else 1e-6
    torch.testing.assert_close(ebc(low).values(), twin_output, rtol=tolerance, atol=tolerance)
    _check_against_twin(ebc, features)


def test_weighted_mean_divides_by_the_number_of_ids() -> None:
    """As FBGEMM does, and so TorchRec's sharded collections."""
    table = _tables(PoolingType.MEAN)[1]
    ebc = TTEmbeddingBagCollection([table], tt={"movies": SPECS["movies"]}, is_weighted=True)
    rows = to_dense(list(ebc.embedding_bags["movies"].tt_cores), SPECS["movies"])
    ids, weights = torch.tensor([3, 59, 3]), torch.tensor([0.5, -1.0, 2.0])
    pooled = ebc(KeyedJaggedTensor(["item"], ids, weights, torch.tensor([3, 0]))).values()
    torch.testing.assert_close(pooled[0], (weights @ rows[ids]) / 3)
    assert (pooled[1] == 0).all()


def test_gradient_of_the_weights() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS, is_weighted=True)
    gradients = []
    for collection in (ebc, _twin(ebc)):
        torch.manual_seed(3)
        features = _features(weighted=True)
        features.weights().requires_grad_()
        collection(features).values().square().sum().backward()
        gradients.append(features.weights().grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_weights_that_are_missing() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS, is_weighted=True)
    with pytest.raises(ValueError, match="features .*'user'.* has no weights"):
        ebc(_features())


def test_ids_of_different_features_are_independent() -> None:
    """Ids belong to a table and start at 0: equal ids of two features need no offsets."""
    tables = _tables()
    ebc = TTEmbeddingBagCollection(tables, tt=SPECS)
    ids = torch.arange(60)
    keys = ["user", "item", "gender", "shared"]
    features = KeyedJaggedTensor(
        keys,
        torch.cat([ids, ids, ids % 3, ids % 3]),
        lengths=torch.ones(240, dtype=torch.int32),
    )
    pooled = ebc(features).to_dict()
    users = to_dense(list(ebc.embedding_bags["users"].tt_cores), SPECS["users"])
    items = to_dense(list(ebc.embedding_bags["movies"].tt_cores), SPECS["movies"])
    torch.testing.assert_close(pooled["user"], users[:60])
    torch.testing.assert_close(pooled["item"], items)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
def test_id_and_length_types(index_dtype: torch.dtype, lengths_dtype: torch.dtype) -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    features = _features()
    expected = ebc(features).values()
    same = KeyedJaggedTensor(
        features.keys(),
        features.values().to(index_dtype),
        lengths=features.lengths().to(lengths_dtype),
    )
    assert torch.equal(ebc(same).values(), expected)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_all_bags_empty(optimizer: type[torch.optim.Optimizer]) -> None:
    """No ids at all: zeros come out, and a step leaves the cores as they were, bit for bit."""
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    before = copy.deepcopy(ebc.state_dict())
    pooled = ebc(_features(torch.zeros(5 * 128, dtype=torch.int64)))
    assert pooled.values().shape == (128, 36)
    assert (pooled.values() == 0).all()
    pooled.values().sum().backward()
    optimizer(ebc.parameters(), lr=0.1).step()  # type: ignore[call-arg]
    for name, value in ebc.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("values", [torch.empty(0, dtype=torch.int64), torch.tensor([])])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_examples(values: Tensor, weighted: bool) -> None:
    """The last global batch may leave a rank without samples; its step must still work."""
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS, is_weighted=weighted)
    features = KeyedJaggedTensor(
        _features().keys(),
        values,
        torch.empty(0) if weighted else None,
        lengths=torch.empty(0, dtype=torch.int32),
        stride=0,
    )
    pooled = ebc(features)
    assert pooled.values().shape == (0, 36)
    pooled.values().sum().backward()
    for parameter in ebc.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


@pytest.mark.parametrize(
    ("feature", "table", "bad"), [("user", "users", 97), ("user", "users", -1)]
)
def test_ids_outside_a_tt_table(feature: str, table: str, bad: int) -> None:
    """Rows 97..99 exist in the cores, as padding; they are out of range all the same."""
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    features = _features()
    features.values()[-1] = bad  # "user" is the last key
    before = copy.deepcopy(ebc.state_dict())
    with pytest.raises(
        ValueError, match=rf"(?s)(?=.*{table})(?=.*{feature})(?=.*{bad})(?=.*97|.*96)"
    ):
        ebc(features)
    assert all(torch.equal(value, before[name]) for name, value in ebc.state_dict().items())


def test_ids_outside_a_dense_table() -> None:
    features = _features()
    features.values()[0] = 3  # "gender" is the first key
    with pytest.raises(ValueError, match=r"table 'genders', feature 'gender': id 3 .* 0..2"):
        TTEmbeddingBagCollection(_tables(), tt=SPECS)(features)


def test_broken_input_is_refused_by_feature() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    features = _features()
    with pytest.raises(ValueError, match=r"sum to 40 .*39 values.*'user'"):
        ebc(KeyedJaggedTensor(features.keys(), features.values()[1:], lengths=features.lengths()))
    with pytest.raises(ValueError, match=r"\['shared', 'item', 'gender'\] are missing"):
        ebc(KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1])))


@pytest.mark.parametrize("dim", [1024, 1536, 2048, 4096])
def test_wide_tables(dim: int) -> None:
    """A kernel written for narrower tables may leave the tail of wide rows at zero."""
    config = TTEmbeddingBagConfig(
        num_embeddings=100,
        embedding_dim=dim,
        name="wide",
        feature_names=["f"],
        tt=TTSpec.suggest(100, dim, rank=8),
    )
    ebc = TTEmbeddingBagCollection([config])
    features = KeyedJaggedTensor(["f"], torch.randint(100, (12,)), lengths=torch.tensor([5, 0, 7]))
    assert (ebc(features).values()[[0, 2]] != 0).all()
    _check_against_twin(ebc, features)


@pytest.mark.parametrize("sparse", [True, False])
def test_beside_an_ordinary_embedding_bag(sparse: bool) -> None:
    """An ordinary table in the same model, with sparse gradients or not, is no matter."""
    spec = SPECS["users"]
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    ordinary = nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse)
    weight = _dense_table(list(ebc.embedding_bags["users"].tt_cores), spec).detach()
    cores = [
        core.detach().clone().requires_grad_() for core in ebc.embedding_bags["users"].tt_cores
    ]
    dense = ordinary.weight.detach().clone().requires_grad_()
    parameters = [*ebc.embedding_bags["users"].tt_cores, ordinary.weight]
    ours, reference = (torch.optim.SGD(p, lr=0.05) for p in (parameters, [*cores, dense]))
    for _ in range(3):
        features, ids = _features(), torch.randint(50, (4, 3))
        user = features.to_dict()["user"]
        ours.zero_grad()
        (ebc(features)["user"] * ordinary(ids)).sum().backward()
        ours.step()
        reference.zero_grad()
        table = _dense_table(cores, spec)
        rows = nn.functional.embedding_bag(
            user.values(), table, user.offsets(), mode="sum", include_last_offset=True
        )
        (rows * nn.functional.embedding_bag(ids, dense, mode="sum")).sum().backward()
        reference.step()
    for mine, theirs in zip(parameters, [*cores, dense], strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.equal(_dense_table(cores, spec).detach(), weight)


def test_names_of_parameters() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    names = [f"embedding_bags.users.tt_cores.{k}" for k in range(3)]
    names += [f"embedding_bags.movies.tt_cores.{k}" for k in range(2)]
    names += ["embedding_bags.genders.weight"]
    assert list(ebc.state_dict()) == names == [name for name, _ in ebc.named_parameters()]
    assert all(p.is_leaf and p.requires_grad for p in ebc.parameters())
    assert ebc.tt_specs == SPECS and ebc.embedding_bag_configs() is not None
    assert not ebc.is_weighted() and ebc.device == torch.device("cpu")


def test_state_survives_copies() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    features = _features()
    expected = ebc(features).values()
    other = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    assert not torch.equal(other(features).values(), expected)
    other.load_state_dict(ebc.state_dict())
    copied = copy.deepcopy(ebc)
    for twin in (other, copied, pickle.loads(pickle.dumps(ebc))):
        assert torch.equal(twin(features).values(), expected)
    copied.reset_parameters()
    assert torch.equal(ebc(features).values(), expected)  # no shared storage


def test_equal_random_state_gives_equal_cores() -> None:
    """Whatever else a collection holds: the seeds of TT tables are drawn first."""
    torch.manual_seed(5)
    first = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    torch.manual_seed(5)
    second = TTEmbeddingBagCollection([_tables()[i] for i in (2, 0, 1)], tt=SPECS)
    for name in SPECS:
        for mine, theirs in zip(
            first.embedding_bags[name].tt_cores, second.embedding_bags[name].tt_cores, strict=True
        ):
            assert torch.equal(mine, theirs)


def test_a_table_starts_from_one_seed_of_the_default_generator() -> None:
    """What every placement of a table repeats, so that all of them start equal."""
    torch.manual_seed(5)
    seeds = [int(torch.randint(2**62, ())) for _ in SPECS]
    torch.manual_seed(5)
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    for (name, spec), seed in zip(SPECS.items(), seeds, strict=True):
        cores = [torch.empty(shape) for shape in spec.core_shapes]
        init_cores_(cores, spec, generator=torch.Generator().manual_seed(seed))
        for core, expected in zip(ebc.embedding_bags[name].tt_cores, cores, strict=True):
            assert torch.equal(core, expected)


def test_every_row_after_a_round_trip_through_a_file(tmp_path: Path) -> None:
    """All rows looked up one by one equal the materialised table, before and after."""
    trained = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    loaded = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    ids = torch.arange(97)
    keys = ["user", "item", "gender", "shared"]
    features = KeyedJaggedTensor(
        keys, torch.cat([ids, ids % 60, ids % 3, ids]), lengths=torch.ones(4 * 97).int()
    )
    features.values()[-97:] %= 3
    table = to_dense(list(trained.embedding_bags["users"].tt_cores), SPECS["users"])
    for ebc in (trained, loaded):
        torch.testing.assert_close(ebc(features)["user"], table)


def test_start_from_a_pretrained_table() -> None:
    weight = torch.randn(1000, 16)
    spec = TTSpec.suggest(1000, 16, rank=10**6)
    config = TTEmbeddingBagConfig(1000, 16, "pretrained", feature_names=["f"], tt=spec)
    ebc = TTEmbeddingBagCollection([config])
    cores, _ = from_dense(weight, spec)
    names = [f"embedding_bags.pretrained.tt_cores.{k}" for k in range(3)]
    ebc.load_state_dict(dict(zip(names, cores, strict=True)))
    ids = torch.randint(1000, (64,))
    rows = ebc(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(64).int())).values()
    assert (rows - weight[ids]).abs().max() < 1e-5


def test_start_values_follow_the_table_config() -> None:
    def table(name: str, **settings: object) -> TTEmbeddingBagConfig:
        tt = TTSpec.suggest(5000, 16, rank=16)
        return TTEmbeddingBagConfig(5000, 16, name, tt=tt, **settings)  # type: ignore[arg-type]

    ebc = TTEmbeddingBagCollection(
        [
            table("default"),
            table("bounds", weight_init_min=0.0, weight_init_max=1.0),
            table("normal", init_fn=partial(nn.init.normal_, mean=0.0, std=0.2)),
            table("constant", init_fn=partial(nn.init.constant_, val=0.25)),
        ]
    )
    moments = {}
    for name, bag in ebc.embedding_bags.items():
        entries = to_dense(list(bag.tt_cores), ebc.tt_specs[name])
        moments[name] = entries.mean().item(), entries.std().item()
    assert moments["default"] == pytest.approx((0.0, 0.01), abs=0.001)
    assert moments["bounds"] == pytest.approx((0.5, 1 / math.sqrt(12)), rel=0.1)
    assert moments["normal"] == pytest.approx((0.0, 0.2), abs=0.02)
    assert moments["constant"] == (0.25, 0.0)


def test_meta_device() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS, device=torch.device("meta"))
    assert all(p.is_meta for p in ebc.parameters()) and ebc.device.type == "meta"
    with torch.device("meta"):
        assert all(p.is_meta for p in TTEmbeddingBagCollection(_tables(), tt=SPECS).parameters())


def test_the_dense_table_of_a_tt_table_is_never_allocated() -> None:
    """256 TB if it were."""
    config = EmbeddingBagConfig(10**12, 64, "huge", feature_names=["f"])
    ebc = TTEmbeddingBagCollection([config], tt={"huge": TTSpec.suggest(10**12, 64, rank=2)})
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 10**12 - 1]), lengths=torch.tensor([2]))
    assert ebc(features).values().abs().sum() > 0


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [
        (DataType.FP32, torch.float32),
        (DataType.FP16, torch.float16),
        (DataType.BF16, torch.bfloat16),
    ],
)
def test_data_type_of_the_config(data_type: DataType, dtype: torch.dtype) -> None:
    tables = _tables()
    for config in tables:
        config.data_type = data_type
    ebc = TTEmbeddingBagCollection(tables, tt=SPECS)
    assert {p.dtype for p in ebc.parameters()} == {dtype}
    features = _features()
    output = ebc(features).values()
    assert output.dtype == torch.float32
    exact = copy.deepcopy(ebc).float()
    torch.testing.assert_close(output, exact(features).values(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_keep_training(dtype: torch.dtype) -> None:
    """Casts must not detach parameters from what the lookup reads."""
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS).to(dtype)
    assert {p.dtype for p in ebc.parameters()} == {dtype}
    features = _features()
    output = ebc(features).values()
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in ebc.parameters())
    torch.optim.SGD(ebc.parameters(), lr=0.5).step()
    assert not torch.equal(ebc(features).values(), output)


def test_names_are_checked_before_anything_is_built() -> None:
    tables = [_tables()[0], _tables()[0]]
    with pytest.raises(ValueError, match="'users' occurs twice"):
        TTEmbeddingBagCollection(tables, tt={"users": SPECS["users"]})


def test_equal_names_in_two_collections_are_apart() -> None:
    dense = TTEmbeddingBagCollection(_tables())
    model = nn.ModuleDict({"a": TTEmbeddingBagCollection(_tables(), tt=SPECS), "b": dense})
    names = [name for name, _ in model.named_parameters() if ".users." in name]
    assert names == [f"a.embedding_bags.users.tt_cores.{k}" for k in range(3)] + [
        "b.embedding_bags.users.weight"
    ]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_evaluation(mode: type) -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    features = _features()
    expected = ebc(features).values()
    ebc.eval()
    with mode():
        pooled = ebc(features).values()
    assert torch.equal(pooled, expected) and not pooled.requires_grad
    ebc(features).values().sum().backward()  # and training goes on


def test_symbolic_trace() -> None:
    ebc = TTEmbeddingBagCollection(_tables(), tt=SPECS)
    traced = torch.fx.symbolic_trace(ebc)
    features = _features()
    assert torch.equal(traced(features).values(), ebc(features).values())
    with pytest.raises(ValueError, match="are missing"):
        traced(KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1])))


def test_deduplicated_batches() -> None:
    """Variable batch sizes per feature, expanded by inverse indices, as in TorchRec."""
    tables = [_tables()[0], _tables()[1]]
    tables[0].feature_names = ["user"]
    ebc = TTEmbeddingBagCollection(tables, tt=SPECS)
    features = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([3, 4, 5, 6, 7]),
        lengths=torch.tensor([2, 1, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["user", "item"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
    )
    _check_against_twin(ebc, features)
