"""The operators under PyTorch's own checks, its compiler and exporter, and what backward keeps."""

import pytest
import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding, batched_tt_embedding_bag

IDS, OFFSETS = torch.tensor([5, 3, 5, 89, 3, 49]), torch.tensor([0, 1, 4, 4, 6])
DTYPES = {"numba": torch.float32, "torch": torch.float64}


def make_batch(num_cores: int) -> TableBatch:
    factors = {
        2: (((10, 9), (10, 6)), (4, 2), (3,)),
        3: (((4, 5, 5), (3, 4, 5)), (2, 2, 2), (3, 4)),
        4: (((2, 2, 5, 5), (3, 2, 2, 5)), (2, 1, 2, 2), (3, 2, 4)),
    }[num_cores]
    return TableBatch(("user", "item"), (90, 50), *factors, ("u", "i"), (0, 1))


@pytest.fixture(params=[2, 3, 4], ids="{} cores".format)
def batch(request) -> TableBatch:
    return make_batch(request.param)


def cores_of(batch: TableBatch, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in batch.core_shapes]


@pytest.mark.parametrize("engine", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(engine, weighted):
    batch, dtype = make_batch(3), DTYPES[engine]
    plan, cores = list(index_plan(IDS, OFFSETS, batch)), cores_of(batch, dtype)
    weights = torch.rand(6, dtype=dtype).requires_grad_() if weighted else None
    args = (plan, cores, weights, 2, True, dtype, None, engine)
    torch.library.opcheck(torch.ops.ecorec.tt_lookup, args)
    detached = [core.detach() for core in cores], None if weights is None else weights.detach()
    args = (torch.randn(2, 16, dtype=dtype), plan, *detached, 2, True, True, weighted, None, engine)
    torch.library.opcheck(torch.ops.ecorec.tt_lookup_backward, args)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradcheck(batch, mode):
    weights = torch.rand(6, dtype=torch.float64).requires_grad_()

    def lookup(weights, *cores):
        return batched_tt_embedding_bag(
            IDS, OFFSETS, cores, batch, mode=mode, per_sample_weights=weights
        )

    assert torch.autograd.gradcheck(lookup, (weights, *cores_of(batch)), fast_mode=True)


def test_gradcheck_without_pooling(batch):
    def lookup(*cores):
        return batched_tt_embedding(IDS, torch.tensor([0, 4, 6]), cores, batch)

    assert torch.autograd.gradcheck(lookup, cores_of(batch), fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_compiles_as_one_graph(batch, dtype):
    cores, weights = cores_of(batch, dtype), torch.rand(6, dtype=dtype).requires_grad_()

    def lookup(ids, offsets, weights, *cores):
        repeated = weights.repeat_interleave(len(ids) // 6)
        return batched_tt_embedding_bag(ids, offsets, cores, batch, per_sample_weights=repeated)

    torch.compiler.reset()  # other tests compile the same function for other tables
    compiled = torch.compile(lookup, fullgraph=True, backend="aot_eager", dynamic=True)
    for repeats in (1, 2):
        inputs = IDS.repeat_interleave(repeats), OFFSETS * repeats
        results = []
        for function in (lookup, compiled):
            output = function(*inputs, weights, *cores)
            grads = torch.autograd.grad(output.sin().sum(), [*cores, weights])
            results.append([output, *grads])
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)


def test_exports(batch):
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cores = torch.nn.ParameterList(cores_of(batch))

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return batched_tt_embedding_bag(ids, offsets, list(self.cores), batch)

    module, dynamic = Lookup(), torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (IDS, OFFSETS), dynamic_shapes=({0: dynamic}, None))
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 0, 2, 2, 3])
    torch.testing.assert_close(program.module()(ids, offsets), module(ids, offsets))


def test_second_order_gradients_are_refused():
    batch = make_batch(3)
    cores = cores_of(batch)
    output = batched_tt_embedding_bag(IDS, OFFSETS, cores, batch)
    grads = torch.autograd.grad(output.square().sum(), cores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        grads[0].sum().backward()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_buffers_may_be_reused_before_backward(dtype):
    """A pipeline overwrites ids, offsets and weights in place: backward has its own copies."""
    batch = make_batch(3)
    for pooled in (True, False):
        grads = []
        for overwrite in (False, True):
            torch.manual_seed(0)
            ids, offsets, weights = IDS.clone(), OFFSETS.clone(), torch.rand(6, dtype=dtype)
            cores = cores_of(batch, dtype)
            if pooled:
                output = batched_tt_embedding_bag(
                    ids, offsets, cores, batch, per_sample_weights=weights
                )
            else:
                output = batched_tt_embedding(ids, offsets[[0, 2, 4]], cores, batch)
            if overwrite:
                ids.fill_(10**6)
                offsets.fill_(-7)
                weights.fill_(float("nan"))
            grads.append(torch.autograd.grad(output.square().sum(), cores))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_frozen_table_with_trained_weights(dtype):
    batch = make_batch(3)
    cores = [core.detach() for core in cores_of(batch, dtype)]
    weights = torch.rand(6, dtype=dtype).requires_grad_()
    output = batched_tt_embedding_bag(IDS, OFFSETS, cores, batch, per_sample_weights=weights)
    output.sum().backward()
    rows = batched_tt_embedding(IDS, torch.tensor([0, 4, 6]), cores, batch)
    torch.testing.assert_close(weights.grad, rows.sum(1))
    assert all(core.grad is None for core in cores)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_only_the_wanted_gradients_are_computed(dtype, monkeypatch):
    """Frozen weights: no weights gradient; frozen cores: no core gradients."""
    batch, wanted = make_batch(3), []
    backward = torch.ops.ecorec.tt_lookup_backward

    def recording(*args):
        wanted.append(args[6:8])
        return backward(*args)

    monkeypatch.setattr(torch.ops.ecorec, "tt_lookup_backward", recording)
    for train_cores, train_weights in ((True, False), (False, True), (True, True)):
        cores = [core.requires_grad_(train_cores) for core in cores_of(batch, dtype)]
        weights = torch.rand(6, dtype=dtype).requires_grad_(train_weights)
        batched_tt_embedding_bag(
            IDS, OFFSETS, cores, batch, per_sample_weights=weights
        ).sum().backward()
        assert wanted[-1] == (train_cores, train_weights)
        assert all((core.grad is not None) == train_cores for core in cores)


def test_meta_tensors_have_shapes(batch):
    cores = [core.detach().to("meta") for core in cores_of(batch)]
    output = batched_tt_embedding_bag(IDS.to("meta"), OFFSETS.to("meta"), cores, batch)
    assert output.shape == (2, 16) and output.is_meta
