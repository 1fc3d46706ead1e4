"""What cannot work is refused by name: at shard time, or before a collective is started."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.plan import (
    TT_COMPUTE_KERNEL,
    TTParameterSharding,
    tt_data_parallel,
    tt_table_wise,
)
from ecorec_torchrec.sharding import (
    ShardedTTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
)
from ecorec_torchrec.testing import RankPool, toy
from ecorec_torchrec.tt import TTSpec

SPEC = toy.SPECS["t_tw"]
META = torch.device("meta")


def ours() -> TTEmbeddingBagCollection:
    return toy.collection(toy.configs(("t_tw",)), device="meta")


def stock() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=toy.configs(("t_tw",)), device=META)


def sharded(
    module: EmbeddingBagCollection,
    generator: Callable[..., ParameterSharding],
    fused_params: dict[str, Any] | None = toy.SGD,
) -> ShardedTTEmbeddingBagCollection:
    sharder = TTEmbeddingBagCollectionSharder(fused_params)
    plan = construct_module_sharding_plan(
        module, {"t_tw": generator}, sharder=sharder, device_type="cpu", local_size=2, world_size=2
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan, env, torch.device("cpu"))


def frozen(cores: slice) -> TTEmbeddingBagCollection:
    module = ours()
    for core in list(module.embedding_bags["t_tw"].tt_cores)[cores]:
        core.requires_grad_(False)
    return module


def row_wise_tt(*arguments: Any) -> ParameterSharding:
    return row_wise(compute_kernel=TT_COMPUTE_KERNEL)(*arguments)


def column_wise_tt(*arguments: Any) -> ParameterSharding:
    return column_wise(ranks=[0, 1], compute_kernel=TT_COMPUTE_KERNEL)(*arguments)


def cut(sharding_type: str) -> Callable[[], Any]:
    """A plan entry as a plan written in JSON, or by another planner, may have it."""

    def attempt() -> None:
        entry = TTParameterSharding(sharding_type, TT_COMPUTE_KERNEL, ranks=[0, 1], tt=SPEC)
        sharded(stock(), lambda *_: entry)

    return attempt


def two_dimensional() -> None:
    sharder = TTEmbeddingBagCollectionSharder(toy.SGD)
    plan = construct_module_sharding_plan(
        ours(), {"t_tw": tt_table_wise(0)}, sharder=sharder, device_type="cpu"
    )
    env = ShardingEnv2D.__new__(ShardingEnv2D)  # needs at least two groups of ranks to be made
    sharder.shard(ours(), plan, env, torch.device("cpu"))


def table_wise_without_a_shard(*_: Any) -> ParameterSharding:
    return TTParameterSharding("table_wise", TT_COMPUTE_KERNEL, ranks=[5], tt=SPEC)


def dense_with_a_shape(*_: Any) -> ParameterSharding:
    return TTParameterSharding("data_parallel", "dense", ranks=[0, 1], tt=SPEC)


def changed(generator: Callable[..., ParameterSharding], **fields: Any) -> Callable[..., Any]:
    """The entries of `generator` with some fields overwritten."""

    def generate(*arguments: Any) -> ParameterSharding:
        return dataclasses.replace(generator(*arguments), **fields)

    return generate


def two_output_types() -> None:
    module = toy.collection(toy.configs(("t_tw", "d_tw")), device="meta")
    half = changed(tt_table_wise(1), output_dtype=DataType.FP16)
    sharder = TTEmbeddingBagCollectionSharder(toy.SGD)
    plan = construct_module_sharding_plan(
        module,
        {"t_tw": half, "d_tw": table_wise(0, compute_kernel="fused")},
        sharder=sharder,
        device_type="cpu",
    )
    sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))


OTHER = TTSpec(58, (3, 4, 5), (2, 2, 4), (3, 5))
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "row-wise": (lambda: sharded(ours(), row_wise_tt), "'t_tw' cannot be sharded row_wise"),
    "column-wise": (
        lambda: sharded(ours(), column_wise_tt),
        "'t_tw' cannot be sharded column_wise",
    ),
    **{
        name: (cut(name), f"'t_tw' cannot be sharded {name}: a TT table is table_wise or data_pa")
        for name in ("table_row_wise", "table_column_wise", "grid_shard")
    },
    "fused kernel": (
        lambda: sharded(ours(), table_wise(0, compute_kernel="fused")),
        "'t_tw' is a TT table, but its plan entry has the compute kernel 'fused'",
    ),
    "dense kernel": (lambda: sharded(ours(), data_parallel()), "compute kernel 'dense'"),
    "no shape": (lambda: sharded(stock(), tt_table_wise(0)), "'t_tw' .* has no TT shape"),
    "another shape": (
        lambda: sharded(stock(), tt_table_wise(0, tt=toy.SPECS["t_q"])),
        "24 rows x 16 columns, the table is of 58 x 16",
    ),
    "two shapes": (
        lambda: sharded(ours(), tt_data_parallel(tt=OTHER)),
        "'t_tw' is given different TT shapes",
    ),
    "owner": (lambda: sharded(ours(), tt_table_wise(2)), "rank=2 is not within 0..1"),
    "placement": (
        lambda: sharded(ours(), table_wise_without_a_shard),
        r"'t_tw' is table-wise with ranks=\[5\] and sharding_spec=None",
    ),
    "ranks that are not the shards'": (
        lambda: sharded(ours(), changed(tt_table_wise(1), ranks=[0])),
        r"'t_tw' is table-wise with ranks=\[0\] and .*rank:1/cpu.* one shard on one of 2 ranks",
    ),
    "two owners": (
        lambda: sharded(ours(), changed(tt_table_wise(1), ranks=[1, 0])),
        r"ranks=\[1, 0\] .* one shard on one of 2 ranks",
    ),
    "replicas of another world": (
        lambda: sharded(ours(), changed(tt_data_parallel(), ranks=[0, 1, 2, 3])),
        r"data-parallel on ranks=\[0, 1, 2, 3\], but there are 2 ranks",
    ),
    "two output types": (two_output_types, "'t_tw': torch.float16, 'd_tw': torch.float32"),
    "dense kernel with a shape": (
        lambda: sharded(stock(), dense_with_a_shape),
        "'t_tw' is a TT table, but its plan entry has the compute kernel 'dense'",
    ),
    "optimizer": (
        lambda: sharded(ours(), tt_table_wise(0), {"optimizer": EmbOptimType.LAMB}),
        "'t_tw': optimizer lamb is not supported",
    ),
    "backend": (
        lambda: sharded(ours(), tt_table_wise(0), toy.SGD | {"backend": "gpu"}),
        "'t_tw': backend='gpu'",
    ),
    "half-frozen table": (
        lambda: sharded(frozen(slice(1, 2)), tt_table_wise(0)),
        "'t_tw': freeze all TT cores of a table, or none",
    ),
    "2D parallelism": (
        two_dimensional,
        r"\['t_tw'\]: 2D parallelism \(DMPCollection\) is not .*use DistributedModelParallel",
    ),
    "resharding": (
        lambda: TTEmbeddingBagCollectionSharder(toy.SGD).reshard(
            sharded(ours(), tt_table_wise(0)),
            {"t_tw": None},
            ShardingEnv.from_process_group(dist.group.WORLD),
        ),
        r"\['t_tw'\]: resharding while training is not supported",
    ),
    "a part of a group": (
        lambda: TTEmbeddingBagCollectionSharder(num_dist_groups=2.5),
        "num_dist_groups must be an integer, got 2.5",
    ),
    "groups": (
        lambda: TTEmbeddingBagCollectionSharder(num_dist_groups=0),
        "num_dist_groups=0 must be at least 1",
    ),
    "too steep a slope": (
        lambda: TTEmbeddingBagCollectionSharder(dist_group_slope=1.5),
        "dist_group_slope=1.5 is not within 0..1",
    ),
}


def refuse(rank: int, name: str) -> None:
    attempt, message = REFUSALS[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        attempt()
    dist.barrier()


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_refused_by_name(ranks: RankPool, name: str) -> None:
    ranks.run(refuse, name)


def good() -> KeyedJaggedTensor:
    lengths = torch.ones(4, dtype=torch.int64)
    return KeyedJaggedTensor(["f_t_tw", "f_t_tw_b"], torch.arange(4), lengths=lengths)


def broken(kind: str) -> KeyedJaggedTensor:
    keys = ["f_t_tw", "f_t_tw_b"]
    if kind == "lengths":
        return KeyedJaggedTensor(keys, torch.arange(4), lengths=torch.tensor([1, 1, 1, 2]))
    if kind == "stride":
        return KeyedJaggedTensor(keys, torch.arange(5), lengths=torch.ones(5).long(), stride=2)
    if kind == "twice":
        return KeyedJaggedTensor([*keys, keys[0]], torch.arange(6), lengths=torch.ones(6).long())
    if kind == "contradiction":
        offsets = torch.tensor([0, 1, 2, 3, 4])
        return KeyedJaggedTensor(
            keys, torch.arange(4), lengths=torch.tensor([2, 0, 1, 1]), offsets=offsets
        )
    if kind == "missing":
        return KeyedJaggedTensor(["f_t_tw"], torch.arange(1), lengths=torch.tensor([1]))
    if kind == "order":
        return KeyedJaggedTensor(keys[::-1], torch.arange(4), lengths=torch.ones(4).long())
    if "variable batch" in kind:
        strides = [[2], [2]] if "equal" in kind else [[1], [2]]
        num_ids = sum(stride for (stride,) in strides)
        return KeyedJaggedTensor(
            keys,
            torch.arange(num_ids),
            lengths=torch.ones(num_ids + ("malformed" in kind)).long(),
            stride_per_key_per_rank=strides,
            inverse_indices=(keys, torch.zeros(2, 2, dtype=torch.int64)),
        )
    return KeyedJaggedTensor(keys, torch.tensor([1, 2, 58, 3]), lengths=torch.ones(4).long())


BROKEN_INPUT = {
    "twice": r"features \['f_t_tw'\] occur more than once",
    "contradiction": r"do not belong to lengths \[2, 0, 1, 1\]",
    "lengths": "lengths sum to 5 .* there are 4 values: they end within feature 'f_t_tw_b'",
    "stride": "5 lengths do not fit 2 features",
    "missing": r"features \['f_t_tw_b'\] are missing",
    "order": r"in the order of the first batch, \['f_t_tw', 'f_t_tw_b'\]",
    "variable batch": r"\['t_tw'\]: variable batch sizes per feature are not supported",
    "variable batch, equal here": r"\['t_tw'\]: variable batch sizes per feature are not",
    "variable batch, malformed": r"4 lengths do not fit .*{'f_t_tw': 1, 'f_t_tw_b': 2}.* need 3",
    "range": "table 't_tw', feature 'f_t_tw_b': id 58 is outside 0..57",
}


def feed(rank: int, kind: str) -> None:
    module = sharded(ours(), tt_table_wise(1))
    expected = module(good()).values().detach()
    with pytest.raises((ValueError, NotImplementedError), match=BROKEN_INPUT[kind]):
        module(broken(kind))
    # No rank is left waiting in a collective: the next batch works.
    assert torch.equal(module(good()).values(), expected)


@pytest.mark.parametrize("kind", BROKEN_INPUT)
def test_broken_input_is_refused_before_any_collective(ranks: RankPool, kind: str) -> None:
    """The message names the feature and both numbers, not a shape deep inside TorchRec."""
    ranks.run(feed, kind)


def uneven_variable_batches(rank: int) -> None:
    """On rank 1 all features happen to have one batch size."""
    module = sharded(ours(), tt_table_wise(1))
    kind = "variable batch, equal here" if rank == 1 else "variable batch"
    with pytest.raises(NotImplementedError, match="variable batch sizes per feature"):
        module(broken(kind))
    module(good())


def test_variable_batches_are_refused_alike_where_they_happen_to_be_equal(ranks: RankPool) -> None:
    """TorchRec's own code takes another path on such a rank, and the ranks wait for each other."""
    ranks.run(uneven_variable_batches)


