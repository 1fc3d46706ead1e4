"""TT shapes of tables: where they may come from, and what is refused."""

import copy
import dataclasses
import pickle

import pytest
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType

from ecorec_torchrec.modules import TTEmbeddingBagConfig, resolve_specs
from ecorec_torchrec.tt import TTSpec

SPEC = TTSpec.suggest(1000, 8, rank=4)
OTHER = TTSpec.suggest(1000, 8, rank=2)


def _config(tt: TTSpec | None = None, **settings: object) -> TTEmbeddingBagConfig:
    settings = {"num_embeddings": 1000, "embedding_dim": 8, "name": "users"} | settings
    return TTEmbeddingBagConfig(**settings, tt=tt)  # type: ignore[arg-type]


def test_is_an_embedding_bag_config() -> None:
    config = _config(SPEC, feature_names=["user"])
    assert isinstance(config, EmbeddingBagConfig)
    assert config.tt == SPEC and config.init_fn is not None
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert dataclasses.replace(twin, init_fn=config.init_fn) == config
    assert dataclasses.replace(config, tt=None).tt is None
    EmbeddingBagCollection(tables=[config])  # a stock collection takes it, as a dense table


def test_both_ways_of_giving_a_shape() -> None:
    plain = EmbeddingBagConfig(num_embeddings=1000, embedding_dim=8, name="movies")
    assert resolve_specs([_config(SPEC), plain], None) == {"users": SPEC}
    assert resolve_specs([_config(), plain], {"movies": OTHER}) == {"movies": OTHER}
    both = resolve_specs([_config(SPEC), plain], {"movies": OTHER, "users": SPEC})
    assert list(both.items()) == [("users", SPEC), ("movies", OTHER)]  # in table order


def test_two_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'users' has two TT shapes.*\(4, 4\).*\(2, 2\)"):
        resolve_specs([_config(SPEC)], {"users": OTHER})


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['user'\], the collection has \['users'\]"):
        resolve_specs([_config()], {"user": SPEC})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_embeddings": 999}, r"'users' has num_embeddings=999 .* shape 1000 and 8"),
        ({"embedding_dim": 16}, r"embedding_dim=16, its TT shape 1000 and 8"),
        ({"data_type": DataType.INT8}, r"'users': data_type INT8 is not one of \['FP32'"),
    ],
)
def test_a_shape_must_fit_its_table(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(SPEC, **settings)
    with pytest.raises(ValueError, match=message):
        resolve_specs([_config(**settings)], {"users": SPEC})


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'users': tt must be a TTSpec, got \(4, 4\)"):
        _config((4, 4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must map table names to TTSpec, got False"):
        resolve_specs([_config()], False)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["items", "training", "a.b", ""])
def test_names_that_cannot_be_modules_are_refused(name: str) -> None:
    """TorchRec fails with `KeyError: "attribute 'items' already exists"`."""
    with pytest.raises(ValueError, match=rf"table name '{name}' cannot be used.*ModuleDict"):
        resolve_specs([_config(name=name)], None)


def test_a_name_used_twice_is_refused() -> None:
    """A map keyed by name would send the ids of one table to the other."""
    with pytest.raises(ValueError, match="'users' occurs twice"):
        resolve_specs([_config(SPEC), _config()], None)
