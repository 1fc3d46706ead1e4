"""Counted FLOPs and bytes: small batches by hand, and the papers' cases."""

from pathlib import Path

import pytest
import torch

from ecorec_torchrec.bench.counters import PATTERNS, Work, Workload, count
from ecorec_torchrec.tt import TTSpec


@pytest.fixture
def ones() -> Workload:
    """5 lookups of 4 rows, 3 prefixes and 2 values of i2; every row of every core is one number,
    so c1 = c2 = c3 = t = D = 1 and e1 = e2 = 2."""
    spec = TTSpec(8, (2, 2, 2), (1, 1, 1), (1, 1))
    return Workload.of(torch.tensor([5, 3, 5, 4, 1]), torch.tensor([0, 3, 5]), spec)


def test_workload_is_counted_from_the_ids(ones: Workload) -> None:
    found = ones.lookups, ones.rows, ones.prefixes, ones.groups, ones.bags
    assert found == (5, 4, 3, 2, 2)


BY_HAND = {
    # lookups x (2 + 2); x (3 * 2 + 2 * 2); per lookup 3 cores + 2 t + 2 D read or written ...
    "tt_rec": Work(20, 50, 10, 4 * 5 * 7, 4 * (5 * 24 + 3 * 6), 4 * (5 * 4 + 6)),
    "el_rec": Work(
        3 * 2 + 5 * 2, 4 * 10, 4 * 2, 4 * (3 * 3 + 5 * 5), 4 * (25 + 4 * 24), 4 * 25 + 480
    ),
    "eco_rec": Work(
        3 * 2 + 4 * 2, 9 * 2 + 8 * 2, 6, 4 * (9 + 12 + 15), 4 * (20 + 48 + 45 + 30), 348
    ),
    "eco_rec_tuned": Work(14, 34, 6, 4 * (6 + 8 + 7), 4 * (5 + 12 + 21 + 18), 4 * 12),
    "grouped": Work(14, 34, 6, 4 * (6 + 2 + 12 + 10), 4 * (10 + 24 + 6 + 20 + 18), 4 * 16),
    "grouped_fused": Work(14, 34, 6, 4 * (3 + 2 + 8 + 7), 4 * (5 + 12 + 9 + 4 + 64 + 6), 4 * 38),
    "dense": Work(5, 5, 0, 4 * 7, 4 * (5 + 8), 4 * 8 + 20),
}


@pytest.mark.parametrize("pattern", BY_HAND)
def test_counts_equal_those_by_hand(pattern: str, ones: Workload) -> None:
    assert count(pattern, ones) == BY_HAND[pattern]


def test_variants_differ_in_what_they_hold(ones: Workload) -> None:
    """Chunks and micro-batches change the workspace and nothing else."""
    spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (16, 16))
    large = Workload(81_920, 50_000, 20_000, 100, 4096, spec)
    for variant, pattern in (
        ("tt_rec", "tt_rec_chunk_20000"),
        ("eco_rec_micro_batched", "eco_rec"),
    ):
        small_work, work = count(variant, large), count(pattern, large)
        assert small_work.useful_flops == work.useful_flops
        assert small_work.num_bytes == work.num_bytes
        assert small_work.workspace_bytes < 0.4 * work.workspace_bytes
    # grouped_triton: tests/kernels/triton/device/test_traffic.py counts its loads and stores.
    others = {"tt_rec_chunk_20000", "eco_rec_micro_batched", "grouped_triton"}
    assert set(BY_HAND) | others == set(PATTERNS)


def papers_case(lookups: int, rows: int, prefixes: int, rank: int) -> Workload:
    """A batch of a table of 40 million rows, D = 128; all rows of core 1 are in use."""
    spec = TTSpec(40_000_000, (250, 400, 400), (4, 4, 8), (rank, rank))
    return Workload(lookups, rows, prefixes, 400, lookups // 20, spec)


TRAFFIC_CASES = {
    # case: (workload, GB of TT-Rec, EL-Rec, EcoRec)
    "frequency, 82k, r64": (papers_case(81_920, 35_802, 12_302, 64), 41.8, 17.1, 7.7),
    "hashed, 82k, r64": (papers_case(81_920, 35_802, 30_835, 64), 41.8, 18.5, 16.7),
    "hashed, 82k, r128": (papers_case(81_920, 35_802, 30_835, 128), 159, 68.7, 61.6),
    "hashed, 2.6M, r64": (papers_case(2_621_440, 683_834, 99_972, 64), 1334, 329, 84),
}


@pytest.mark.parametrize("case", TRAFFIC_CASES)
def test_traffic_of_the_papers_cases(case: str) -> None:
    """Ours moves at most a third of what EcoRec moves, in every case; the Triton kernels even if no
    cache served any of their loads."""
    workload, *gigabytes = TRAFFIC_CASES[case]
    for pattern, expected in zip(("tt_rec", "el_rec", "eco_rec"), gigabytes, strict=True):
        assert count(pattern, workload).num_bytes / 1e9 == pytest.approx(expected, rel=0.02)
    limit = count("eco_rec", workload).num_bytes / 3
    for pattern in ("grouped", "grouped_triton", "grouped_fused"):
        assert count(pattern, workload).num_bytes <= limit, pattern


def test_the_documented_model_is_what_is_counted() -> None:
    """The table of docs/benchmarks/gpu.md."""
    text = (Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    documented = {tuple(row[:3]): row[3:] for row in rows[1:]}
    assert len(documented) == len(TRAFFIC_CASES)
    for case, (workload, *_) in TRAFFIC_CASES.items():
        id_order, rank = case.split(",")[0], workload.spec.ranks[0]
        gigabytes = [
            count(pattern, workload).num_bytes / 1e9
            for pattern in ("tt_rec", "el_rec", "eco_rec", "grouped_triton")
        ]
        ours = count("grouped_triton", workload)
        gflop = (ours.forward_flops + ours.backward_flops) / 1e9
        numbers = [gflop, *gigabytes, gigabytes[2] / gigabytes[3]]
        found = documented[id_order, f"{workload.lookups:,}", str(rank)]
        assert found == [f"{number:.1f}" for number in numbers], case
