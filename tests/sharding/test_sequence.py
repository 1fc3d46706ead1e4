"""What is special to sharded sequence collections: their output, and TorchRec's rules for them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
)
from torchrec.distributed.types import (
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecorec_torchrec import EcoRecTrainPipeline
from ecorec_torchrec.modules import TTEmbeddingCollection, TTEmbeddingConfig
from ecorec_torchrec.plan import TT_COMPUTE_KERNEL, tt_data_parallel, tt_table_wise
from ecorec_torchrec.sharding import ShardedTTEmbeddingCollection, TTEmbeddingCollectionSharder
from ecorec_torchrec.testing import RankPool, toy

NAMES = ("t_tw", "t_tw2", "t_q", "t_dp", "d_tw", "d_rw", "d_cw")
CPU, META = torch.device("cpu"), torch.device("meta")


def sharded(
    module: EmbeddingCollection,
    owners: dict[str, int] | None = None,
    fused_params: dict[str, Any] | None = toy.SGD,
    **options: Any,
) -> ShardedTTEmbeddingCollection:
    names = [config.name for config in module.embedding_configs()]
    return shard(
        module,
        toy.generators(names, dist.get_world_size(), owners),
        sharder=TTEmbeddingCollectionSharder(fused_params, **options),
        device=CPU,
    )


def ours(names: tuple[str, ...] = NAMES, device: str = "meta") -> TTEmbeddingCollection:
    return toy.sequence_collection(toy.sequence_configs(names), device)


def as_tensors(output: Any) -> dict[str, tuple[Tensor, ...]]:
    return {
        name: (rows.values().detach(), rows.lengths(), rows.weights())
        for name, rows in output.items()
    }


def output(rank: int, num_dist_groups: int) -> dict[str, tuple[Tensor, ...]]:
    """Of a collection with values: `d_cw` is cut in uneven columns, `d_rw` by rows."""
    torch.manual_seed(7)
    ec = toy.sequence_collection(toy.sequence_configs(NAMES), need_indices=True)
    module = sharded(ec, num_dist_groups=num_dist_groups)
    features = toy.make_batch(NAMES, 0, rank, 5 + rank, dtype=torch.int32).features
    return as_tensors(module(features).wait())


@pytest.mark.parametrize("num_dist_groups", [1, 3])
def test_output_is_that_of_the_unsharded_collection(ranks: RankPool, num_dist_groups: int) -> None:
    """Names, rows in the order of the ids, lengths, and the ids as weights; values are kept."""
    torch.manual_seed(7)
    ec = toy.sequence_collection(toy.sequence_configs(NAMES), need_indices=True)
    for rank, found in enumerate(ranks.run(output, num_dist_groups)):
        features = toy.make_batch(NAMES, 0, rank, 5 + rank, dtype=torch.int32).features
        expected = as_tensors(ec(features))
        assert sorted(found) == sorted(expected)
        assert {"f_t_tw", "f_t_tw_b", "shared@t_tw2", "shared@d_cw"} <= set(found)
        for name, tensors in found.items():
            for tensor, wanted in zip(tensors, expected[name], strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-7)


def start(rank: int, owners: dict[str, int]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = toy.whole_state(sharded(ours(("d_tw", "t_tw", "t_dp")), owners))
    return {name: value for name, value in state.items() if "tt_cores" in name}


def test_start_values_do_not_depend_on_the_placement(ranks: RankPool) -> None:
    torch.manual_seed(5)
    truth = ours(("d_tw", "t_tw", "t_dp"), "cpu").state_dict()
    for owners in ({}, {"t_tw": -1, "t_dp": 1, "d_tw": 1}):
        cores = ranks.run(start, owners)[0]
        assert len(cores) == 6 and all(torch.equal(cores[name], truth[name]) for name in cores)


def keep(rank: int, way: str) -> tuple[dict[str, Tensor], ...]:
    """A collection with values; by the plan, `t_tw` of a stock one becomes TT."""
    torch.manual_seed(rank)
    names = ("t_tw", "t_dp", "d_tw")
    tables = toy.sequence_configs(names)
    source = ours(names, "cpu") if way == "ours" else EmbeddingCollection(tables=tables)
    before = {name: value.clone() for name, value in source.state_dict().items()}
    sharder = TTEmbeddingCollectionSharder(toy.SGD)
    plan = construct_module_sharding_plan(
        source, toy.generators(names, 2), sharder=sharder, device_type="cpu", local_size=2,
        world_size=2,
    )  # fmt: skip
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(source, plan, env, CPU)
    kept = toy.whole_state(module)
    module.reset_parameters()
    return before, kept, toy.whole_state(module)


def test_values_of_a_collection_are_kept_until_reset(ranks: RankPool) -> None:
    """Dense ones too, as in TorchRec: table-wise from the owner, data-parallel from rank 0."""
    (first, kept, reset), (second, _, _) = ranks.run(keep, "ours")
    sources = {"d_tw.weight": first, "t_tw.tt_cores.0": second, "t_dp.tt_cores.0": first}
    for name, source in sources.items():
        key = f"embeddings.{name}"
        assert torch.equal(kept[key], source[key])
        assert not torch.equal(reset[key], kept[key])


def test_a_stock_collection_with_values_may_have_tables_planned_tt(ranks: RankPool) -> None:
    """Its dense values of those tables are dropped, the other tables' kept."""
    first, kept, _ = ranks.run(keep, "stock")[0]
    assert torch.equal(kept["embeddings.d_tw.weight"], first["embeddings.d_tw.weight"])
    assert kept["embeddings.t_tw.tt_cores.0"].shape == (3, 1, 2, 3)
    assert "embeddings.t_tw.weight" not in kept


