"""Too little memory: one error with need and have per rank, and cures that do cure."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, StorageReservation
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from ecorec_torchrec.modules import TTEmbeddingBagCollection
from ecorec_torchrec.planner import EcoRecConstraints, EcoRecPartitioner, EcoRecPlanner
from ecorec_torchrec.tt import TTSpec

MIB = 2**20
SIZES = {"big": 1_000_000, "small": 50_000}


class HalfReserved(StorageReservation):
    """A user's own policy, which TorchRec's message would look for attributes it lacks."""

    def reserve(self, topology, batch_size, module, sharders, constraints=None):
        reserved = copy.deepcopy(topology)
        for device in reserved.devices:
            device.storage.hbm //= 2
            device.storage.ddr //= 2
        self.last = reserved
        return reserved

    @property
    def last_reserved_topology(self):
        return self.last


class HalfFilled(EcoRecPartitioner):
    """A user's own partitioner, which wants more room than ours."""

    def partition(self, proposal, storage_constraint, *args, **kwargs):
        halved = copy.deepcopy(storage_constraint)
        for device in halved.devices:
            device.storage.ddr //= 2
        return super().partition(proposal, halved, *args, **kwargs)


def shortage(planner: EcoRecPlanner, model: nn.Module, sharders: list) -> str:
    with pytest.raises(PlannerError) as caught:
        planner.plan(model, sharders)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "reservation",
    [
        FixedPercentageStorageReservation(0.2),
        FixedAbsoluteStorageReservation(MIB),
        HeuristicalStorageReservation(0.15),
        InferenceStorageReservation(0.15),
        HalfReserved(),
    ],
    ids=lambda reservation: type(reservation).__name__,
)
@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation:FutureWarning")
def test_every_reservation_gives_need_and_have(model, topology, sharders, device, reservation):
    planner = EcoRecPlanner(
        topology(60, device, host_mib=60), 64, storage_reservation=reservation, debug=False
    )
    message = shortage(planner, model(**SIZES), sharders)
    rows = re.findall(
        r"^ +(\d+)  [hd]\w+ +([\d,]+) +([\d,-]+) +\(([\d,]+) - ", message, re.MULTILINE
    )
    assert [int(rank) for rank, *_ in rows] == [0, 1]
    need, have, cap = ([int(row[i].replace(",", "")) for row in rows] for i in (1, 2, 3))
    assert max(need) > max(have)
    assert all(left <= size == 60 * MIB for left, size in zip(have, cap, strict=True))
    assert sum(need) > 1_000_000 * 64 * 4
    raised = re.search(r"\d\) Raise the topology's (hbm|ddr)_cap to (\d+) bytes", message)
    assert raised and raised[1] == ("ddr" if device == "cpu" else "hbm")
    cured = EcoRecPlanner(
        topology(int(raised[2]) / MIB, device, host_mib=60),
        64,
        storage_reservation=reservation,
        debug=False,
    )
    assert cured.plan(model(**SIZES), sharders)


def test_cures_hold_for_the_users_own_partitioner(model, topology, sharders):
    def planner(cap_mib: float) -> EcoRecPlanner:
        return EcoRecPlanner(topology(cap_mib), 64, partitioner=HalfFilled(), debug=False)

    message = shortage(planner(60), model(**SIZES), sharders)
    cap = re.search(r"Raise the topology's ddr_cap to (\d+) bytes", message)
    assert cap and planner(int(cap[1]) / MIB).plan(model(**SIZES), sharders)


def test_cure_allow_tt(model, topology, sharders):
    message = shortage(EcoRecPlanner(topology(60), 64, debug=False), model(**SIZES), sharders)
    cure = re.search(
        r"Allow tables (.*) to be TT: EcoRecConstraints\(tt_ranks=\((\d+),\)\)", message
    )
    assert cure and cure[1] == "big"
    constraints = {"big": EcoRecConstraints(tt_ranks=(int(cure[2]),))}
    cured = EcoRecPlanner(topology(60), 64, constraints=constraints, debug=False)
    assert cured.plan(model(**SIZES), sharders).plan["ebc"]["big"].tt.ranks == (64, 64)


def test_cure_lower_rank_and_smaller_batch(model, topology, sharders):
    def planner(rank: int = 64, batch_size: int = 8192) -> EcoRecPlanner:
        constraints = {name: EcoRecConstraints(tt="always", tt_ranks=(rank,)) for name in SIZES}
        return EcoRecPlanner(topology(40), batch_size, constraints=constraints, debug=False)

    message = shortage(planner(), model(**SIZES), sharders)
    rank = re.search(r"Lower the TT ranks of tables big, small to (\d+)", message)
    batch_size = re.search(r"Reduce the local batch size to (\d+) \(now 8192\)", message)
    assert rank and batch_size
    assert planner(rank=int(rank[1])).plan(model(**SIZES), sharders)
    assert planner(batch_size=int(batch_size[1])).plan(model(**SIZES), sharders)


def test_cure_lower_rank_of_the_models_own_shape(topology, sharders):
    def collection(rank: int) -> nn.Module:
        table = EmbeddingBagConfig(
            num_embeddings=1_000_000, embedding_dim=64, name="big", feature_names=["f"]
        )
        spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (rank, rank))
        return TTEmbeddingBagCollection([table], tt={"big": spec}, device=torch.device("meta"))

    planner = EcoRecPlanner(topology(4), 64, debug=False)
    message = shortage(planner, collection(64), sharders)
    rank = re.search(r"Lower the TT ranks of tables big to (\d+)", message)
    assert rank and planner.plan(collection(int(rank[1])), sharders)


def test_cure_reserve_less(model, topology, sharders):
    reservation = FixedPercentageStorageReservation(0.9)
    planner = EcoRecPlanner(
        topology(400, "cuda", host_mib=60), 64, storage_reservation=reservation, debug=False
    )
    message = shortage(planner, model(**SIZES), sharders)
    cure = re.search(r"FixedAbsoluteStorageReservation\((\d+)\)", message)
    assert cure
    cured = EcoRecPlanner(
        topology(400, "cuda", host_mib=60),
        64,
        storage_reservation=FixedAbsoluteStorageReservation(int(cure[1])),
        debug=False,
    )
    assert cured.plan(model(**SIZES), sharders)