def bad_id_on_one_rank(rank: int, feature: str, limit: int, mode: BoundsCheckMode | None) -> None:
    names = ("t_tw", "d_rw", "d_tw")
    model = toy.shard(
        toy.model_of_both(names, "meta"),
        toy.generators(names, 2),
        toy.SGD | ({} if mode is None else {"bounds_check_mode": mode}),
    )
    features = toy.make_batch(names, 0, rank).features
    ids = {name: jagged.values().clone() for name, jagged in features.to_dict().items()}
    ids[feature][-1] = limit
    bad = KeyedJaggedTensor(features.keys(), torch.cat([*ids.values()]), lengths=features.lengths())
    for collection in (model.module.ebc, model.module.ec):
        batch = features
        if rank == 1 and mode is None:
            with pytest.raises(ValueError, match=f"feature '{feature}': id {limit} is outside 0"):
                collection(bad)
        elif rank == 1:
            batch = bad
        # Rank 0 is in an exchange already: this rank's next batch is what it waits for.
        collection(batch).wait()


@pytest.mark.parametrize(("feature", "limit"), [("f_d_rw", 50), ("f_d_tw", 40), ("f_t_tw", 58)])
def test_a_bad_id_is_found_on_the_rank_that_has_it(
    ranks: RankPool, feature: str, limit: int
) -> None:
    """Else it fails on the table's owner, in whose batch it is not, or within a collective, as an
    exchange of sizes that do not match."""
    ranks.run(bad_id_on_one_rank, feature, limit, None)


