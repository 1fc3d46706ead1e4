"""Types of cores, outputs and messages on several ranks: as asked for, or refused when sharding."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from ecorec_torchrec.testing import RankPool, toy

OUTPUT_TYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
}
DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)
# A rank with TT tables of its own and one without, replicas, and a dense table.
CASES = {
    "table-wise": ("t_tw", "t_tw2"),
    "data-parallel": ("t_dp", "t_dp2"),
    "both": ("t_tw", "t_dp"),
    "beside dense": ("d_tw", "t_tw"),
}


def matrix(rank: int, names: tuple[str, ...], kind: str) -> dict[tuple, tuple]:
    """Outputs and gradients of the cores' first use, for every pair of types."""
    found = {}
    for data_type in DATA_TYPES:
        tables = toy.configs(names, tt_data_type=data_type)
        for output_type in OUTPUT_TYPES:
            if kind == "beside dense" and output_type is SparseType.BF16:
                continue
            torch.manual_seed(0)
            model = toy.shard(
                toy.ToyModel(toy.collection(tables, device="meta"), tables),
                toy.generators(names, 2),
                toy.SGD | {"output_dtype": output_type},
            )
            before = toy.whole_state(model)
            batch = toy.make_batch(names, 0, rank)
            pooled = model.module.ebc(batch.features).values()
            pooled.float().square().sum().backward()
            after = toy.whole_state(model)
            replicas = {
                name: core.grad
                for name, core in model.named_parameters()
                if ".t_dp" in name and core.grad is not None
            }
            found[data_type, output_type] = pooled.detach(), before, after, replicas
    return found


def exact(
    state: dict[str, Tensor], names: tuple[str, ...]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Pooled rows of both ranks in float64 from stored values, and the gradients of the parameters
    for the mean over the ranks of the summed squares."""
    tables = toy.configs(names)
    truth = toy.ToyModel(toy.collection(tables), tables).double()
    truth.load_state_dict({name: value.double() for name, value in state.items()})
    outputs = [_pool(truth.ebc, toy.make_batch(names, 0, rank)) for rank in range(2)]
    (sum(output.square().sum() for output in outputs) / 2).backward()
    gradients = {name: p.grad for name, p in truth.named_parameters() if p.grad is not None}
    return [output.detach() for output in outputs], gradients


def _pool(ebc: torch.nn.Module, batch: toy.ToyBatch) -> Tensor:
    """The collection's rows without its cast to float32."""
    columns = []
    jagged = batch.features.to_dict()
    for config in ebc.embedding_bag_configs():
        table = ebc.embedding_bags[config.name]
        if config.name in toy.SPECS:
            rows = torch.ones(1, 1, 1, dtype=torch.float64)
            for core in table.tt_cores:
                rows = torch.einsum("pqr,arbt->paqbt", rows, core).flatten(2, 3).flatten(0, 1)
            weight = rows.flatten(1)
        else:
            weight = table.weight
        for name in config.feature_names:
            columns.append(
                torch.nn.functional.embedding_bag(
                    jagged[name].values(),
                    weight,
                    jagged[name].offsets(),
                    mode="sum",
                    include_last_offset=True,
                )
            )
    return torch.cat(columns, 1)


@pytest.mark.parametrize("kind", CASES)
def test_every_pair_of_core_and_output_type(ranks: RankPool, kind: str) -> None:
    """A 16-bit table whose rows come back in 32 bit, or ranks that expect other sizes than are
    sent, are what users meet where types are not kept apart."""
    names = CASES[kind]
    by_rank = ranks.run(matrix, names, kind)
    for (data_type, output_type), (_, before, after, _) in by_rank[0].items():
        outputs, gradients = exact(before, names)
        stored, dtype = data_type_to_dtype(data_type), OUTPUT_TYPES[output_type]
        rounding = max(torch.finfo(dtype).eps, 1e-6)
        for rank, expected in enumerate(outputs):
            pooled, _, _, replicas = by_rank[rank][data_type, output_type]
            assert pooled.dtype is dtype, (data_type, output_type)
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                pooled.double(), expected, rtol=rounding, atol=rounding * largest
            )
            for name, grad in replicas.items():
                assert grad.dtype is stored
                _assert_near(grad, gradients[name], 4 * max(torch.finfo(stored).eps, rounding))
        for name in gradients:
            if ".t_tw" in name:  # stepped in backward: after = before - lr * gradient
                assert after[name].dtype is stored
                step = before[name].double() - toy.SGD["learning_rate"] * gradients[name]
                _assert_near(after[name], step, 4 * max(torch.finfo(stored).eps, rounding))
                assert not torch.equal(after[name], before[name])


def _assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * largest)


def sequences(rank: int) -> list[torch.dtype]:
    found = []
    names = ("t_tw", "t_tw2")
    for output_type in OUTPUT_TYPES:
        model = toy.shard(
            toy.sequence_model(names, "meta"),
            toy.generators(names, 2),
            toy.SGD | {"output_dtype": output_type},
        )
        rows = model.module.ec(toy.make_batch(names, 0, rank).features)
        total = sum(feature.values().float().square().sum() for feature in rows.values())
        total.backward()
        found.append({feature.values().dtype for feature in rows.values()})
    return found


