"""Bits do not depend on the neighbours in the group, on the cuts, on threads, or on the run."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup.products import bmm
from torch import Tensor

NUM_BAGS, NUM_IDS = 32, 700
# Tables of unlike sizes; "b" is read by two features, a group of "c" has up to 40 prefixes. Odd
# shapes keep vector tails in play.
TABLES = {"a": (500, (5, 10, 11)), "b": (90, (4, 5, 5)), "c": (3000, (40, 5, 15))}
FEATURES = {"a": ("fa",), "b": ("fb", "gb"), "c": ("fc",)}
SHAPES = {2: ((3, 5), (7,)), 3: ((3, 2, 5), (6, 7)), 4: ((2, 3, 1, 4), (3, 4, 5))}
BACKENDS = ["cpu", "cpu without numba", "float64"]


@pytest.fixture(params=BACKENDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param == "cpu without numba":
        request.getfixturevalue("without_numba")
    return torch.float64 if request.param == "float64" else torch.float32


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def factors_of(num_cores: int, factors: tuple[int, int, int]) -> tuple[int, ...]:
    p1, p2, p3 = factors
    return {2: (p1 * p2, p3), 3: factors, 4: (p1, 1, p2, p3)}[num_cores]


@pytest.fixture
def make_case(lookup_case):
    """A case of some of the tables, whose ids, cores and weights are each table's own."""

    def make(names: str, dtype: torch.dtype, mode: str = "sum", num_cores: int = 3, seed: int = 0):
        col_factors, ranks = SHAPES[num_cores]
        batch = TableBatch(
            tuple(names),
            tuple(TABLES[name][0] for name in names),
            tuple(factors_of(num_cores, TABLES[name][1]) for name in names),
            col_factors,
            ranks,
            tuple(feature for name in names for feature in FEATURES[name]),
            tuple(t for t, name in enumerate(names) for _ in FEATURES[name]),
        )
        ids, lengths, cores, weights = [], [], [], []
        for name in names:
            rng = np.random.default_rng(ord(name) + seed)
            shapes = TableBatch(("t",), (1,), (factors_of(num_cores, TABLES[name][1]),),
                                col_factors, ranks, ("f",), (0,)).core_shapes  # fmt: skip
            cores.append([torch.from_numpy(rng.normal(size=s)).to(dtype) for s in shapes])
            for _ in FEATURES[name]:
                ids.append((rng.random(NUM_IDS) ** 2 * TABLES[name][0]).astype(np.int64))
                lengths.append(rng.multinomial(NUM_IDS, np.ones(NUM_BAGS) / NUM_BAGS))
                weights.append(torch.from_numpy(rng.normal(size=NUM_IDS)).to(dtype))
        offsets = np.concatenate([[0], np.concatenate(lengths).cumsum()])
        return lookup_case(
            batch,
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(offsets),
            [torch.cat(cores_T) for cores_T in zip(*cores, strict=True)],
            torch.cat(weights) if mode == "sum" else None,
            mode,
        )

    return make


def results(case, **options) -> list[Tensor]:
    """Output, core gradients and weights gradient."""
    output, core_grads, weights_grad = case.run(**options)
    return [output, *core_grads, *([] if weights_grad is None else [weights_grad])]


def assert_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b), f"largest difference {(a - b).abs().max()}"


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("num_cores", SHAPES)
def test_neighbours(make_case, dtype, mode, num_cores):
    """Table "b" alone gives what it gives between two other tables."""
    alone, group = (make_case(n, dtype, mode, num_cores) for n in ("b", "abc"))
    dim, shared = alone.batch.embedding_dim, results_with_equal_grads(group, alone)
    own = results(alone)
    columns = slice(dim, 3 * dim)  # features fa | fb gb | fc
    mine = [shared[0][:, columns]]
    for k, grad in enumerate(shared[1 : 1 + num_cores]):
        mine.append(grad.narrow(0, group.batch.core_offsets[k][1], alone.batch.row_factors[0][k]))
    mine += [grad[NUM_IDS : 3 * NUM_IDS] for grad in shared[1 + num_cores :]]
    assert_same_bits(mine, own)


