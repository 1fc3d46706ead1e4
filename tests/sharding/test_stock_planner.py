"""Our sharders under TorchRec's own planner, `DistributedModelParallel`'s choice without a plan."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from ecorec_torchrec import (
    TTEmbeddingBagCollection,
    TTEmbeddingBagConfig,
    TTSpec,
    get_ecorec_sharders,
)
from ecorec_torchrec.testing import RankPool

SPEC = TTSpec(60, (3, 4, 5), (2, 2, 2), (3, 3))
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


def _shard_without_plan(rank: int, kind: str) -> tuple[tuple[int, ...], list[str]]:
    import warnings

    plain = [EmbeddingBagConfig(num_embeddings=60, embedding_dim=8, name="t", feature_names=["f"])]
    with_tt = [TTEmbeddingBagConfig(**vars(plain[0]), tt=SPEC)]
    meta = torch.device("meta")
    collections = {
        "dense": lambda: EmbeddingBagCollection(plain, device=meta),
        "tt_config": lambda: EmbeddingBagCollection(with_tt, device=meta),
        "tt_collection": lambda: TTEmbeddingBagCollection(plain, tt={"t": SPEC}),
    }
    model = nn.ModuleDict({"ebc": collections[kind]()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = DistributedModelParallel(
            model, device=torch.device("cpu"), sharders=get_ecorec_sharders(FUSED_PARAMS)
        )
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    pooled = model.module["ebc"](features).wait().values()
    return tuple(pooled.shape), [str(warning.message) for warning in caught]


def test_dense_model_is_planned_by_torchrec(ranks: RankPool) -> None:
    for shape, _ in ranks.run(_shard_without_plan, "dense", world_size=2):
        assert shape == (2, 8)


def test_ignored_tt_shape_is_warned_of(ranks: RankPool) -> None:
    shape, messages = ranks.run(_shard_without_plan, "tt_config", world_size=1)[0]
    assert shape == (2, 8)
    assert any("table 't' has a TT shape, which is ignored" in message for message in messages)


def test_collection_that_holds_cores_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="table 't' is a TT table(.|\n)*EcoRecPlanner"):
        ranks.run(_shard_without_plan, "tt_collection", world_size=1)
