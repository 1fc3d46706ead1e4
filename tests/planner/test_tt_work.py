"""The counts behind the cost model, against the formulas for three cores written out."""

from __future__ import annotations

import pytest
import torch

from ecorec_torchrec.planner.tt_work import TTWork
from ecorec_torchrec.tt import TTSpec

SPEC = TTSpec(1000, (10, 10, 10), (2, 4, 8), (16, 32))


def test_three_cores_by_hand():
    work = TTWork.of(SPEC, 1e9)  # so many ids that every row and every prefix occurs
    p, d = 1000, 64
    prefixes = 100
    c0, c1, c2 = 2 * 16, 16 * 4 * 32, 32 * 8
    t = 2 * 4 * 32
    e1, e2 = 2 * 2 * 16 * 4 * 32, 2 * 2 * 4 * 32 * 8
    cores = 10 * (c0 + c1 + c2)
    assert work.forward_flops == pytest.approx(prefixes * e1 + p * e2)
    assert work.backward_flops == pytest.approx(3 * prefixes * e1 + 2 * p * e2)
    forward = prefixes * (c0 + t) + 10 * c1 + p * (c2 + t + d) + 2e9 * d
    backward = (
        2e9 * d + prefixes * (5 * t + 3 * c0) + 30 * c1 + p * (t + 2 * d + 2 * c2) + 3 * cores
    )
    assert work.forward_bytes == pytest.approx(4 * forward)
    assert work.backward_bytes == pytest.approx(4 * backward)
    assert work.workspace_bytes == 4 * (p * d + 2 * prefixes * t)


def test_distinct_rows_are_those_of_uniform_ids():
    """The expectation that decides everything, against draws."""
    lookups = 700
    counts = [torch.randint(1000, (lookups,)).unique().numel() for _ in range(200)]
    flops_of_a_row = 2 * 2 * 4 * 32 * 8
    prefix_counts = [(torch.randint(1000, (lookups,)) // 10).unique().numel() for _ in range(200)]
    drawn = sum(counts) / 200 * flops_of_a_row + sum(prefix_counts) / 200 * 2 * 2 * 16 * 4 * 32
    assert TTWork.of(SPEC, lookups).forward_flops == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_any_number_of_cores(num_cores):
    spec = TTSpec(1, (1,) * num_cores, (4,) * num_cores, (8,) * (num_cores - 1))
    assert TTWork.of(spec, 0).forward_flops == 0
    one = TTWork.of(spec, 1)
    many = TTWork.of(spec, 1000)
    assert 0 < one.forward_flops == many.forward_flops  # one row, however often it is read
    assert one.backward_flops >= 2 * one.forward_flops
    assert many.index_plan_bytes == 1000 * one.index_plan_bytes
    assert one.workspace_bytes == many.workspace_bytes
