"""TorchRec's own test base, run with our sharders and planner on its models, half of them TT.

The tests are TorchRec's, inherited: what they give their sharders for every table, ours get for the
dense tables; the TT ones are table-wise, or data-parallel where TorchRec's test is. Every second
table is TT. What needs GPUs or nccl is skipped by the base itself, with its reason.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import Phase, settings
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec import (
    EcoRecPlanner,
    TTEmbeddingBagCollection,
    TTEmbeddingBagCollectionSharder,
    TTSpec,
    get_ecorec_sharders,
)
from ecorec_torchrec.testing import RankPool

# Before the base fixes its own settings: the same examples every time, and no shrinking, which
# would take minutes.
settings.register_profile(
    "torchrec", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("torchrec")


def _stand_in_for_missing_tests() -> None:
    """TorchRec's wheel leaves its `tests` out, of which its test base imports one sharder, for
    tests of 2D parallelism on GPUs."""
    stand_in = ModuleType("torchrec.distributed.tests.test_sequence_model")
    stand_in.TestEmbeddingCollectionSharder = object  # type: ignore[attr-defined]
    sys.modules.setdefault(stand_in.__name__, stand_in)


_stand_in_for_missing_tests()

from torchrec.distributed.test_utils import (  # noqa: E402
    test_model_parallel as model_parallel,
)
from torchrec.distributed.test_utils import (  # noqa: E402
    test_model_parallel_base as model_parallel_base,
)
from torchrec.distributed.test_utils import (  # noqa: E402
    test_sharding as base,
)
from torchrec.distributed.test_utils.test_model import TestSparseNN  # noqa: E402


def _is_tt(table: str) -> bool:
    return int(table.rpartition("_")[2]) % 2 == 1


class HalfTTSparseNN(TestSparseNN):
    """TorchRec's test model whose every second table is TT."""

    __test__ = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("ebc", "weighted_ebc"):
            stock = getattr(self.sparse, name)
            if stock is not None:
                setattr(self.sparse, name, _half_tt(stock))


def _half_tt(stock: EmbeddingBagCollection) -> TTEmbeddingBagCollection:
    tables = stock.embedding_bag_configs()
    specs = {
        table.name: TTSpec.suggest(table.num_embeddings, table.embedding_dim, rank=4)
        for table in tables
        if _is_tt(table.name)
    }
    return TTEmbeddingBagCollection(tables, specs, stock.is_weighted(), stock.device)


class OneTypeSharder(TTEmbeddingBagCollectionSharder):
    """Our sharder with the limits of one of TorchRec's test sharders, for the dense tables."""

    def __init__(self, stock: Any) -> None:
        fused_params = {"optimizer": EmbOptimType.EXACT_SGD, **stock.fused_params}
        super().__init__(
            fused_params, stock.qcomm_codecs_registry, module_type=TTEmbeddingBagCollection
        )
        self._dense_type, self._dense_kernel = stock._sharding_type, stock._kernel_type
        self._tt_type = (
            ShardingType.DATA_PARALLEL
            if self._dense_type == ShardingType.DATA_PARALLEL.value
            else ShardingType.TABLE_WISE
        ).value

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return sorted({self._dense_type, self._tt_type})

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self._dense_kernel] if sharding_type == self._dense_type else []


def _run_test(rank: int, arguments: dict[str, Any]) -> None:
    _stand_in_for_missing_tests()  # in this rank's process
    from torchrec.distributed.test_utils import test_sharding

    copy_of_torchrec = test_sharding.copy_state_dict

    def copy_cores_too(local: dict[str, Any], whole: dict[str, Tensor], **options: Any) -> None:
        cores = [name for name in local if ".tt_cores." in name]
        _copy_cores(cores, local, whole)
        rest = {name: value for name, value in local.items() if name not in cores}
        copy_of_torchrec(rest, whole, **options)

    with (
        mock.patch.object(test_sharding, "EmbeddingShardingPlanner", EcoRecPlanner),
        mock.patch.object(test_sharding, "copy_state_dict", copy_cores_too),
        mock.patch.object(test_sharding, "alter_global_ebc_dtype", _weighted_tables_to_fp32),
    ):
        test_sharding.sharding_single_rank_test_single_process(
            pg=dist.GroupMember.WORLD, device=torch.device("cpu"), rank=rank, **arguments
        )


def _weighted_tables_to_fp32(model: nn.Module) -> None:
    """TorchRec's does so with every table's `weight`."""
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection) and module.is_weighted():
            module.embedding_bags.float()


def _copy_cores(names: list[str], local: Mapping[str, Any], whole: Mapping[str, Tensor]) -> None:
    """TorchRec's copies tensors of up to two dimensions; cores have four, and one shard."""
    for name in names:
        value = local[name]
        is_sharded = isinstance(value, ShardedTensor)
        for target in [s.tensor for s in value.local_shards()] if is_sharded else [value]:
            target.detach().copy_(whole[name])


class TestModelParallel(model_parallel._ModelParallelBase):
    """One step on 2 ranks equals the unsharded model's, as TorchRec tests it."""

    backend = "gloo"

    @pytest.fixture(autouse=True)
    def _pool(self, ranks: RankPool) -> None:
        self.ranks = ranks

    def _test_sharding(
        self,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: dict[str, ParameterConstraints] | None = None,
        **arguments: Any,
    ) -> None:
        dense_only = {k: v for k, v in (constraints or {}).items() if not _is_tt(k)}
        super()._test_sharding(
            sharders=[OneTypeSharder(stock) for stock in sharders],
            constraints=dense_only,
            model_class=HalfTTSparseNN,
            **arguments,
        )

    def _run_multi_process_test(
        self, *, callable: Any, world_size: int, backend: str, **arguments: Any
    ) -> None:
        assert callable is base.sharding_single_rank_test and backend == self.backend
        self.ranks.run(_run_test, {"world_size": world_size, **arguments}, world_size=world_size)


class TestStateDict(model_parallel_base.ModelParallelStateDictBase):
    """State dicts of model and optimizer on one rank, as TorchRec tests them."""

    backend = "gloo"

    @pytest.fixture(autouse=True)
    def _our_parts(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        stock_sharder = base.create_test_sharder
        monkeypatch.setattr(model_parallel_base, "EmbeddingShardingPlanner", EcoRecPlanner)
        monkeypatch.setattr(
            model_parallel_base,
            "create_test_sharder",
            lambda *args, **kwargs: OneTypeSharder(stock_sharder(*args, **kwargs)),
        )
        sharders = get_ecorec_sharders({"optimizer": EmbOptimType.EXACT_SGD})
        monkeypatch.setattr(model_parallel_base, "get_default_sharders", lambda: sharders)
        with mock.patch.dict(os.environ):
            yield

    def _create_model(self) -> nn.Module:
        return HalfTTSparseNN(
            tables=self.tables,
            num_float_features=self.num_float_features,
            weighted_tables=self.weighted_tables,
            dense_device=self.device,
            sparse_device=torch.device("meta"),
        )

    @unittest.skip("it counts the column shards of every `<table>.weight`; TT tables are not cut")
    def test_load_state_dict_cw_multiple_shards(self) -> None: ...

    @unittest.skip(
        "it steps a model between a forward and its backward pass: a TT gradient, unlike a dense "
        "one, is computed from the weights, so autograd refuses that"
    )
    def test_optimizer_load_state_dict(self) -> None: ...

    @unittest.skip(
        "it expects no buffer outside the state dict: TorchRec makes one, of the order of "
        "features, where the tables of a collection have several kernels"
    )
    def test_params_and_buffers(self) -> None: ...
