"""A small model with dense and TT tables of every sharding, for tests on several ranks.

The tables are those of a pooled collection, of a sequence collection, or of both. The truth of such
a test is the unsharded model in one process, fed with the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import QuantizedCommCodecs, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection, get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from ecorec_torchrec.modules import (
    TTEmbeddingBagCollection,
    TTEmbeddingCollection,
    table_configs,
)
from ecorec_torchrec.plan import tt_data_parallel, tt_table_wise
from ecorec_torchrec.sharding import (
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingCollectionSharder,
    get_ecorec_sharders,
)
from ecorec_torchrec.tt import TTSpec

DIM = 16
SPECS = {
    # One group: equal column factors and ranks, unlike rows.
    "t_tw": TTSpec(58, (3, 4, 5), (2, 2, 4), (3, 4)),
    "t_tw2": TTSpec(42, (7, 2, 3), (2, 2, 4), (3, 4)),
    # Another group, for its column factors.
    "t_q": TTSpec(24, (4, 3, 2), (4, 2, 2), (2, 4)),
    "t_dp": TTSpec(60, (3, 4, 5), (2, 2, 4), (3, 4)),
    "t_dp2": TTSpec(24, (2, 2, 6), (2, 2, 4), (3, 4)),
}
# Feature "shared" is looked up in a TT and in a dense table; "f_t_tw_b" shares a table.
FEATURES = {
    "t_tw": ["f_t_tw", "f_t_tw_b"],
    "t_tw2": ["shared"],
    "t_q": ["f_t_q"],
    "t_dp": ["f_t_dp"],
    "t_dp2": ["f_t_dp2"],
    "d_tw": ["f_d_tw"],
    "d_rw": ["f_d_rw"],
    "d_cw": ["f_d_cw", "shared"],
    "d_dp": ["f_d_dp"],
}
ROWS = {name: spec.num_embeddings for name, spec in SPECS.items()} | {
    "d_tw": 40,
    "d_rw": 50,
    "d_cw": 45,
    "d_dp": 30,
}
# On the CPU, FBGEMM pools the rows of data-parallel dense tables of sequence collections.
SEQUENCE_NAMES = tuple(name for name in ROWS if name != "d_dp")
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}


def configs(
    names: Iterable[str] = tuple(ROWS),
    pooling: PoolingType = PoolingType.SUM,
    tt_data_type: DataType = DataType.FP32,
) -> list[EmbeddingBagConfig]:
    """Configs of the named tables; the TT shapes are in `SPECS`."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIM,
            feature_names=FEATURES[name],
            pooling=pooling,
            data_type=tt_data_type if name in SPECS else DataType.FP32,
        )
        for name in names
    ]


def sequence_configs(
    names: Iterable[str] = SEQUENCE_NAMES, tt_data_type: DataType = DataType.FP32
) -> list[EmbeddingConfig]:
    """As `configs`, for a sequence collection."""
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIM,
            feature_names=FEATURES[name],
            data_type=tt_data_type if name in SPECS else DataType.FP32,
        )
        for name in names
    ]


def specs_of(tables: Iterable[BaseEmbeddingConfig]) -> dict[str, TTSpec]:
    return {table.name: SPECS[table.name] for table in tables if table.name in SPECS}


def collection(
    tables: Sequence[EmbeddingBagConfig], is_weighted: bool = False, device: str = "cpu"
) -> TTEmbeddingBagCollection:
    return TTEmbeddingBagCollection(
        list(tables), specs_of(tables), is_weighted, torch.device(device)
    )


def sequence_collection(
    tables: Sequence[EmbeddingConfig], device: str = "cpu", need_indices: bool = False
) -> TTEmbeddingCollection:
    return TTEmbeddingCollection(list(tables), specs_of(tables), torch.device(device), need_indices)


def generators(
    names: Iterable[str], world_size: int, owners: Mapping[str, int] | None = None
) -> dict[str, ParameterShardingGenerator]:
    """Placement of every table, told by its name; `owners` moves table-wise ones.

    An owner of -1 makes a TT table data-parallel.
    """
    last = world_size - 1
    placed = {"t_tw": last, "t_tw2": last, "t_q": 0, "t_dp": -1, "t_dp2": -1} | dict(owners or {})
    found: dict[str, ParameterShardingGenerator] = {}
    for name in names:
        if name in SPECS:
            tt = SPECS[name]
            owner = placed[name]
            found[name] = tt_data_parallel(tt=tt) if owner < 0 else tt_table_wise(owner, tt=tt)
        elif name == "d_tw":
            found[name] = table_wise(placed.get(name, 0), compute_kernel="fused")
        elif name == "d_rw":
            found[name] = row_wise(compute_kernel="fused")
        elif name == "d_cw":
            found[name] = column_wise(ranks=list(range(world_size)), compute_kernel="fused")
        else:
            found[name] = data_parallel()
    return found