def in_backward(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = ("t_tw", "t_q", "t_dp")
    torch.manual_seed(2)
    ec = ours(names)
    apply_optimizer_in_backward(torch.optim.AdamW, ec.embeddings["t_tw"].parameters(), {"lr": 0.5})
    ec.embeddings["t_q"].requires_grad_(False)
    model = toy.shard(toy.ToyModel(None, ec=ec), toy.generators(names, 2), None)
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == (
        {0.5} if rank else set()
    )
    before = toy.whole_state(model)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    toy.train_sharded(model, optimizer, [toy.make_batch(names, s, rank) for s in range(2)])
    return before, toy.whole_state(model)


def test_optimizer_in_backward_and_frozen_tables(ranks: RankPool) -> None:
    """A rank with nothing but a frozen table takes part in the backward pass of the others."""
    before, after = ranks.run(in_backward)[0]
    for name in before:
        change = (after[name] - before[name]).abs().max()
        bounds = {"t_tw": (0.2, 2), "t_q": (0, 0), "t_dp": (1e-6, 0.1)}
        low, high = next((b for t, b in bounds.items() if f".{t}." in name), (1e-6, 2))
        assert low <= change <= high, name


def evaluate(rank: int) -> str:
    names = ("t_tw", "t_tw2", "t_dp")
    model = toy.shard(toy.sequence_model(names, "meta"), toy.generators(names, 2), None)
    batch = toy.make_batch(names, 0, rank)
    with torch.inference_mode():
        assert torch.isfinite(model(batch)[1]).all()
    before = toy.whole_state(model)
    with pytest.raises(ValueError) as caught:
        model(batch)[0].sum().backward()
    dist.barrier()  # all ranks stopped before a collective: they still can talk
    after = toy.whole_state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(caught.value)


def test_without_an_optimizer_evaluation_works_and_training_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(evaluate):
        assert "TT tables ['t_tw', 't_tw2'] have no optimizer" in message


def empty_batches(rank: int) -> None:
    names = ("t_tw", "t_dp", "d_tw")
    model = toy.shard(toy.sequence_model(names, "meta"), toy.generators(names, 2))
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.1))
    keys = [feature for name in names for feature in toy.FEATURES[name]]
    before = toy.whole_state(model)
    lengths = torch.zeros(len(keys) * 7, dtype=torch.int64)
    features = KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=lengths)
    for rows in model.module.ec(features).values():
        assert rows.values().shape == (0, 16) and rows.lengths().tolist() == [0] * 7
    toy.train_sharded(model, optimizer, [toy.ToyBatch(features, torch.ones(7))])
    after = toy.whole_state(model)
    assert all(torch.equal(after[name], before[name]) for name in after if "ec." in name)


def test_sequences_without_ids(ranks: RankPool) -> None:
    """No rows come out and nothing moves."""
    ranks.run(empty_batches)


def without_examples(rank: int) -> dict[str, tuple[Tensor, ...]]:
    names = ("t_tw", "t_dp", "d_tw")
    tables = toy.sequence_configs(names)
    module = sharded(toy.sequence_collection(tables, "meta", need_indices=True))
    features = toy.make_batch(names, 0, rank, 4 * rank, is_weighted=True).features
    features = KeyedJaggedTensor(
        features.keys(), features.values(), features.weights(), features.lengths().int()
    )
    return as_tensors(module(features).wait())


def test_a_rank_without_examples(ranks: RankPool) -> None:
    """Its last batch may be: TorchRec fails on the reshape of the lengths.

    What it sends is of the types that the other ranks send, which would else wait for ever.
    """
    empty, other = ranks.run(without_examples)
    for rows, lengths, ids in empty.values():
        assert rows.shape == (0, 16) and lengths.shape == (0,) and ids.shape == (0,)
    assert all(lengths.shape == (4,) for _, lengths, _ in other.values())


