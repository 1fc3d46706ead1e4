"""The search for a launch configuration: on request only, kept on disk, the fastest wins."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it ships for Linux only")

from ecorec_torchrec.kernels.tt_lookup import autotune
from ecorec_torchrec.kernels.tt_lookup.launch import LaunchConfig

Q, R = (4, 4, 4), (32, 32)
HEURISTIC = LaunchConfig.choose(Q, R, "ieee")


class FakeTimer:
    """Pretends that the configuration of number `fastest` is the fastest; runs nothing."""

    def __init__(self, fastest: int) -> None:
        self.fastest, self.calls = fastest, 0

    def __call__(self, step) -> float:
        self.calls += 1
        return 1.0 if self.calls == self.fastest + 1 else 2.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(autotune.FOLDER, str(tmp_path))
    autotune.fastest.cache_clear()
    yield tmp_path / "triton_autotune"
    autotune.fastest.cache_clear()


def search(timer, ranks=R, heuristic=HEURISTIC):
    """As a new process would: nothing in memory."""
    autotune.fastest.cache_clear()
    return autotune.fastest(Q, ranks, torch.float32, heuristic, torch.device("cpu"), timer)


def test_without_the_switch_nothing_is_timed_or_written(folder, monkeypatch):
    monkeypatch.delenv(autotune.SWITCH, raising=False)
    cores = [torch.zeros(2, 1, 4, 32), torch.zeros(2, 32, 4, 32), torch.zeros(2, 32, 4, 1)]
    assert autotune.launch_config(cores) == HEURISTIC
    assert not folder.exists()


def test_the_fastest_is_found_once(folder):
    timer = FakeTimer(fastest=5)
    assert search(timer) == HEURISTIC.candidates()[5]
    assert timer.calls == len(HEURISTIC.candidates())
    again = FakeTimer(fastest=0)
    assert search(again) == HEURISTIC.candidates()[5] and again.calls == 0
    [file] = folder.iterdir()
    key = json.loads(file.read_text())["key"]
    assert key["device"] == "cpu" and key["torch"] == torch.__version__ and key["triton"]


def test_another_shape_or_arithmetic_is_searched_anew(folder):
    search(FakeTimer(1))
    for ranks, precision in (((32, 16), "ieee"), (R, "tf32")):
        other, timer = LaunchConfig.choose(Q, ranks, precision), FakeTimer(3)
        assert search(timer, ranks, other) == other.candidates()[3] and timer.calls
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("content", ["{", "[]", '{"key": 1, "config": 2}'])
def test_a_damaged_file_is_replaced(folder, content):
    search(FakeTimer(2))
    [file] = folder.iterdir()
    file.write_text(content)
    assert search(FakeTimer(4)) == HEURISTIC.candidates()[4]
    assert search(FakeTimer(0)) == HEURISTIC.candidates()[4]


def test_the_switch_starts_a_search(folder, monkeypatch):
    monkeypatch.setenv(autotune.SWITCH, "1")
    monkeypatch.setattr("triton.testing.do_bench", FakeTimer(6))
    cores = [torch.zeros(2, 1, 4, 32), torch.zeros(2, 32, 4, 32), torch.zeros(2, 32, 4, 1)]
    assert autotune.launch_config(cores) == HEURISTIC.candidates()[6]


def test_candidates_keep_the_order_of_every_sum():
    """What a sum runs over is cut alike in all: k, the tiles, and the gathers' blocks."""
    for config in HEURISTIC.candidates():
        for name in ("prefix", "row", "prefix_grad", "left_grad", "core1_grad", "core2_grad"):
            assert getattr(config, name).k == getattr(HEURISTIC, name).k, name
        for name in ("tile_prefixes", "gather", "pieces0", "pieces2", "precision"):
            assert getattr(config, name) == getattr(HEURISTIC, name), name
