"""Costs of operations: what may be said of them, and what follows from a data sheet."""

from __future__ import annotations

import pytest

from ecorec_torchrec.planner import Calibration


def test_time_is_the_sum_over_units_of_work():
    calibration = Calibration({"all_to_all": {"calls": 80_000, "bytes": 0.5}})
    assert calibration.time_ms("all_to_all", calls=2, bytes=1_000_000) == pytest.approx(0.66)
    assert calibration.time_ms("all_to_all", calls=2) == pytest.approx(0.16)
    assert "all_to_all" in calibration and "gemm" not in calibration
    with pytest.raises(KeyError, match="gemm"):
        calibration.time_ms("gemm", flops=1)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"fly": {"bytes": 1.0}}, "costs_ns: 'fly' is none of copy, "),
        ({"gemm": {"bytes": 1.0}}, "costs_ns.gemm: 'bytes' is none of flops"),
        ({"gemm": {"flops": -1.0}}, "costs_ns.gemm.flops=-1.0 must be >= 0"),
        ({"gemm": {"flops": float("nan")}}, "costs_ns.gemm.flops=nan must be >= 0"),
    ],
)
def test_wrong_costs_are_named(costs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Calibration(costs)


def test_a_data_sheet_gives_peak_rates_and_says_what_it_assumes():
    calibration = Calibration.of_data_sheet(fp32_tflops=67, memory_gb_per_s=3350)
    assert calibration.time_ms("gemm", flops=67e12) == pytest.approx(1000)
    assert calibration.time_ms("copy", bytes=1e9) == pytest.approx(2 / 3.35)
    assert "all_to_all" not in calibration  # latency is on no data sheet
    assert "collectives have no latency" in calibration.assumptions
