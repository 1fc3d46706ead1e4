"""Models on the meta device and small clusters to plan for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from ecorec_torchrec.sharding import get_ecorec_sharders


@pytest.fixture
def model() -> Callable[..., nn.Module]:
    """`model(users=1000, items_=50)`: a stock collection `ebc` of tables with these row counts."""

    def build(**rows: int) -> nn.Module:
        tables = [
            EmbeddingBagConfig(
                num_embeddings=n, embedding_dim=64, name=name, feature_names=[f"f_{name}"]
            )
            for name, n in rows.items()
        ]
        return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables, device=torch.device("meta"))})

    return build


@pytest.fixture
def topology() -> Callable[..., Topology]:
    """`topology(cap_mib)`: 2 CPU ranks, or GPUs of one host, with `cap_mib` MiB each."""

    def build(
        cap_mib: float, device: str = "cpu", world_size: int = 2, host_mib: float = 2**20
    ) -> Topology:
        cap = int(cap_mib * 2**20)
        return Topology(
            world_size=world_size,
            local_world_size=world_size,
            compute_device=device,
            hbm_cap=cap,
            ddr_cap=cap if device == "cpu" else int(host_mib * 2**20),
        )

    return build


@pytest.fixture
def sharders() -> list[ModuleSharder[nn.Module]]:
    return get_ecorec_sharders({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
