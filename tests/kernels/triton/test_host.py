"""What the host does around the Triton kernels: it never waits, and launches do not grow.

Nothing runs here: tensors are on the meta device, so they have no values to wait for, and refuse to
meet tensors of another device; launches are counted instead of done.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan, TableBatch, reference
from ecorec_torchrec.kernels.tt_lookup.launch import LaunchConfig, dot_precision
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed: it ships for Linux only")

from ecorec_torchrec.kernels.tt_index import triton_plan
from ecorec_torchrec.kernels.tt_lookup import triton_engine
from triton.runtime.jit import JITFunction

NUM_LOOKUPS, NUM_BAGS = 4096, 4


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(num_tables: int, workspace_bytes: int | None = None) -> Counter[str]:
    """Kernels and operators of plan, forward and backward, by name."""
    names = tuple(f"t{t}" for t in range(num_tables))
    factors = ((20, 20, 25),) * num_tables
    batch = TableBatch(
        names, (10_000,) * num_tables, factors, (4, 4, 4), (16, 16), names, tuple(range(num_tables))
    )
    launches: Counter[str] = Counter()

    def count(kernel, *args, grid, warmup, **kwargs):
        assert all(1 <= side < 2**31 for side in grid)
        launches[kernel.__name__] += 1

    operators = CountOperators()
    numbers = torch.empty(num_tables, 8, dtype=torch.int64, device="meta")
    with (
        mock.patch.object(JITFunction, "run", count),
        mock.patch.object(triton_plan, "_table_numbers", lambda key, device: numbers),
        operators,
    ):
        indices = torch.empty(NUM_LOOKUPS, dtype=torch.int64, device="meta")
        offsets = torch.empty(num_tables * NUM_BAGS + 1, dtype=torch.int64, device="meta")
        plan, _ = triton_plan.build_plan(indices, offsets, batch)
        cores = [torch.empty(shape, device="meta") for shape in batch.core_shapes]
        weights = torch.empty(NUM_LOOKUPS, device="meta")
        grad = torch.empty(NUM_BAGS, num_tables * 64, device="meta")
        options = (num_tables, True)
        triton_engine.forward(plan, cores, weights, *options, torch.float32, workspace_bytes)
        triton_engine.backward(grad, plan, cores, weights, *options, True, True, workspace_bytes)
    assert all(tensor.dtype == torch.int32 for tensor in IndexPlan(*plan))
    return launches + operators.counts


def test_launches_do_not_grow_with_the_tables():
    assert step(num_tables=1) == step(num_tables=500)


def test_launches_of_a_part():
    """All of a step but what is done once is repeated for every part, and nothing else."""
    whole, cut = step(num_tables=1), step(num_tables=1, workspace_bytes=1_200_000)
    assert whole["prefix_kernel"] == 2  # forward and backward
    assert cut["prefix_kernel"] > 2
    once = {"_key_kernel", "_change_kernel", "_level_kernel", "row_piece_kernel"}
    assert all(cut[name] == whole[name] for name in once)
    assert cut["core1_grad_kernel"] == cut["core2_piece_kernel"] == cut["core0_piece_kernel"]


def peak_bytes(call) -> int:
    """The most that `call` has allocated at any time, by PyTorch's own records."""
    with torch.profiler.profile(profile_memory=True) as profile:
        results = call()
    peak = live = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert results is not None and peak > 0
    return peak


@pytest.mark.parametrize("workspace_bytes", [6 * 2**20, 20 * 2**20, 500 * 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_call_keeps_within_its_workspace(workspace_bytes, dtype, weighted):
    """What PyTorch allocates around the kernels, which do not run; tables on the CPU."""
    num_lookups, num_bags = 20_000, 2_000
    batch = TableBatch(
        ("t", "s"), (30_000, 9_000), ((30, 25, 40), (20, 15, 30)), (4, 2, 4), (16, 8),
        ("f", "g"), (0, 1),
    )  # fmt: skip
    ids, offsets = torch.randint(9_000, (num_lookups,)), torch.arange(0, num_lookups + 1, 5)
    plan, _ = reference.build_plan(ids, offsets, batch)
    cores = [torch.randn(shape).to(dtype) for shape in batch.core_shapes]
    weights = torch.rand(num_lookups) if weighted else None
    grad = torch.randn(num_bags, 64).to(dtype)
    results_bytes = sum(core.nbytes for core in cores) + (weights.nbytes if weighted else 0)
    arguments = (plan, cores, weights, 2, True)
    with mock.patch.object(JITFunction, "run", lambda *args, **kwargs: None):
        used = peak_bytes(lambda: triton_engine.forward(*arguments, dtype, workspace_bytes))
        assert used - grad.nbytes <= workspace_bytes
        used = peak_bytes(
            lambda: triton_engine.backward(grad, *arguments, True, weighted, workspace_bytes)
        )
        assert used - results_bytes <= workspace_bytes


def test_a_workspace_that_is_too_small_names_the_floor():
    with pytest.raises(ValueError, match=r"workspace_bytes=1000 is below the floor of \d+ bytes"):
        step(num_tables=1, workspace_bytes=1000)


def test_arithmetic_follows_the_matmul_precision():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert dot_precision(torch.float32) == "ieee"
        assert dot_precision(torch.bfloat16) == "tf32"
        torch.set_float32_matmul_precision("high")
        assert dot_precision(torch.float32) == "tf32"
        with mock.patch.object(torch.version, "hip", "6.4"):
            assert dot_precision(torch.float32) == "bf16x3"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("rank", [1, 8, 100, 512])
@pytest.mark.parametrize("col_factors", [(1, 1, 1), (3, 5, 7), (128, 4, 4), (8, 16, 16)])
def test_blocks_are_what_matrix_units_take(col_factors, rank):
    config = LaunchConfig.choose(col_factors, (rank, rank), "ieee")
    products = (config.prefix, config.row, config.prefix_grad, config.left_grad,
                config.core1_grad, config.core2_grad)  # fmt: skip
    for blocks in products:
        sides = (blocks.m, blocks.n, blocks.k)
        assert min(sides) >= 16 and all(side & (side - 1) == 0 for side in sides)
    q1, _, q3 = col_factors
    assert config.tile_prefixes * q1 <= config.prefix.m
    assert config.row.n >= q3 and config.core2_grad.n >= q3