@dataclass
class ToyBatch(Pipelineable):
    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ToyBatch:
        return ToyBatch(self.features.to(device, non_blocking), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> ToyBatch:
        return self


def make_batch(
    names: Iterable[str],
    step: int,
    rank: int,
    batch_size: int = 6,
    is_weighted: bool = False,
    dtype: torch.dtype = torch.int64,
    max_length: int = 3,
) -> ToyBatch:
    """`batch_size` examples with bags of 0 to `max_length` ids, told by step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = {feature: ROWS[name] for name in reversed(list(names)) for feature in FEATURES[name]}
    rows = {f: min(ROWS[name] for name in names if f in FEATURES[name]) for f in rows}
    lengths = torch.randint(0, max_length + 1, (len(rows), batch_size), generator=generator)
    values = [
        torch.randint(0, limit, (int(length.sum()),), generator=generator)
        for limit, length in zip(rows.values(), lengths, strict=True)
    ]
    num_values = int(lengths.sum())
    weights = torch.rand(num_values, generator=generator) + 0.5 if is_weighted else None
    features = KeyedJaggedTensor(
        list(rows),
        torch.cat(values).to(dtype),
        weights=weights,
        lengths=lengths.flatten().to(dtype),
    )
    return ToyBatch(features, torch.randn(batch_size, generator=generator))


class ToyModel(nn.Module):
    """Embeddings of one or two collections, a linear layer, squared error summed over the batch.

    Args:
        ebc: pooled collection; None for none.
        tables: its tables.
        ec: sequence collection; None for none.
    """

    def __init__(
        self,
        ebc: nn.Module | None,
        tables: Sequence[EmbeddingBagConfig] = (),
        ec: EmbeddingCollection | None = None,
    ) -> None:
        super().__init__()
        assert ebc is not None or not tables
        self.ebc = ebc
        self.ec = ec
        self.pooled_names = _flat(get_embedding_names_by_table(list(tables)))
        self.sequence_names = [] if ec is None else _flat(ec.embedding_names_by_table())
        self.linear = nn.Linear(DIM * len(self.pooled_names + self.sequence_names), 1)

    def forward(self, batch: ToyBatch) -> tuple[Tensor, Tensor]:
        parts = []
        if self.ebc is not None:
            pooled = self.ebc(batch.features)
            parts += [pooled[name] for name in self.pooled_names]
        if self.ec is not None:
            parts.append(weighted_sums(self.ec(batch.features), self.sequence_names))
        logits = self.linear(torch.cat(parts, 1)).squeeze(1)
        loss = ((logits - batch.labels) ** 2).sum() / 8
        return loss.view(1), logits.detach()


def _flat(names_by_table: Iterable[Iterable[str]]) -> list[str]:
    return [name for names in names_by_table for name in names]


@torch.fx.wrap
def weighted_sums(sequences: Mapping[str, JaggedTensor], names: Sequence[str]) -> Tensor:
    """(B, F * D): per example the sum of its rows, each weighted by its place in the sequence."""
    sums = []
    for name in names:
        rows_LD, lengths_B = sequences[name].values(), sequences[name].lengths().long()
        examples_L = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        starts_B = lengths_B.cumsum(0) - lengths_B
        places_L = torch.arange(len(rows_LD)) - starts_B[examples_L]
        weighted_LD = rows_LD / (1 + places_L).unsqueeze(1)
        sums.append(rows_LD.new_zeros(len(lengths_B), DIM).index_add(0, examples_L, weighted_LD))
    return torch.cat(sums, 1)


def sequence_model(names: Sequence[str] = SEQUENCE_NAMES, device: str = "cpu") -> ToyModel:
    """A model with a sequence collection of the named tables."""
    return ToyModel(None, ec=sequence_collection(sequence_configs(names), device))


def model_of_both(names: Sequence[str] = tuple(ROWS), device: str = "cpu") -> ToyModel:
    """A model with a pooled collection of the named tables, and a sequence one beside it."""
    tables = configs(names)
    sequences = sequence_configs([name for name in names if name in SEQUENCE_NAMES])
    return ToyModel(
        collection(tables, device=device), tables, sequence_collection(sequences, device)
    )


def train_unsharded(
    model: ToyModel,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[Sequence[ToyBatch]],
) -> None:
    """Steps on the mean of the ranks' losses, as TorchRec and DDP do together."""
    optimizer = make_optimizer(list(model.parameters()))
    for ranks in batches:
        optimizer.zero_grad()
        losses = [model(batch)[0] for batch in ranks]
        (torch.stack(losses).sum() / len(losses)).backward()
        optimizer.step()


def shard(
    model: ToyModel,
    plan: Mapping[str, ParameterShardingGenerator],
    fused_params: dict[str, Any] | None = SGD,
    num_dist_groups: int = 1,
    env: ShardingEnv | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    device: str = "cpu",
) -> DistributedModelParallel:
    """`model` with its collections sharded by `plan` over all ranks."""
    entries = {}
    for path, sharder in (
        ("ebc", TTEmbeddingBagCollectionSharder()),
        ("ec", TTEmbeddingCollectionSharder()),
    ):
        module = getattr(model, path)
        if module is not None:
            entries[path] = construct_module_sharding_plan(
                module,
                {table.name: plan[table.name] for table in table_configs(module)},
                sharder=sharder,
                world_size=dist.get_world_size(),
                local_size=dist.get_world_size(),
                device_type=torch.device(device).type,
            )
    return DistributedModelParallel(
        model,
        env=env,
        device=torch.device(device),
        plan=ShardingPlan(entries),
        sharders=get_ecorec_sharders(fused_params, qcomm_codecs_registry, num_dist_groups),
    )


def optimizer_of(
    model: DistributedModelParallel,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    wrapper: type[KeyedOptimizerWrapper] = KeyedOptimizerWrapper,
) -> CombinedOptimizer:
    """The fused optimizers of `model` and one of the user's for everything else."""
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return CombinedOptimizer([model.fused_optimizer, wrapper(rest, make_optimizer)])


def train_sharded(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, batches: Iterable[ToyBatch]
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch)[0].sum().backward()
        optimizer.step()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors; those of sharded tables have values on rank 0 only."""
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            whole = torch.zeros(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
            value.gather(0, whole)
            state[name] = torch.empty(0) if whole is None else whole
        else:
            state[name] = value.detach().clone()
    return state