def results_with_equal_grads(group, alone) -> list[Tensor]:
    """The group's results when its middle table gets the gradients that it gets alone."""
    dim = alone.batch.embedding_dim
    plain_grad, own_grad = type(group).grad, alone.grad(torch.float64)

    class Group(type(group)):
        def grad(self, dtype: torch.dtype) -> Tensor:
            grad = plain_grad(self, torch.float64)
            grad[:, dim : 3 * dim] = own_grad
            return grad.to(dtype)

    return results(Group(**vars(group)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_cuts(make_case, dtype, mode):
    """Any workspace from the floor up gives the bits of one that never cuts."""
    case = make_case("abc", dtype, mode)
    uncut = results(case, workspace_bytes=2**30)
    floor_bytes = floor_of(case)
    for workspace_bytes in (floor_bytes, floor_bytes + 5_000, floor_bytes * 2):
        assert_same_bits(results(case, workspace_bytes=workspace_bytes), uncut)


def floor_of(case) -> int:
    """The least workspace that forward and backward accept, as their messages say."""
    workspace_bytes = 1
    for _ in range(3):
        try:
            case.run(workspace_bytes=workspace_bytes)
        except ValueError as error:
            message = str(error)
            assert f"workspace_bytes={workspace_bytes} " in message
            workspace_bytes = int(message.split("floor of ")[1].split()[0])
        else:
            return workspace_bytes
    raise AssertionError("the floor that the message names is refused too")


@pytest.mark.parametrize("num_cores", SHAPES)
def test_threads(make_case, dtype, num_cores):
    case = make_case("abc", dtype, num_cores=num_cores)
    torch.set_num_threads(1)
    single = results(case)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert_same_bits(results(case), single)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_product_does_not_depend_on_the_batch(num_threads):
    """Sums of 512 terms, which a BLAS splits when it has more threads than matrices."""
    left, right = torch.randn(9, 64, 512).double(), torch.randn(9, 32, 512).double().mT
    torch.set_num_threads(1)
    whole = bmm(left, right)
    torch.set_num_threads(num_threads)
    for items in (slice(0, 1), slice(1, 2), slice(3, 5), slice(0, 9)):
        assert torch.equal(bmm(left[items], right[items]), whole[items])
        out = torch.empty_like(whole[items])
        assert torch.equal(bmm(left[items], right[items], out=out), whole[items])


def test_threads_and_more_than_three_cores(lookup_case):
    """The leading cores are multiplied out: so large that a BLAS wants to split the sums."""
    batch = TableBatch(
        ("t",), (30**4,), ((30, 30, 30, 30),), (4, 4, 4, 4), (16, 16, 16), ("f",), (0,)
    )
    cores = [torch.randn(shape) for shape in batch.core_shapes]
    ids, offsets = torch.randint(30**4, (500,)), torch.arange(0, 501, 10)
    case = lookup_case(batch, ids, offsets, cores, None, "sum")
    torch.set_num_threads(1)
    single = results(case)
    torch.set_num_threads(2)
    assert_same_bits(results(case), single)


def test_threads_share_a_large_call(make_case, dtype):
    """Enough lookups for every thread to get work, in one bag and in many."""
    case = make_case("c", dtype)
    repeats = 40
    case.indices_L, case.weights_L = case.indices_L.repeat(repeats), case.weights_L.repeat(repeats)
    for num_bags in (1, 1000):
        case.offsets = torch.linspace(0, len(case.indices_L), num_bags + 1).long()
        torch.set_num_threads(1)
        single = results(case)
        torch.set_num_threads(2)
        assert_same_bits(results(case), single)


def test_runs(make_case, dtype):
    case = make_case("abc", dtype)
    first = results(case)
    for _ in range(3):
        assert_same_bits(results(case), first)


def test_other_samples(make_case, dtype):
    """A bag's sum depends on its own ids only, though its rows are shared with other bags."""
    case = make_case("a", dtype)
    whole = case.run()[0]
    end = int(case.offsets[5])
    first = replace(
        case,
        indices_L=case.indices_L[:end],
        offsets=case.offsets[:6],
        weights_L=case.weights_L[:end],
    )
    assert torch.equal(first.run()[0], whole[:5])