def test_bad_ids_of_other_ranks_can_be_ignored_too(ranks: RankPool) -> None:
    ranks.run(bad_id_on_one_rank, "f_t_tw", 58, BoundsCheckMode.IGNORE)


def out_of_range(rank: int, mode: BoundsCheckMode | None) -> str:
    """Id 58 is the first padding row of a table of 58 rows with 60 addressable ones."""
    fused_params = toy.SGD | ({} if mode is None else {"bounds_check_mode": mode})
    module = sharded(ours(), tt_data_parallel(), fused_params)
    try:
        pooled = module(broken("range")).values()
    except ValueError as error:
        return str(error)
    row_0 = module(
        KeyedJaggedTensor(
            ["f_t_tw", "f_t_tw_b"], torch.zeros(4).long(), lengths=torch.ones(4).long()
        )
    ).values()
    assert torch.equal(pooled[0, 16:], row_0[0, 16:])
    return ""


@pytest.mark.parametrize("mode", [None, BoundsCheckMode.FATAL])
def test_ids_out_of_range_are_named(ranks: RankPool, mode: BoundsCheckMode | None) -> None:
    for message in ranks.run(out_of_range, mode):
        assert "t_tw" in message and "f_t_tw_b" in message and "58" in message


def test_ids_out_of_range_can_be_ignored(ranks: RankPool) -> None:
    assert ranks.run(out_of_range, BoundsCheckMode.IGNORE) == ["", ""]


