"""Predicted memory is what the tables take, not the dense size; predicted time follows the work."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecEnumerator
from ecorec_torchrec.planner.options import TTShardingOption
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.tt import TTSpec

ROWS, DIM, BATCH = 1_000_000, 64, 256
SPEC = TTSpec(ROWS, (100, 100, 100), (4, 4, 4), (16, 16))
CORE_BYTES = SPEC.nbytes(torch.float32)
GRADIENT_COPIES = 8 * (100 * 4 * 16 + 100 * 16 * 4) + 100 * 16 * 4
"""Elements: 8 of the outer cores' gradients, and core 2 in another order."""


def options(
    fused_params: dict | None, *, device: str = "cpu", mark: type | None = None, **config: object
) -> dict[tuple[str, str], object]:
    """(kernel or "tt", sharding type) -> option of a table of 1M x 64 that may be TT."""
    topology = Topology(world_size=2, local_world_size=2, compute_device=device)
    table = EmbeddingBagConfig(
        num_embeddings=ROWS, embedding_dim=DIM, name="users", feature_names=["user"], **config
    )
    ebc = EmbeddingBagCollection([table], device=torch.device("meta"))
    if mark is not None:
        apply_optimizer_in_backward(mark, ebc.parameters(), {"lr": 0.1})
    constraints = {"users": EcoRecConstraints(tt_ranks=(16,))}
    enumerator = EcoRecEnumerator(topology, BATCH, constraints)
    found = enumerator.enumerate(nn.ModuleDict({"ebc": ebc}), get_ecorec_sharders(fused_params))
    return {
        ("tt" if isinstance(o, TTShardingOption) else o.compute_kernel, o.sharding_type): o
        for o in found
    }


def ddr(option: object) -> int:
    return option.shards[0].storage.ddr


ADAM, SGD = {"optimizer": EmbOptimType.ADAM}, {"optimizer": EmbOptimType.EXACT_SGD}


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (EmbOptimType.EXACT_SGD, 0),
        (EmbOptimType.EXACT_ADAGRAD, CORE_BYTES),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4 * 300),
        (EmbOptimType.ADAM, 2 * CORE_BYTES),
        (torch.optim.AdamW, 2 * CORE_BYTES),
        (EmbOptimType.NONE, 0),
    ],
)
def test_tt_is_charged_for_cores_gradients_and_state(optimizer, state):
    assert options(SGD)["tt", "table_wise"].tt == SPEC
    lookups = 2 * BATCH
    workspace = 4 * GRADIENT_COPIES
    index_plan = lookups * 68
    ids_and_outputs = lookups * 8 + lookups * DIM * 4
    held = 2 * CORE_BYTES + state + 3 * CORE_BYTES  # and what passes through a step
    option = options({"optimizer": optimizer})["tt", "table_wise"]
    assert ddr(option) == held + workspace + index_plan + ids_and_outputs
    assert option.shards[0].storage.hbm == 0


def test_workspace_is_charged_up_to_its_bound():
    free, bounded = (
        ddr(options(SGD | extra)["tt", "table_wise"]) for extra in ({}, {"workspace_bytes": 10_000})
    )
    assert free - bounded == 4 * GRADIENT_COPIES - 10_000


def test_gpus_keep_rows_and_prefixes_that_the_cpu_engine_computes_anew():
    def workspace(device: str) -> int:
        kept = [
            options(SGD | extra, device=device)["tt", "table_wise"].shards[0].storage
            for extra in ({}, {"workspace_bytes": 1})
        ]
        free, bounded = (storage.hbm + storage.ddr for storage in kept)
        return free - bounded + 1

    lookups = 2 * BATCH
    assert workspace("cuda") == 4 * (lookups * DIM + 2 * lookups * 16 * 16)
    assert workspace("cpu") == 4 * max(lookups * DIM, GRADIENT_COPIES)


