"""Calibration of a machine: the fit, a tiny measurement, and files of other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ecorec_torchrec.bench.cost_fit import Sample, fit_costs, median_error
from ecorec_torchrec.cli import main
from ecorec_torchrec.planner.calibration import OPERATIONS
from ecorec_torchrec.train.hardware import load_hardware

FLAGS = ("--device", "cpu", "--out", "machine.yaml")
TINY = ("--scale", "0.001", "--repeats", "1", "--rounds", "1")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_fit_finds_the_costs_that_made_the_times():
    work = [(1, 100, 5), (1, 10_000, 5), (2, 50_000, 900), (1, 0, 2_000)]
    samples = [
        Sample({"calls": c, "bytes": b, "rows": r}, 7_000 * c + 3 * b + 20 * r) for c, b, r in work
    ]
    costs = fit_costs(samples)
    assert costs == pytest.approx({"calls": 7_000, "bytes": 3, "rows": 20})
    assert median_error(samples, costs) == pytest.approx(0, abs=1e-9)


def test_fit_has_no_negative_costs_and_leaves_out_what_is_known():
    """Time that falls with a unit of work is put down to the others."""
    samples = [Sample({"calls": 1, "bytes": n}, 1.0 - n * 1e-4) for n in (1, 1000, 5000)]
    costs = fit_costs(samples)
    assert costs["bytes"] == 0 and costs["calls"] > 0
    with_known = [Sample({"calls": 1}, 3.0, known=2.0), Sample({"calls": 1}, 5.0, known=4.0)]
    assert fit_costs(with_known) == pytest.approx({"calls": 1.0})


@pytest.mark.long
def test_a_machine_is_measured_once(capsys: pytest.CaptureFixture[str]):
    main(["bench", "machine", *FLAGS, *TINY, "--nproc", "2"])
    assert "measuring: machine.yaml: no such file" in capsys.readouterr().out
    hardware = load_hardware("machine.yaml")
    assert (hardware.ranks_per_host, hardware.device) == (2, "cpu")
    assert set(OPERATIONS) - set(hardware.costs_ns) == {"host_copy", "to_device"}
    for operation in ("copy", "gemm", "dense_forward", "tt_backward", "all_to_all"):
        assert any(cost > 0 for cost in hardware.costs_ns[operation].values())
    first = Path("machine.yaml").read_bytes()
    main(["bench", "machine", *FLAGS, "--nproc", "2"])  # in no time
    assert "was measured on this machine" in capsys.readouterr().out
    assert Path("machine.yaml").read_bytes() == first


def test_a_file_of_another_machine_is_renewed(capsys: pytest.CaptureFixture[str]):
    write(machine={"cpu": "Z80", "torch": "0.4"})
    main(["bench", "machine", *FLAGS, *TINY])
    assert "measuring: cpu: Z80 there" in capsys.readouterr().out
    assert load_hardware("machine.yaml").machine["cpu"] != "Z80"
    assert "all_to_all" not in load_hardware("machine.yaml").costs_ns  # one rank has no peers


def test_training_refuses_costs_of_another_machine(capsys: pytest.CaptureFixture[str]):
    write(machine={"cpu": "Z80"})
    with pytest.raises(SystemExit) as caught:
        main(["train", "--config", "synthetic_tiny", "--plan.hardware", "machine.yaml"])
    assert caught.value.code == 2
    assert "measured elsewhere (cpu: Z80 there, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc 0: at least 1"),
        (["--scale", "2"], "--scale 2.0: above 0, at most 1"),
        (["--folder", "nowhere"], "--folder nowhere: no such folder"),
        ([], "machine.yaml: a file of data sheet values, not replaced"),
    ],
)
def test_mistakes_are_messages(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    write(machine={})
    with pytest.raises(SystemExit) as caught:
        main(["bench", "machine", *FLAGS, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp32_tflops": 0}, "fp32_tflops=0.0 must be > 0"),
        ({"device": "cuda"}, "hbm_gib is missing for device: cuda"),
        ({"costs_ns": {"gemm": {"bytes": 1}}}, "costs_ns.gemm: 'bytes' is none of flops"),
    ],
)
def test_wrong_hardware_files_are_named(changes: dict, message: str):
    write(**changes)
    with pytest.raises(ValueError, match=f"machine.yaml:1: {message}"):
        load_hardware("machine.yaml")


def write(**changes: object) -> None:
    values = {
        "ranks_per_host": 1,
        "device": "cpu",
        "host_dram_gib": 16,
        "host_dram_gb_per_s": 20,
        "intra_host_gb_per_s": 1,
        "fp32_tflops": 0.1,
    }
    Path("machine.yaml").write_text(yaml.safe_dump(values | changes, sort_keys=False))