def test_sequences_have_the_type_that_was_asked_for(ranks: RankPool) -> None:
    """Also on the rank that has no table, which learns of the type from the plan only."""
    for found in ranks.run(sequences):
        assert found == [{dtype} for dtype in OUTPUT_TYPES.values()]


def refused(rank: int) -> None:
    names = ("d_tw", "t_tw")
    tables = toy.configs(names)

    def shard(**options: object) -> None:
        fused_params = toy.SGD | {"output_dtype": options.pop("output_dtype", SparseType.FP32)}
        model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
        toy.shard(model, toy.generators(names, 2), fused_params, **options)

    for output_type in (SparseType.INT8, SparseType.FP8):
        with pytest.raises(
            ValueError, match=rf"'t_tw': output_dtype=.*{output_type.name}.*FP32, .*FP16, .*BF16"
        ):
            shard(output_dtype=output_type)
    with pytest.raises(ValueError, match=r"dense tables \['d_tw'\]: .*BF16 .*gives FP32 and FP16"):
        shard(output_dtype=SparseType.BF16)
    message = (
        r"\['d_tw', 't_tw'\]: forward communication of torch.float32 on cpu cannot be quantised by "
        "FP8 .* what works is FP32, FP16, BF16, INT8"
    )
    with pytest.raises(ValueError, match=message):
        shard(qcomm_codecs_registry=registry(CommType.FP8, CommType.FP16))
    with pytest.raises(ValueError, match=r"backward communication .* by FP8"):
        shard(qcomm_codecs_registry=registry(CommType.FP16, CommType.FP8))


def registry(forward: CommType, backward: CommType, device: str = "cpu") -> dict:
    """For "cuda", TorchRec keeps BF16, which it replaces by FP16 for "cpu"."""
    return get_qcomm_codecs_registry(QCommsConfig(forward, backward), device=torch.device(device))


def test_pairs_that_cannot_work_are_refused_when_sharding(ranks: RankPool) -> None:
    """On every rank, with those that can; not by the first batch, on the owner only."""
    ranks.run(refused)


# Largest error of outputs of about 1, and of steps of about 0.05.
QUANTISED = {
    (CommType.FP16, CommType.FP16, "cpu"): 1e-3,
    (CommType.BF16, CommType.BF16, "cuda"): 1e-2,
    (CommType.INT8, CommType.INT8, "cpu"): 2e-2,
    (CommType.INT8, CommType.FP32, "cpu"): 2e-2,
    (CommType.FP32, CommType.FP16, "cpu"): 1e-3,
}


def quantised(rank: int) -> dict[object, tuple[Tensor, dict[str, Tensor]]]:
    names = ("t_tw", "t_q", "d_tw")
    tables = toy.configs(names)
    found = {}
    for codecs in (None, *QUANTISED):
        torch.manual_seed(0)
        model = toy.shard(
            toy.ToyModel(toy.collection(tables, device="meta"), tables),
            toy.generators(names, 2),
            qcomm_codecs_registry=None if codecs is None else registry(*codecs),
        )
        optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
        batches = [toy.make_batch(names, step, rank) for step in range(3)]
        toy.train_sharded(model, optimizer, batches)
        pooled = model.module.ebc(batches[0].features).values().detach()
        found[codecs] = pooled, toy.whole_state(model)
    return found


def test_quantised_communication_is_close_to_the_exact_one(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(quantised)):
        exact_pooled, exact_state = found.pop(None)
        for codecs, (pooled, state) in found.items():
            assert pooled.dtype is torch.float32
            error = (pooled - exact_pooled).abs().max()
            assert 0 < error < QUANTISED[codecs], (codecs, float(error))
            for name, value in exact_state.items() if rank == 0 else ():
                difference = (state[name] - value).abs().max()
                assert difference < 0.1 * QUANTISED[codecs], (codecs, name, float(difference))


def autocast(rank: int) -> None:
    names = ("t_tw", "t_dp")
    model = toy.shard(toy.model_of_both(names, "meta"), toy.generators(names, 2))
    batch = toy.make_batch(names, 0, rank)
    exact = model.module.ebc(batch.features).values()
    with torch.autocast("cpu", torch.bfloat16):
        pooled = model.module.ebc(batch.features).values()
        rows = model.module.ec(batch.features)["f_t_tw"].values()
        loss, logits = model(batch)
    assert torch.equal(pooled, exact) and rows.dtype is torch.float32
    assert logits.dtype is torch.bfloat16
    before = toy.whole_state(model)
    loss.sum().backward()
    after = toy.whole_state(model)
    assert all(
        after[name].isfinite().all() and not torch.equal(after[name], before[name])
        for name in after
        if ".t_tw." in name and after[name].numel()
    )


def test_autocast_leaves_sharded_tables_alone(ranks: RankPool) -> None:
    ranks.run(autocast)
