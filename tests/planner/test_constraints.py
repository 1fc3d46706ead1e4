"""Constraints that contradict themselves, the table or the machine are refused by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPlanner
from ecorec_torchrec.sharding import get_ecorec_sharders
from ecorec_torchrec.tt import TTSpec

META = torch.device("meta")


@dataclass
class TeamConstraints(ParameterConstraints):
    """A user's own kind of TorchRec's constraints."""

    owner: str = "ads"


def users(data_type: DataType = DataType.FP32) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=1000, embedding_dim=16, name="users", feature_names=["f"],
        data_type=data_type,
    )  # fmt: skip


def plan(
    topology: Topology, constraint: ParameterConstraints, data_type: DataType = DataType.FP32
) -> object:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[users(data_type)], device=META)})
    planner = EcoRecPlanner(topology, constraints={"users": constraint})
    return planner.plan(model, get_ecorec_sharders()).plan["ebc"]["users"]


@pytest.mark.parametrize("tt", ["always", "never"])
def test_the_plan_places_a_table_in_its_dist_group(tt: str) -> None:
    tt_ranks = (4,) if tt == "always" else ()
    constraint = EcoRecConstraints(
        tt=tt, tt_ranks=tt_ranks, dist_group=2, sharding_types=["table_wise"]
    )
    assert plan(Topology(world_size=2, compute_device="cpu"), constraint).dist_group == 2


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tt_ranks": 16}, TypeError, "tt_ranks must be integers, such as .* got 16"),
        ({"tt_ranks": "16"}, TypeError, "got '16'"),
        ({"tt_ranks": (True,)}, ValueError, "at least 1"),
        ({"dist_group": 1.0}, TypeError, "dist_group must be an integer, got 1.0"),
        ({"dist_group": -1}, ValueError, "dist_group=-1 must be at least 0"),
        ({"pooling_factors": [-1.0]}, ValueError, r"pooling_factors=\[-1.0\]"),
        ({"pooling_factors": [float("nan")]}, ValueError, "must be finite"),
    ],
)
def test_impossible_values(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EcoRecConstraints(**settings)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (EcoRecConstraints(device_group="cuda"), "'users' .* on cpu, with device_group='cuda'"),
        (
            EcoRecConstraints(tt="always", tt_ranks=(4,), output_dtype=DataType.INT8),
            "'users' .* it is to be TT, but output_dtype=INT8",
        ),
    ],
)
def test_a_table_without_options_is_named(topology, constraint, message) -> None:
    """TorchRec leaves it out of the plan, so that it silently stays whole on every rank."""
    with pytest.raises(PlannerError, match=message):
        plan(topology(100), constraint)


@pytest.mark.parametrize("cut", ["row_wise", "column_wise", "table_row_wise", "grid_shard"])
def test_a_tt_table_cannot_be_asked_to_be_cut(topology, cut) -> None:
    constraint = EcoRecConstraints(tt="always", tt_ranks=(4,), sharding_types=[cut])
    with pytest.raises(
        PlannerError, match=f"'users' .*{cut}.*a TT table is table_wise or data_parallel"
    ):
        plan(topology(100), constraint)


def test_tables_of_integers_are_never_compressed(topology) -> None:
    always = EcoRecConstraints(tt="always", tt_ranks=(4,))
    with pytest.raises(PlannerError, match="'users' .* cores cannot be stored as torch.int8"):
        plan(topology(100), always, DataType.INT8)
    with pytest.warns(UserWarning, match="'users': tt_ranks is ignored, cores cannot be stored"):
        entry = plan(topology(100), EcoRecConstraints(tt_ranks=(4,)), DataType.INT8)
    assert entry.compute_kernel == "fused"


def test_subclasses_of_torchrecs_constraints_are_welcome(topology) -> None:
    entry = plan(topology(100), TeamConstraints(sharding_types=["column_wise"]))
    assert entry.sharding_type == "column_wise"


def test_constraints_can_be_copied_and_sent() -> None:
    constraint = EcoRecConstraints(tt="always", tt_ranks=(4, 8), output_dtype=DataType.FP16)
    for twin in (copy.deepcopy(constraint), pickle.loads(pickle.dumps(constraint))):
        assert twin == constraint and twin is not constraint


def test_what_is_no_constraint(topology) -> None:
    with pytest.raises(TypeError, match="constraint of table 'users' must be .* got {'tt'"):
        EcoRecPlanner(topology(1), constraints={"users": {"tt": "always"}})
    with pytest.raises(TypeError, match="must map table names"):
        EcoRecPlanner(topology(1), constraints=[EcoRecConstraints()])
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        EcoRecPlanner(topology(1), batch_size=0)


def test_cores_inside_a_module_with_a_sharder_of_torchrec(topology) -> None:
    spec = TTSpec.suggest(1000, 16, rank=4)
    ebc = TTEmbeddingBagCollection([users()], {"users": spec}, is_weighted=True, device=META)
    model = nn.ModuleDict(
        {
            "fp": FeatureProcessedEmbeddingBagCollection(
                ebc, PositionWeightedModuleCollection({"f": 5})
            )
        }
    )
    with pytest.raises(PlannerError, match="'users' .* FeatureProcessedEmbeddingBagCollection"):
        EcoRecPlanner(topology(100)).plan(model, get_ecorec_sharders())
