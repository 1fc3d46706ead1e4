"""The numba engine at sizes where it cuts and runs in parallel: truth, bits, memory, threads.

`test_lookup.py` has the small random cases of all backends.
"""

import multiprocessing
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan, TableBatch, index_plan
from ecorec_torchrec.kernels.tt_lookup import cpu_engine, torch_grouped
from torch import Tensor

Gradients = tuple[list[Tensor] | None, Tensor | None]
NUM_IDS, NUM_BAGS = 5_000, 250  # per feature


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Case:
    """Skewed ids in tables of one shape; feature f reads table f, or as `features` says."""

    def __init__(
        self,
        col_factors: tuple[int, ...],
        ranks: tuple[int, ...],
        tables: tuple[str, ...] = ("a", "b"),
        *,
        weighted: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        factors = {"a": (17, 20, 30), "b": (9, 40, 11), "c": (30, 3, 7)}
        self.batch = TableBatch(
            tables,
            tuple(factors[t][0] * factors[t][1] * factors[t][2] for t in tables),
            tuple(factors[t] for t in tables),
            col_factors,
            ranks,
            tables,
            tuple(range(len(tables))),
        )
        ids, cores, weights, grads = [], [], [], []
        for name, num_rows in zip(tables, self.batch.num_embeddings, strict=True):
            own = torch.Generator().manual_seed(ord(name))
            ids.append((torch.rand(NUM_IDS, generator=own) ** 3 * num_rows).long())
            shapes = zip(factors[name], (1, *ranks), col_factors, (*ranks, 1), strict=True)
            cores.append([torch.randn(shape, generator=own).to(dtype) for shape in shapes])
            weights.append(torch.randn(NUM_IDS, generator=own))
            dim = self.batch.embedding_dim
            grads.append(torch.randn(NUM_BAGS, dim, generator=own).to(dtype))
        lengths = torch.full((len(tables) * NUM_BAGS,), NUM_IDS // NUM_BAGS)
        lengths[::5] = 0  # some bags are empty
        lengths[1::5] *= 2
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.plan = index_plan(torch.cat(ids), offsets, self.batch)
        self.cores = [torch.cat(per_table) for per_table in zip(*cores, strict=True)]
        self.weights_L = torch.cat(weights) if weighted else None
        self.grad = torch.cat(grads, 1).contiguous()

    def forward(self, workspace_bytes: int | None = None, mean: bool = False) -> Tensor:
        return cpu_engine.forward(
            self.plan, self.cores, self.weights_L, self.batch.num_features, mean,
            self.cores[0].dtype, workspace_bytes,
        )  # fmt: skip

    def backward(self, workspace_bytes: int | None = None, mean: bool = False) -> Gradients:
        return cpu_engine.backward(
            self.grad, self.plan, self.cores, self.weights_L, self.batch.num_features, mean, True,
            self.weights_L is not None, workspace_bytes,
        )  # fmt: skip

    def truth(self, mean: bool) -> tuple[Tensor, Gradients]:
        """In float64, by the form in PyTorch (which `test_lookup.py` holds to the materialised
        tables)."""
        cores = [core.double() for core in self.cores]
        weights_L = None if self.weights_L is None else self.weights_L.double()
        num_features, weighted = self.batch.num_features, weights_L is not None
        output = torch_grouped.forward(
            self.plan, cores, weights_L, num_features, mean, torch.float64, None
        )
        gradients = torch_grouped.backward(
            self.grad.double(), self.plan, cores, weights_L, num_features, mean, True, weighted,
            None,
        )  # fmt: skip
        return output, gradients


def flat(output: Tensor, gradients: Gradients) -> list[Tensor]:
    core_grads, weights_grad = gradients
    return [output, *(core_grads or []), *([] if weights_grad is None else [weights_grad])]


def relative_error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize(
    ("col_factors", "ranks"),
    [((4, 4, 4), (16, 16)), ((2, 4, 4), (32, 32)), ((4, 4, 8), (16, 64)), ((3, 4, 5), (12, 20)),
     ((5, 3, 7), (9, 11)), ((1, 2, 9), (3, 130)), ((8, 8, 8), (7, 5))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_float64(col_factors, ranks, weighted):
    case = Case(col_factors, ranks, weighted=weighted)
    output, gradients = case.truth(mean=weighted)
    results = flat(case.forward(mean=weighted), case.backward(mean=weighted))
    for result, truth in zip(results, flat(output, gradients), strict=True):
        assert relative_error(result, truth) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_cores_sum_in_float32(dtype):
    """Only the results are rounded, once."""
    case = Case((4, 2, 4), (8, 8), dtype=dtype)
    output, gradients = case.truth(mean=False)
    results = flat(case.forward(), case.backward())
    for result, truth in zip(results, flat(output, gradients), strict=True):
        assert result.dtype == dtype
        one_rounding = torch.finfo(dtype).eps * truth.abs() + 1e-4 * truth.abs().max()
        assert ((result.double() - truth).abs() <= one_rounding).all()


def floor_of(run: Callable[[int], object]) -> int:
    """The smallest workspace, as the error says it."""
    with pytest.raises(ValueError, match="below the floor of") as error:
        run(1)
    return int(str(error.value).split("floor of ")[1].split()[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_bits_do_not_depend_on_threads_and_cuts(weighted):
    case = Case((4, 3, 4), (16, 24), weighted=weighted)
    torch.set_num_threads(1)
    wanted = flat(case.forward(mean=True), case.backward(mean=True))
    floors = [floor_of(partial(run, mean=True)) for run in (case.forward, case.backward)]
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        for extra in (0, 50_000, 500_000, None):
            limits = [None if extra is None else floor + extra for floor in floors]
            output = case.forward(limits[0], mean=True)
            results = flat(output, case.backward(limits[1], mean=True))
            for result, truth in zip(results, wanted, strict=True):
                assert torch.equal(result, truth), (num_threads, extra)


def test_bits_do_not_depend_on_neighbours():
    """Wherever a table lies in the flat cores, and whatever it shares threads and parts with."""
    torch.set_num_threads(2)
    alone = Case((2, 4, 4), (8, 12), ("b",))
    wanted = [alone.forward(), *alone.backward()[0]]
    for tables in (("b", "a"), ("a", "b"), ("c", "a", "b")):
        group = Case((2, 4, 4), (8, 12), tables)
        position, dim = tables.index("b"), alone.batch.embedding_dim
        output = group.forward()[:, position * dim : (position + 1) * dim]
        assert torch.equal(output, wanted[0])
        core_grads, _ = group.backward(floor_of(group.backward))
        for k, gradient in enumerate(core_grads):
            first = group.batch.core_offsets[k][position]
            own = gradient.narrow(0, first, group.batch.row_factors[position][k])
            assert torch.equal(own, wanted[k + 1])


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_workspace_stays_within_its_limit(num_threads, weighted, dtype):
    """numpy reports its buffers to tracemalloc, so this does not trust the engine's own sums.

    What PyTorch allocates is the results and float32 copies, whose sizes are added.
    """
    torch.set_num_threads(num_threads)
    case = Case((4, 4, 4), (16, 16), weighted=weighted, dtype=dtype)
    is_half = dtype != torch.float32
    floats = [4 * sum(core.numel() for core in case.cores) * is_half]
    floats += [4 * case.grad.numel() * is_half]
    copies = {case.forward: sum(floats), case.backward: 2 * floats[0] + floats[1]}
    for run, copy_bytes in copies.items():
        used_at = []
        floor = floor_of(partial(run, mean=True))
        for limit in (floor, floor + 100_000, floor + 1_000_000, 10 * floor):
            run(limit, True)
            tracemalloc.start()
            run(limit, True)
            used = tracemalloc.get_traced_memory()[1] + copy_bytes
            tracemalloc.stop()
            assert used <= limit
            used_at.append(used)
        assert used_at[0] < used_at[-1]  # the limit is what holds the use down


def test_floor_names_its_parts():
    case = Case((4, 4, 4), (16, 16))
    with pytest.raises(
        ValueError, match=r"workspace_bytes=4096 .* floor of \d+ bytes: \d+ for the"
    ):
        case.forward(4096)
    with pytest.raises(
        ValueError, match=r"workspace_bytes=4096 .* floor of \d+ bytes: \d+ for the"
    ):
        case.backward(4096)


def test_rows_of_cores_that_no_id_uses_have_zero_gradient():
    batch = TableBatch(("t",), (8000,), ((20, 20, 20),), (2, 2, 2), (4, 4), ("f",), (0,))
    cores = [torch.randn(shape) for shape in batch.core_shapes]
    plan = index_plan(torch.tensor([4021, 4022]), torch.tensor([0, 2]), batch)
    core_grads, _ = cpu_engine.backward(
        torch.ones(1, 8), plan, cores, None, 1, False, True, False, None
    )
    used = [[10], [1], [1, 2]]
    for gradient, rows in zip(core_grads, used, strict=True):
        assert gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist() == rows


def test_calls_from_several_python_threads_at_once():
    """As pipelines and DDP do; numba's default threading layer aborts the process here."""
    torch.set_num_threads(2)
    cases = [Case((4, 4, 4), (16, 16)), Case((2, 3, 4), (8, 8), ("c",))]
    wanted = [flat(case.forward(), case.backward()) for case in cases]

    def call(turn: int) -> bool:
        case, truth = cases[turn % 2], wanted[turn % 2]
        results = flat(case.forward(), case.backward())
        return all(torch.equal(x, y) for x, y in zip(results, truth, strict=True))

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(call, range(24)))


def _sum_in_child(plan: IndexPlan, cores: list[Tensor], queue) -> None:  # noqa: ANN001
    torch.set_num_threads(1)
    queue.put(float(cpu_engine.forward(plan, cores, None, 2, False, torch.float32, None).sum()))


def test_a_forked_worker_can_look_up():
    """A data loader forks after the parent has used all threads; its workers use one each."""
    torch.set_num_threads(2)
    case = Case((4, 4, 4), (16, 16))
    wanted = float(case.forward().sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(case.plan, case.cores, queue))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(wanted, rel=1e-6)
    child.join(60)
    assert child.exitcode == 0


_COUNT_COMPILATIONS = """
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag, cpu_kernels, cpu_simd
batch = TableBatch(("t",), (300,), ((5, 6, 10),), (3, 5, 7), (11, 13), ("f",), (0,))
cores = [torch.randn(shape).requires_grad_() for shape in batch.core_shapes]
batched_tt_embedding_bag(torch.arange(9), torch.tensor([0, 4, 9]), cores, batch).sum().backward()
stats = [f.stats for f in (cpu_simd.matmul, cpu_kernels.compute_rows, cpu_kernels.core_gradients)]
print(sum(s.cache_hits.total() for s in stats), sum(s.cache_misses.total() for s in stats))
"""


def test_a_second_process_compiles_nothing():
    """Not for a new shape either: the code is compiled once per machine, not once per shape."""
    Case((4, 4, 4), (16, 16)).backward()  # compiled by now
    environment = {k: v for k, v in os.environ.items() if k != "COVERAGE_PROCESS_START"}
    second = subprocess.run(
        [sys.executable, "-c", _COUNT_COMPILATIONS],
        capture_output=True, text=True, env=environment, check=True, timeout=300,
    )  # fmt: skip
    assert second.stdout.split() == ["3", "0"]
