"""`tt_embedding_bag` and `tt_embedding` as their namesakes in `torch.nn.functional`."""

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_lookup import (
    backends,
    batched_tt_embedding,
    batched_tt_embedding_bag,
)
from torch.nn.functional import embedding, embedding_bag

from ecorec_torchrec.kernels import tt_embedding, tt_embedding_bag
from ecorec_torchrec.tt import TTSpec, to_dense

SPEC = TTSpec(90, (4, 5, 5), (2, 3, 2), (4, 3))
BATCH = TableBatch(("t",), (90,), ((4, 5, 5),), (2, 3, 2), (4, 3), ("f",), (0,))
BACKENDS = ["auto", "cpu", "reference"]


@pytest.fixture
def cores() -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in SPEC.core_shapes]


@pytest.fixture
def dense(cores) -> torch.Tensor:
    return to_dense(cores, SPEC)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_by_offsets(cores, dense, backend, mode):
    ids, offsets = torch.tensor([3, 89, 3, 0, 7]), torch.tensor([0, 2, 2, 5])
    expected = embedding_bag(ids, dense, offsets, mode=mode)
    torch.testing.assert_close(
        tt_embedding_bag(ids, offsets, cores, SPEC, mode=mode, backend=backend), expected
    )
    closed = tt_embedding_bag(
        ids, offsets, cores, SPEC, mode=mode, backend=backend, include_last_offset=True
    )
    torch.testing.assert_close(closed, expected[:-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (3, 0), (0, 3)])