def empty_batches(rank: int) -> None:
    names = ("t_tw", "t_dp", "d_tw", "d_rw")
    adagrad = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    for fused_params in (toy.SGD, adagrad):
        tables = toy.configs(names)
        model = toy.shard(
            toy.ToyModel(toy.collection(tables, device="meta"), tables),
            toy.generators(names, 2),
            fused_params,
        )
        optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.1))
        keys = [f for name in names for f in toy.FEATURES[name]]
        before = toy.whole_state(model)
        for batch_size in (7, 0):
            lengths = torch.zeros(len(keys) * batch_size, dtype=torch.int64)
            features = KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=lengths)
            pooled = model.module.ebc(features)
            assert pooled.values().shape == (batch_size, 16 * len(keys))
            assert (pooled.values() == 0).all()
            toy.train_sharded(model, optimizer, [toy.ToyBatch(features, torch.ones(batch_size))])
        after = toy.whole_state(model)
        for key in after:
            if "embedding_bags" in key:
                assert torch.equal(after[key], before[key])


def test_batches_without_ids_or_without_examples(ranks: RankPool) -> None:
    """All bags empty, or no bag at all: zeros come out and no core moves."""
    ranks.run(empty_batches)


def unasked_weights(rank: int) -> None:
    names = ("t_tw", "d_tw", "d_dp")
    torch.manual_seed(0)
    tables = toy.configs(names)
    model = toy.shard(
        toy.ToyModel(toy.collection(tables, device="meta"), tables), toy.generators(names, 2)
    )
    features = toy.make_batch(names, 0, rank).features
    expected = model.module.ebc(features).values()
    if rank == 0:  # of the others none has weights
        weighted = toy.make_batch(names, 0, rank, is_weighted=True).features
        assert torch.equal(weighted.values(), features.values())
        features = weighted
    assert torch.equal(model.module.ebc(features).values(), expected)


