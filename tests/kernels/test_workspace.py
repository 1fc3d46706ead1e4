"""`workspace_bytes` bounds what a call allocates beside its results and the index plan."""

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag, torch_grouped

BATCH = TableBatch(
    ("t", "s"), (30_000, 9_000), ((30, 25, 40), (20, 15, 30)), (4, 2, 4), (16, 8),
    ("f", "g"), (0, 1),
)  # fmt: skip
NUM_LOOKUPS = 10_000


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


@pytest.fixture
def plan_of():
    def plan_of(num_lookups: int, num_bags: int, skew: float):
        limits = torch.tensor(BATCH.num_embeddings).repeat_interleave(num_lookups // 2)
        ids = (torch.rand(num_lookups) ** skew * limits).long()
        return index_plan(ids, torch.linspace(0, num_lookups, 2 * num_bags + 1).long(), BATCH)

    return plan_of


@pytest.mark.parametrize(("skew", "num_bags"), [(1, 2000), (3, 100)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grouped_form_in_pytorch_keeps_within_its_workspace(
    plan_of, skew, num_bags, weighted, dtype
):
    plan = plan_of(NUM_LOOKUPS, num_bags, skew)
    cores = [torch.randn(shape).to(dtype) for shape in BATCH.core_shapes]
    sums_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(NUM_LOOKUPS, dtype=sums_dtype) if weighted else None
    grad = torch.randn(num_bags, 64).to(dtype)
    weights_bytes = 0 if weights is None else weights.nbytes
    grads_bytes = sum(core.nbytes for core in cores) + weights_bytes
    for workspace_bytes in (4 * 2**20, 16 * 2**20, 500 * 2**20):
        # fmt: off
        used = peak_bytes(lambda limit=workspace_bytes: torch_grouped.forward(
            plan, cores, weights, 2, True, dtype, limit))
        assert used - grad.nbytes <= workspace_bytes
        used = peak_bytes(lambda limit=workspace_bytes: torch_grouped.backward(
            grad, plan, cores, weights, 2, True, True, weighted, limit))
        assert used - grads_bytes <= workspace_bytes
        # fmt: on


def test_small_workspaces_are_used(plan_of):
    """The bound is no mere upper limit: less workspace is less memory."""
    plan = plan_of(NUM_LOOKUPS, 2000, 1)
    cores = [torch.randn(shape) for shape in BATCH.core_shapes]
    grad = torch.randn(2000, 64)

    def used(workspace_bytes: int) -> int:
        return peak_bytes(
            lambda: torch_grouped.backward(
                grad, plan, cores, None, 2, False, True, False, workspace_bytes
            )
        )

    assert used(2 * 2**20) < 0.3 * used(500 * 2**20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_below_the_floor(dtype):
    """float64 is the form in PyTorch, float32 that in numba: both name the floor."""
    cores = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in BATCH.core_shapes]
    ids, offsets = torch.arange(100), torch.tensor([0, 50, 100])
    with pytest.raises(ValueError, match=r"workspace_bytes=10 .*floor of \d+ bytes"):
        batched_tt_embedding_bag(ids, offsets, cores, BATCH, workspace_bytes=10)
    output = batched_tt_embedding_bag(ids, offsets, cores, BATCH, workspace_bytes=2**20)
    assert output.shape == (1, 64)


def test_reference_says_that_it_has_no_bound():
    cores = [torch.randn(shape) for shape in BATCH.core_shapes]
    ids, offsets = torch.arange(4), torch.tensor([0, 2, 4])
    with pytest.warns(UserWarning, match="ignores workspace_bytes"):
        batched_tt_embedding_bag(
            ids, offsets, cores, BATCH, workspace_bytes=10, backend="reference"
        )