def test_bags_by_rows_of_2d_indices(cores, dense, backend, shape):
    ids, weights = torch.randint(90, shape), torch.randn(shape, dtype=torch.float64)
    actual = tt_embedding_bag(ids, None, cores, SPEC, per_sample_weights=weights, backend=backend)
    torch.testing.assert_close(actual, (dense[ids] * weights.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weighted_mean_divides_by_the_length_of_the_bag(cores, dense, backend):
    ids, weights = torch.tensor([[3, 5]]), torch.tensor([[0.5, -3.0]], dtype=torch.float64)
    actual = tt_embedding_bag(
        ids, None, cores, SPEC, mode="mean", per_sample_weights=weights, backend=backend
    )
    torch.testing.assert_close(actual[0], (0.5 * dense[3] - 3 * dense[5]) / 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (2, 0, 3)])
def test_rows(cores, dense, backend, shape):
    ids = torch.randint(90, shape)
    torch.testing.assert_close(
        tt_embedding(ids, cores, SPEC, backend=backend), embedding(ids, dense)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_stand_side_by_side(dtype):
    """2 features of one table and 1 of another; sequences of unlike length."""
    batch = TableBatch(
        ("user", "item"), (90, 50), ((4, 5, 5), (3, 4, 5)), (2, 2, 2), (3, 4),
        ("i", "u", "last_i"), (1, 0, 1),
    )  # fmt: skip
    cores = [torch.randn(shape, dtype=dtype) for shape in batch.core_shapes]
    slices = zip(cores, batch.core_offsets, zip(*batch.row_factors, strict=True), strict=True)
    parts = [[c.narrow(0, o[t], p[t]) for t in (0, 1)] for c, o, p in slices]
    user, item = (
        to_dense([part[t] for part in parts],
                 TTSpec(batch.num_embeddings[t], batch.row_factors[t], (2, 2, 2), (3, 4)))
        for t in (0, 1)
    )  # fmt: skip
    ids = torch.tensor([49, 0, 89, 7, 7, 1])
    pooled = batched_tt_embedding_bag(ids, torch.tensor([0, 1, 2, 3, 5, 6, 6]), cores, batch)
    first = torch.cat([item[49], user[89], item[1]])
    second = torch.cat([item[0], user[7] + user[7], torch.zeros(8, dtype=dtype)])
    torch.testing.assert_close(pooled, torch.stack([first, second]))
    rows = batched_tt_embedding(ids, torch.tensor([0, 2, 5, 6]), cores, batch)
    expected = torch.stack([item[49], item[0], user[89], user[7], user[7], item[1]])
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
def test_every_mix_of_integer_types(cores, dense, backend, index_dtype, offset_dtype):
    ids, offsets = torch.tensor([3, 89, 3]), torch.tensor([0, 2])
    actual = tt_embedding_bag(
        ids.to(index_dtype), offsets.to(offset_dtype), cores, SPEC, backend=backend
    )
    torch.testing.assert_close(actual, embedding_bag(ids, dense, offsets, mode="sum"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strided_tensors(cores, dense, backend, dtype):
    """Transposed ids, every second offset, expanded weights and gradient, cores that are views."""
    cores = [
        core.to(dtype).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        for core in cores
    ]
    ids = torch.randint(90, (3, 4)).t()
    weights = torch.tensor([2.0], dtype=dtype).expand(4, 3)
    output = tt_embedding_bag(ids, None, cores, SPEC, per_sample_weights=weights, backend=backend)
    torch.testing.assert_close(output, 2 * dense.to(dtype)[ids].sum(1))
    grads = torch.autograd.grad(output.sum(), cores)  # the gradient of a sum is expanded
    contiguous = [core.detach().contiguous().requires_grad_() for core in cores]
    output = 2 * tt_embedding_bag(ids.contiguous(), None, contiguous, SPEC, backend="reference")
    for grad, expected in zip(grads, torch.autograd.grad(output.sum(), contiguous), strict=True):
        torch.testing.assert_close(grad, expected)
    flat, offsets = torch.arange(12), torch.tensor([0, 99, 5, 99])[::2]
    actual = tt_embedding_bag(flat[::2], offsets, cores, SPEC, backend=backend)
    expected = embedding_bag(flat[::2], dense.to(dtype), torch.tensor([0, 5]), mode="sum")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_float_type(cores, weight_dtype):
    """Zero, negative and half precision weights; their gradient has their type."""
    weights = torch.tensor([0.0, -1.5, 2.0], dtype=weight_dtype).requires_grad_()
    floats = [core.float() for core in cores]
    ids, offsets = torch.tensor([3, 5, 3]), torch.tensor([0])
    output = tt_embedding_bag(ids, offsets, floats, SPEC, per_sample_weights=weights)
    rows = tt_embedding(ids, floats, SPEC)
    torch.testing.assert_close(output[0], -1.5 * rows[1] + 2 * rows[2])
    output.sum().backward()
    torch.testing.assert_close(weights.grad, rows.sum(1).to(weight_dtype))


@pytest.mark.parametrize("engine", ["auto", "torch", "reference"])
@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_autocast_does_not_reach_the_products(engine, num_cores, monkeypatch):
    """Autocast would run the matrix products of fp32 cores, and only those, in bf16."""
    if engine == "torch":
        monkeypatch.setattr(backends, "numba_error", lambda: "hidden")
    spec = TTSpec.suggest(90, 16, rank=4, num_cores=num_cores)
    ids, offsets = torch.randint(90, (40,)), torch.arange(0, 40, 4)

    def run(autocast: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
        backend = "auto" if engine == "torch" else engine
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = tt_embedding_bag(ids, offsets, cores, spec, backend=backend)
        # PyTorch advises against a backward pass within autocast, yet it happens. Of 4 cores, and
        # in the reference, autograd itself runs products, which are then in bf16 as any other.
        own_backward = num_cores < 4 and engine != "reference"
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and own_backward):
            output.square().sum().backward()
        return [output, *(core.grad for core in cores)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert found.dtype is torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds_check", ["warning", "ignore"])
def test_ids_out_of_range_read_row_zero(cores, dense, backend, bounds_check, recwarn):
    """Never the padding row 95, nor whatever lies behind the table."""
    ids = torch.tensor([95, 3, -1, 10**9])
    rows = tt_embedding(ids, cores, SPEC, backend=backend, bounds_check=bounds_check)
    torch.testing.assert_close(rows, dense[[0, 3, 0, 0]])
    assert len(recwarn) == (bounds_check == "warning")


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_row_of_a_table_is_not_the_next_tables(backend):
    """One id too many must never return a row of the neighbour."""
    batch = TableBatch(
        ("first", "second"), (8, 8), ((2, 2, 2),) * 2, (1, 1, 1), (1, 1), ("f", "s"), (0, 1)
    )
    cores = [torch.tensor([1.0, 1, 7, 7]).view(4, 1, 1, 1) for _ in range(3)]
    offsets = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="feature 'f': id 8 .* table 'first' with num_embed.*=8"):
        batched_tt_embedding_bag(torch.tensor([8]), offsets, cores, batch, backend=backend)
    output = batched_tt_embedding_bag(
        torch.tensor([8]), offsets, cores, batch, backend=backend, bounds_check="ignore"
    )
    assert output.tolist() == [[1, 0]]


def test_a_repeated_id_trains_as_in_a_dense_table(cores, materialise):
    """64 times the same id, 5 steps: the optimizer sees one gradient, the sum."""
    ids, offsets = torch.cat([torch.full((64,), 7), torch.arange(10)]), torch.tensor([0, 60])
    for optimizer_type in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam):
        trained = []
        for lookup in (
            lambda c: tt_embedding_bag(ids, offsets, c, SPEC, backend="cpu"),
            lambda c: embedding_bag(ids, materialise(c, BATCH, 0), offsets, mode="sum"),
        ):
            own = [core.clone().requires_grad_() for core in cores]
            optimizer = optimizer_type(own, lr=1e-3)
            for _ in range(5):
                optimizer.zero_grad()
                lookup(own).square().sum().mul(1e-3).backward()
                optimizer.step()
            trained.append(own)
        for ours, theirs, start in zip(*trained, cores, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
            assert not torch.equal(ours, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ids_change_nothing(cores, dtype):
    """A batch of empty bags leaves the cores as they are, bit for bit, under any optimizer."""
    ids, offsets = torch.empty(0).long(), torch.zeros(128).long()
    for optimizer_type in (torch.optim.SGD, torch.optim.Adagrad):
        own = [core.to(dtype).requires_grad_() for core in (c.clone() for c in cores)]
        before = [core.detach().clone() for core in own]
        optimizer = optimizer_type(own, lr=0.1)
        output = tt_embedding_bag(ids, offsets, own, SPEC)
        assert output.shape == (128, 12) and not output.any()
        output.sum().backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))


@pytest.mark.parametrize("col_factors", [(8, 8, 16), (8, 12, 16), (8, 16, 16), (16, 16, 16)])
def test_wide_rows_are_whole(col_factors):
    """D from 1024 to 4096: the tail is as right as the head."""
    spec = TTSpec(60, (3, 4, 5), col_factors, (4, 4))
    cores = [torch.rand(shape) + 0.5 for shape in spec.core_shapes]
    rows = tt_embedding(torch.arange(60), cores, spec)
    torch.testing.assert_close(rows, to_dense(cores, spec))
    assert (rows > 0).all()


# Errors


IDS, OFFSETS = torch.tensor([3, 5]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "max"}, ValueError, r"mode must be one of \('sum', 'mean'\), got 'max'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda', but available are .*'cpu', 'reference'"),
        ({"per_sample_weights": torch.ones(3)}, ValueError, r"shape \(3,\), indices \(2,\)"),
        ({"per_sample_weights": torch.tensor([1, 2])}, TypeError, "floating point, got torch.int"),
        ({"indices": IDS.float()}, TypeError, "indices must be int32 or int64"),
        ({"offsets": OFFSETS.float()}, TypeError, "offsets must be int32 or int64"),
        ({"offsets": None}, ValueError, "1-D indices need offsets"),
        ({"indices": IDS.view(1, 2)}, ValueError, "offsets must be None for 2-D indices"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "offsets decrease from 3 to 2"),
    ],
)
def test_what_does_not_fit_is_named(cores, options, error, message):
    arguments = {"indices": IDS, "offsets": OFFSETS, "cores": cores, "spec": SPEC} | options
    with pytest.raises(error, match=message):
        tt_embedding_bag(**arguments)


