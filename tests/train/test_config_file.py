"""Configuration files are read strictly, and written so that they read back equal."""

from pathlib import Path

import pytest

from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import (
    dump_config,
    load_config,
    parse_config,
    shipped_configs,
)


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_are_valid_and_survive_a_round_trip(name: str) -> None:
    config = load_config(name, TrainConfig)
    assert parse_config(dump_config(config), TrainConfig) == config


def test_what_a_file_leaves_out_keeps_its_default() -> None:
    config = parse_config("train: {epochs: 3}", TrainConfig)
    assert config.train.epochs == 3
    assert config.train.batch_size == TrainConfig().train.batch_size
    assert parse_config("", TrainConfig) == TrainConfig()


def test_numbers_in_all_the_ways_people_write_them() -> None:
    text = "optim: {tt: {learning_rate: 1e-3}, dense: {learning_rate: 1}}"
    config = parse_config(text, TrainConfig)
    assert config.optim.tt.learning_rate == 0.001
    assert config.optim.dense.learning_rate == 1.0


def test_a_number_or_a_word() -> None:
    for text, value in (("auto", "auto"), ("4", 4)):
        config = parse_config(f"plan: {{num_dist_groups: {text}}}", TrainConfig)
        assert config.plan.num_dist_groups == value
        assert parse_config(dump_config(config), TrainConfig) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan: {num_dist_groups: many}", r"f:1: `plan.num_dist_groups` must be int, got 'many'"),
        ("model:\n  embeding_dim: 8", r"f:2: unknown key `model.embeding_dim`; did you mean `emb"),
        ("zzz: 1", r"f:1: unknown key `zzz`; known: name, seed"),
        ("train:\n  epochs: many", r"f:2: `train.epochs` must be int, got 'many'"),
        ("train: {epochs: 1.5}", r"`train.epochs` must be int, got 1.5"),
        ("train: {epochs: true}", r"`train.epochs` must be int, got True"),
        ("tt: {tables: user_id}", r"`tt.tables` must be a list, got 'user_id'"),
        ("tt: {tables: [1]}", r"`tt.tables\[0\]` must be text, got 1"),
        ("data: {name: criteoo}", r"`data.name` must be one of movielens-100k, criteo, synthetic"),
        ("model: 3", r"`model` must be keys with values, got 3"),
        ("seed: 1\nseed: 2", r"f:2: key `seed` is given twice"),
        ("a: [1, 2\nb: 3", r"f:2: not valid YAML"),
        ("seed: 1\n\ttabs: 2", r"f:2: not valid YAML"),
        ("train: {epochs: 0}", r"f:1: train.epochs=0 must be >= 1"),
        ("optim: {tt: {learning_rate: '0.1'}}", r"must be a number, got '0.1'"),
    ],
)
def test_mistakes_stop_with_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(text, TrainConfig, source="f")


def test_unknown_name_lists_the_configs_that_ship() -> None:
    with pytest.raises(ValueError, match="no such file.*movielens_100k"):
        load_config("movielens", TrainConfig)


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntt: {tables: [a], shapes: {a: {row_factors: [2, 2], ")
    with pytest.raises(ValueError, match=r"mine.yaml:\d+: not valid YAML"):
        load_config(str(file), TrainConfig)
    shape = "row_factors: [2, 2], col_factors: [2, 2], ranks: [2]"
    file.write_text(f"name: mine\ntt: {{tables: [a], shapes: {{a: {{{shape}}}}}}}")
    assert load_config(str(file), TrainConfig).tt.shapes["a"].ranks == (2,)