def train_without_examples(rank: int, examples: tuple[int, ...]) -> dict[str, Tensor]:
    names = ("t_tw", "t_q", "t_dp")
    torch.manual_seed(0)
    model = toy.shard(toy.sequence_model(names, "meta"), toy.generators(names, 2))
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.1))
    batch = toy.make_batch(names, 0, 0, batch_size=examples[rank])
    if examples[rank] == 0:
        for rows in model.module.ec(batch.features).values():
            assert rows.values().shape == (0, 16) and rows.lengths().shape == (0,)
    else:
        model.module.ec(batch.features).wait()
    toy.train_sharded(model, optimizer, [batch])
    return toy.whole_state(model)


def test_training_where_a_rank_has_no_examples(ranks: RankPool) -> None:
    """Which rank it is does not matter, and all of them may have none."""
    unmoved, left, right = (
        ranks.run(train_without_examples, examples)[0] for examples in ((0, 0), (4, 0), (0, 4))
    )
    for name in unmoved:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-6)
        assert not torch.equal(left[name], unmoved[name])


def deduplicated(rank: int, examples: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """State and outputs after some steps with repeated ids, without and with deduplication."""
    names = ("t_tw", "t_tw2", "t_q", "t_dp", "d_tw", "d_cw")
    found, num_ids = [], [0, 0]
    for use_index_dedup in (False, True):
        torch.manual_seed(0)
        entries = construct_module_sharding_plan(
            unsharded := toy.sequence_collection(toy.sequence_configs(names), "meta"),
            toy.generators(names, 2),
            sharder=TTEmbeddingCollectionSharder(),
            world_size=2,
            local_size=2,
            device_type="cpu",
        )
        model = DistributedModelParallel(
            toy.ToyModel(None, ec=unsharded),
            device=CPU,
            plan=ShardingPlan({"ec": entries}),
            sharders=[
                TTEmbeddingCollectionSharder(
                    toy.SGD, None, use_index_dedup, 2, TTEmbeddingCollection
                )
            ],
        )

        def count(_: Any, inputs: tuple[KeyedJaggedTensor], case: bool = use_index_dedup) -> None:
            num_ids[case] += inputs[0].values().numel()

        for lookup in model.module.ec._lookups:
            lookup.register_forward_pre_hook(count)
        optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
        pipeline = EcoRecTrainPipeline(model, optimizer, CPU)
        batches = [
            toy.make_batch(names, step, rank, examples[rank], max_length=40) for step in range(3)
        ]
        iterator = iter(batches)
        outputs = [pipeline.progress(iterator) for _ in batches]
        found.append([*toy.whole_state(model).values(), *outputs])
    assert num_ids[True] < 0.6 * num_ids[False]
    return found[0], found[1]


@pytest.mark.parametrize("examples", [(6, 6), (5, 0)])
def test_deduplicated_ids_train_alike(ranks: RankPool, examples: tuple[int, int]) -> None:
    """On the CPU too, where TorchRec would fail in the first batch; a rank may have no examples.

    Gradients of equal ids are added before they travel: in another order, so not bit for bit.
    """
    for plain, unique in ranks.run(deduplicated, examples):
        for expected, found in zip(plain, unique, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def quantised(rank: int) -> tuple[Tensor, Tensor]:
    names = ("t_tw", "t_q", "d_tw")
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16), device=CPU
    )
    found = []
    for codecs in (None, registry):
        torch.manual_seed(0)
        model = toy.shard(
            toy.sequence_model(names, "meta"),
            toy.generators(names, 2),
            qcomm_codecs_registry=codecs,
        )
        optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
        toy.train_sharded(model, optimizer, [toy.make_batch(names, s, rank) for s in range(3)])
        found.append(model(toy.make_batch(names, 9, rank))[1])
    return found[0], found[1]


def test_quantised_communication(ranks: RankPool) -> None:
    for exact, rounded in ranks.run(quantised):
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)
        assert not torch.equal(rounded, exact)


def row_wise_tt(*arguments: Any) -> ParameterSharding:
    return row_wise(compute_kernel=TT_COMPUTE_KERNEL)(*arguments)


def column_wise_tt(*arguments: Any) -> ParameterSharding:
    return column_wise(ranks=[0, 1], compute_kernel=TT_COMPUTE_KERNEL)(*arguments)


def two_dimensional() -> None:
    sharder = TTEmbeddingCollectionSharder(toy.SGD)
    plan = construct_module_sharding_plan(
        ours(("t_tw",)), {"t_tw": tt_table_wise(0)}, sharder=sharder, device_type="cpu"
    )
    env = ShardingEnv2D.__new__(ShardingEnv2D)  # needs at least two groups of ranks to be made
    sharder.shard(ours(("t_tw",)), plan, env, CPU)