def test_triton_is_refused_on_the_cpu(cores, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend='triton'.*available are .*'cpu'.*'triton'"):
        tt_embedding_bag(IDS, OFFSETS, cores, SPEC, backend="triton")


def test_cores_that_do_not_fit(cores):
    with pytest.raises(ValueError, match="have 3 cores each, got 2"):
        tt_embedding_bag(IDS, OFFSETS, cores[:2], SPEC)
    with pytest.raises(ValueError, match=r"core 1 must have shape \(5, 4, 3, 3\), got \(5, 36\)"):
        tt_embedding_bag(IDS, OFFSETS, [cores[0], cores[1].flatten(1), cores[2]], SPEC)
    with pytest.raises(TypeError, match="cores must share one dtype"):
        tt_embedding_bag(IDS, OFFSETS, [cores[0], cores[1].float(), cores[2]], SPEC)
    with pytest.raises(TypeError, match="cores must share one dtype of .*torch.int64"):
        tt_embedding_bag(IDS, OFFSETS, [core.long() for core in cores], SPEC)
    with pytest.raises(ValueError, match="core 2 is on meta, the indices are on cpu"):
        tt_embedding_bag(IDS, OFFSETS, [*cores[:2], cores[2].to("meta")], SPEC)


def test_sequences_need_an_offset_per_feature(cores):
    with pytest.raises(ValueError, match="feature_offsets must have 2 entries for 1 features"):
        batched_tt_embedding(IDS, torch.tensor([0, 1, 2]), cores, BATCH)