def test_half_precision_cores_are_half_the_size():
    full = ddr(options(SGD)["tt", "table_wise"])
    half = ddr(options(SGD, data_type=DataType.BF16)["tt", "table_wise"])
    assert full - half == CORE_BYTES  # cores and gradients in 2 bytes; outputs stay float32


@pytest.mark.parametrize("mark", [torch.optim.Adam, torch.optim.SGD])
def test_marked_dense_weight_does_not_inflate_the_cores(mark):
    """TorchRec multiplies the dense weight for the optimizer: hundreds of MiB for some of cores."""
    marked = options(None, mark=mark)
    named = options({"optimizer": mark})
    assert ddr(marked["tt", "table_wise"]) == ddr(named["tt", "table_wise"]) < 2**23


def test_dense_tables_are_charged_for_an_optimizer_named_in_fused_params():
    """TorchRec looks at marks on the weight only and charges nothing for Adam in fused_params."""
    dense = ROWS * DIM * 4
    by_sharding = ("fused", "table_wise")
    assert ddr(options(ADAM)[by_sharding]) - ddr(options(SGD)[by_sharding]) == 2 * dense
    assert ddr(options(ADAM)[by_sharding]) == ddr(options(None, mark=torch.optim.Adam)[by_sharding])
    data_parallel = ("dense", "data_parallel")
    assert ddr(options(ADAM)[data_parallel]) - ddr(options(SGD)[data_parallel]) == 2 * dense
    assert ddr(options(SGD)[data_parallel]) > 2 * dense  # weight and gradient


def test_without_tt_the_space_and_times_are_torchrecs():
    topology = Topology(world_size=2, local_world_size=2, compute_device="cuda")
    table = EmbeddingBagConfig(
        num_embeddings=ROWS, embedding_dim=DIM, name="users", feature_names=["user"]
    )
    ebc = EmbeddingBagCollection([table], device=torch.device("meta"))
    sharders = get_ecorec_sharders()
    ours = EcoRecEnumerator(topology, BATCH).enumerate(ebc, sharders)
    theirs = EmbeddingEnumerator(topology, BATCH).enumerate(ebc, get_default_sharders())

    def summary(found: list) -> dict:
        return {(o.sharding_type, o.compute_kernel): [s.perf for s in o.shards] for o in found}

    assert summary(ours) == summary(theirs)


def test_time_grows_with_lookups_and_rank_and_gpus_are_faster():
    def fwd_ms(rank: int, batch_size: int, device: str) -> float:
        topology = Topology(world_size=2, local_world_size=2, compute_device=device)
        spec = TTSpec.suggest(ROWS, DIM, rank=rank)
        table = EmbeddingBagConfig(
            num_embeddings=ROWS, embedding_dim=DIM, name="users", feature_names=["user"]
        )
        ebc = TTEmbeddingBagCollection([table], tt={"users": spec}, device="meta")
        enumerator = EcoRecEnumerator(topology, batch_size)
        found = enumerator.enumerate(ebc, get_ecorec_sharders(SGD))
        (option,) = [o for o in found if o.sharding_type == "table_wise"]
        return option.shards[0].perf.fwd_compute

    assert fwd_ms(16, 256, "cpu") < fwd_ms(16, 4096, "cpu") < 16 * fwd_ms(16, 256, "cpu")
    assert fwd_ms(16, 4096, "cpu") < fwd_ms(64, 4096, "cpu")
    assert fwd_ms(16, 4096, "cuda") < fwd_ms(16, 4096, "cpu")


def test_data_parallel_reduces_the_cores_not_the_dense_table():
    found = options(SGD)
    tt, dense = found["tt", "data_parallel"], found["dense", "data_parallel"]
    tt_ms, dense_ms = tt.shards[0].perf.bwd_comms, dense.shards[0].perf.bwd_comms
    assert tt_ms / dense_ms == pytest.approx(CORE_BYTES / (ROWS * DIM * 4), rel=0.01)