def planned(generator: Any, fused_params: dict[str, Any] = toy.SGD, stock: bool = False) -> None:
    module = (
        EmbeddingCollection(tables=toy.sequence_configs(("t_tw",)), device=META)
        if stock
        else ours(("t_tw",))
    )
    sharder = TTEmbeddingCollectionSharder(fused_params)
    shard(module, {"t_tw": generator}, sharder=sharder, device=CPU)


REFUSALS = {
    "row-wise": (lambda: planned(row_wise_tt), "'t_tw' cannot be sharded row_wise"),
    "column-wise": (lambda: planned(column_wise_tt), "'t_tw' cannot be sharded column_wise"),
    "fused kernel": (
        lambda: planned(row_wise(compute_kernel="fused")),
        "'t_tw' is a TT table, but its plan entry has the compute kernel 'fused'",
    ),
    "no shape": (lambda: planned(tt_data_parallel(), stock=True), "'t_tw' .* has no TT shape"),
    "another shape": (
        lambda: planned(tt_table_wise(0, tt=toy.SPECS["t_q"])),
        "24 rows x 16 columns, the table is of 58 x 16",
    ),
    "optimizer": (
        lambda: planned(tt_table_wise(0), {"optimizer": EmbOptimType.LAMB}),
        "'t_tw': optimizer lamb is not supported",
    ),
    "2D parallelism": (two_dimensional, r"\['t_tw'\]: 2D parallelism .* is not supported"),
    "groups": (
        lambda: TTEmbeddingCollectionSharder(num_dist_groups=0),
        "num_dist_groups=0 must be at least 1",
    ),
}


def refuse(rank: int) -> None:
    for attempt, message in REFUSALS.values():
        with pytest.raises((ValueError, NotImplementedError), match=message):
            attempt()
    dist.barrier()


def test_what_cannot_work_is_refused_by_name(ranks: RankPool) -> None:
    ranks.run(refuse)


def broken_input(rank: int) -> None:
    module = sharded(ours(("t_tw",)), {"t_tw": 1})
    keys, ones = ["f_t_tw", "f_t_tw_b"], torch.ones(4, dtype=torch.int64)
    good = KeyedJaggedTensor(keys, torch.arange(4), lengths=ones)
    expected = as_tensors_without_ids(module(good))
    broken = {
        "there are 4 values: they end within feature 'f_t_tw_b'": KeyedJaggedTensor(
            keys, torch.arange(4), lengths=torch.tensor([1, 1, 1, 2])
        ),
        "in the order of the first batch": KeyedJaggedTensor(
            keys[::-1], torch.arange(4), lengths=ones
        ),
        r"\['t_tw'\]: variable batch sizes per feature are not supported": KeyedJaggedTensor(
            keys,
            torch.arange(3),
            lengths=ones[:3],
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(keys, torch.zeros(2, 2, dtype=torch.int64)),
        ),
    }
    for message, features in broken.items():
        with pytest.raises((ValueError, NotImplementedError), match=message):
            module(features)
    found = as_tensors_without_ids(module(good))  # no rank is left waiting in a collective
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def as_tensors_without_ids(output: Any) -> dict[str, Tensor]:
    return {name: rows.values().detach() for name, rows in output.items()}


def test_broken_input_is_refused_before_any_collective(ranks: RankPool) -> None:
    ranks.run(broken_input)


def ids_out_of_range(rank: int) -> str:
    module = sharded(ours(("t_dp",)))
    features = KeyedJaggedTensor(["f_t_dp"], torch.tensor([60]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError) as caught:
        module(features).wait()
    return str(caught.value)


def test_ids_out_of_range_are_named(ranks: RankPool) -> None:
    for message in ranks.run(ids_out_of_range):
        assert "t_dp" in message and "f_t_dp" in message and "60" in message


def test_config_with_a_shape_needs_no_argument(ranks: RankPool) -> None:
    """In a stock collection on the meta device; DistributedModelParallel renames the parameters."""
    ranks.run(shape_in_config)


def shape_in_config(rank: int) -> None:
    names = ("t_tw", "t_dp")
    tables = [
        TTEmbeddingConfig(**vars(config), tt=toy.SPECS[config.name])
        for config in toy.sequence_configs(names)
    ]
    ec = EmbeddingCollection(tables=tables, device=META)
    model = toy.shard(
        toy.ToyModel(None, ec=ec), {"t_tw": tt_table_wise(1), "t_dp": tt_data_parallel()}
    )
    assert {f"ec.embeddings.{t}.tt_cores.{k}" for t in names for k in range(3)} <= set(
        model.state_dict()
    )
    with pytest.raises(ValueError, match="have no optimizer"):
        bare = toy.shard(
            toy.ToyModel(None, ec=EmbeddingCollection(tables=tables, device=META)),
            {"t_tw": tt_table_wise(1), "t_dp": tt_data_parallel()},
            None,
        )
        bare(toy.make_batch(names, 0, rank))[0].sum().backward()