def test_weights_that_another_collection_needs_do_not_count(ranks: RankPool) -> None:
    """FBGEMM would weigh the rows of dense tables, beside TT tables that are not weighted."""
    ranks.run(unasked_weights)


def one_id(rank: int, optimizer: EmbOptimType, data_type_of_ids: torch.dtype) -> dict:
    model = sharded(
        toy.collection(toy.configs(("t_tw",)), device="meta"),
        tt_table_wise(1),
        {"optimizer": optimizer, "learning_rate": 0.01},
    )
    torch.manual_seed(0)
    before = toy.whole_state(model)
    for _ in range(5):
        ids = torch.full((64,), 7, dtype=data_type_of_ids)
        lengths = torch.tensor([30, 34], dtype=data_type_of_ids)
        pooled = model(KeyedJaggedTensor(["f_t_tw", "f_t_tw_b"], ids, lengths=lengths))
        (1e-3 * pooled.values() ** 2).sum().backward()
    return {"before": before, "after": toy.whole_state(model)}


def dense_with_adam(rank: int, sequence: bool) -> None:
    names = ("t_tw", "d_tw")
    model = toy.sequence_model(names, "meta")
    if not sequence:
        tables = toy.configs(names)
        model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
    plan = toy.generators(names, 2)
    with pytest.raises(
        ValueError, match="dense table 'd_tw': FBGEMM has no optimizer .* on the CPU"
    ):
        toy.shard(model, plan, {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01})


@pytest.mark.parametrize("sequence", [False, True])
def test_optimizer_that_dense_tables_lack_on_the_cpu(ranks: RankPool, sequence: bool) -> None:
    """FBGEMM stops at a bare assertion, while TT tables beside know Adam."""
    ranks.run(dense_with_adam, sequence)


@pytest.mark.parametrize(
    ("optimizer", "make_optimizer"),
    [
        (EmbOptimType.EXACT_SGD, lambda params: torch.optim.SGD(params, lr=0.01)),
        (EmbOptimType.EXACT_ADAGRAD, lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-8)),
        (EmbOptimType.ADAM, lambda params: torch.optim.Adam(params, lr=0.01)),
    ],
)
def test_one_id_many_times_is_one_summed_gradient(
    ranks: RankPool, optimizer: EmbOptimType, make_optimizer: Callable
) -> None:
    found = ranks.run(one_id, optimizer, torch.int32)[0]
    names = [f"embedding_bags.t_tw.tt_cores.{k}" for k in range(3)]
    cores = [torch.nn.Parameter(found["before"][name].double()) for name in names]
    truth = make_optimizer(cores)
    for _ in range(5):
        truth.zero_grad()
        # Row 7 of a 3 x 4 x 5 table is (0, 1, 2).
        row = torch.einsum("iaj,jbk,kcl->abc", cores[0][0], cores[1][1], cores[2][2]).flatten()
        (1e-3 * ((30 * row) ** 2 + (34 * row) ** 2)).sum().backward()
        truth.step()
    for name, core in zip(names, cores, strict=True):
        torch.testing.assert_close(found["after"][name].double(), core.detach(), rtol=0, atol=1e-5)
