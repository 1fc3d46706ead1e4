"""What `ecorec bench lookup` measures: cells (batches) and contenders (ways to compute a step)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ecorec_torchrec.bench.counters import Work, Workload, count, single_table
from ecorec_torchrec.bench.measure import zipf_ids
from ecorec_torchrec.kernels import baselines
from ecorec_torchrec.kernels.baselines import Pattern, baseline_embedding_bag
from ecorec_torchrec.kernels.tt_index import index_plan
from ecorec_torchrec.kernels.tt_lookup.op import tt_lookup
from ecorec_torchrec.tt import TTSpec, init_cores_

# Small enough that cores and tables stay what they are over hundreds of steps.
_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Cell:
    """One batch to measure."""

    id_order: str
    """"hashed", "frequency", or "trace:NAME"."""
    ids_L: Tensor
    offsets: Tensor
    """(B+1,)"""
    spec: TTSpec

    def head(self, num_lookups: int) -> Cell:
        """The first bags, with about so many lookups."""
        num_bags = max(1, int(torch.searchsorted(self.offsets, num_lookups, right=True)) - 1)
        num_bags = min(num_bags, len(self.offsets) - 1)
        offsets = self.offsets[: num_bags + 1]
        return Cell(self.id_order, self.ids_L[: int(offsets[-1])], offsets, self.spec)

    def workload(self) -> Workload:
        return Workload.of(self.ids_L, self.offsets, self.spec)

    def to(self, device: torch.device) -> Cell:
        return Cell(self.id_order, self.ids_L.to(device), self.offsets.to(device), self.spec)

    def random_cores(self) -> list[Tensor]:
        cores = [torch.empty(shape) for shape in self.spec.core_shapes]
        init_cores_(cores, self.spec, entry_std=0.1, generator=torch.Generator().manual_seed(1))
        return [core.to(self.ids_L.device) for core in cores]

    def random_grad(self) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        shape = len(self.offsets) - 1, self.spec.embedding_dim
        return torch.randn(shape, generator=generator).to(self.ids_L.device)


@dataclass(frozen=True)
class CellPlan:
    """A cell whose ids are not drawn yet."""

    id_order: str
    lookups: int
    spec: TTSpec
    bag_length: int
    draw: Callable[[], Tensor]
    """The ids."""

    @property
    def key(self) -> tuple[str, ...]:
        """As in the columns `id_order, lookups, rows, dim, rank` of the CSV file."""
        spec = self.spec
        numbers = self.lookups, spec.num_embeddings, spec.embedding_dim, spec.ranks[0]
        return self.id_order, *map(str, numbers)

    def make(self) -> Cell:
        offsets = torch.arange(self.lookups // self.bag_length + 1) * self.bag_length
        return Cell(self.id_order, self.draw(), offsets, self.spec)


def zipf_cells(
    id_orders: Iterable[str],
    lookups: Iterable[int],
    tables: Iterable[tuple[int, int, int]],
    bag_length: int,
) -> Iterator[CellPlan]:
    """All cells of id order x (rows, dim, rank) x lookups; bags of equal length."""
    for num_rows, dim, rank in tables:
        spec = TTSpec.suggest(num_rows, dim, rank=rank)
        for id_order in id_orders:
            for wanted in lookups:
                num_lookups = max(wanted // bag_length, 1) * bag_length
                draw = partial(zipf_ids, num_lookups, num_rows, id_order=id_order)  # type: ignore[arg-type]
                yield CellPlan(id_order, num_lookups, spec, bag_length, draw)


def trace_cells(
    path: Path, tables: Iterable[tuple[int, int, int]], bag_length: int
) -> Iterator[CellPlan]:
    """The ids of a file, one a line, under each distinct (dim, rank) of the tables.

    Raises:
        ValueError: a line is not an id >= 0, or the file has fewer ids than one bag.
    """
    ids = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip().isdigit():
            raise ValueError(f"{path}, line {number}: {line.strip()!r} is not an id >= 0")
        ids.append(int(line))
    num_lookups = len(ids) // bag_length * bag_length
    if not num_lookups:
        raise ValueError(f"{path} has {len(ids)} ids, a bag has {bag_length}")
    ids_L = torch.tensor(ids[:num_lookups])
    for dim, rank in dict.fromkeys((dim, rank) for _, dim, rank in tables):
        spec = TTSpec.suggest(max(ids) + 1, dim, rank=rank)
        yield CellPlan(f"trace:{path.stem}", num_lookups, spec, bag_length, ids_L.clone)


class Step(Protocol):
    """A table in training, one batch: what is timed."""

    def forward(self) -> Tensor: ...
    def backward(self, output: Tensor, grad: Tensor) -> None: ...
    def update(self) -> None: ...


@dataclass(frozen=True)
class Contender:
    """A way to compute a step.

    Attributes:
        pattern: what is computed, as in the CSV file.
        engine: by what: torch, numba, triton or fbgemm.
        counter: its key in `counters.PATTERNS`.
        make: builds the step of a cell.
        library: what it imports beside torch.
    """

    pattern: str
    engine: str
    counter: str
    make: Callable[[Cell], Step]
    library: str = ""

    @property
    def is_dense(self) -> bool:
        return self.counter == "dense"

    @property
    def is_importable(self) -> bool:
        try:
            import_module(self.library or "torch")
        except Exception:  # a library that does not fit the others fails in many ways
            return False
        return True

    def work(self, workload: Workload) -> Work:
        return count(self.counter, workload)

    def needed_bytes(self, workload: Workload) -> int:
        """Estimate of the memory beside ids and output. PyTorch gathers the operands of its
        products, which doubles what the pattern holds."""
        factor = 2 if self.engine == "torch" and not self.is_dense else 1
        return factor * self.work(workload).workspace_bytes


class _TTStep:
    """TT cores with an optimizer of `torch.optim`'s kind."""

    def __init__(
        self,
        cell: Cell,
        lookup: Callable[[Cell, list[Tensor]], Tensor],
        make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.cell, self.lookup = cell, lookup
        # One row per core row: what row-wise Adagrad keeps an accumulator for.
        self.parameters = [torch.nn.Parameter(core.flatten(1)) for core in cell.random_cores()]
        self.optimizer = make_optimizer(self.parameters)

    def forward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        shapes = zip(self.parameters, self.cell.spec.core_shapes, strict=True)
        return self.lookup(self.cell, [core.view(shape) for core, shape in shapes])

    def backward(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)

    def update(self) -> None:
        self.optimizer.step()


class _DenseStep:
    """`torch.nn.EmbeddingBag` with sparse gradients and SGD."""

    def __init__(self, cell: Cell) -> None:
        self.cell, device = cell, cell.ids_L.device
        self.table = torch.nn.EmbeddingBag(
            cell.spec.num_embeddings, cell.spec.embedding_dim, mode="sum", sparse=True,
            include_last_offset=True, device=device,
        )  # fmt: skip
        self.optimizer = _sgd([self.table.weight])

    def forward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        return self.table(self.cell.ids_L, self.cell.offsets)

    def backward(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)

    def update(self) -> None:
        self.optimizer.step()

    def weight(self) -> Tensor:
        return self.table.weight.detach()


class _TBEStep:
    """FBGEMM's table-batched embedding; its optimizer runs inside backward."""

    def __init__(self, cell: Cell, optimizer: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        on_cpu = cell.ids_L.device.type == "cpu"
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        device = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.cell = cell
        self.table = SplitTableBatchedEmbeddingBagsCodegen(
            [(cell.spec.num_embeddings, cell.spec.embedding_dim, location, device)],
            optimizer=EmbOptimType[optimizer],
            learning_rate=_LEARNING_RATE,
        )
        self.weight().normal_()

    def forward(self) -> Tensor:
        return self.table(self.cell.ids_L, self.cell.offsets)

    def backward(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)

    def update(self) -> None:
        pass

    def weight(self) -> Tensor:
        return self.table.split_embedding_weights()[0].detach()


def contenders(device: torch.device) -> list[Contender]:
    """All for the device, ours first. Triton also runs on the CPU if it interprets its kernels."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    fast = "triton" if device.type == "cuda" or interpreted else "numba"
    fast_counter = "grouped_triton" if fast == "triton" else "grouped_fused"
    ours = [
        Contender("grouped", fast, fast_counter, _tt(partial(_grouped, engine=fast), _sgd), fast),
        Contender(
            "grouped_rowwise_adagrad", fast, fast_counter,
            _tt(partial(_grouped, engine=fast), _rowwise_adagrad), "torchrec",
        ),
        Contender("grouped", "torch", "grouped", _tt(partial(_grouped, engine="torch"), _sgd)),
    ]  # fmt: skip
    papers: list[tuple[str, str, str, Callable[[], Pattern]]] = [
        ("eco_rec", "torch", "eco_rec", lambda: baselines.EcoRec(None)),
        ("eco_rec_micro_batched", "torch", "eco_rec_micro_batched", lambda: baselines.EcoRec()),
        ("el_rec", "torch", "el_rec", lambda: baselines.ELRec()),
        ("tt_rec", "torch", "tt_rec", lambda: baselines.TTRec()),
        ("tt_rec_chunk_20000", "torch", "tt_rec_chunk_20000", lambda: baselines.TTRec(20_000)),
    ]
    if fast == "numba":
        papers = [
            ("eco_rec_tuned", "numba", "eco_rec_tuned", lambda: baselines.NumbaEcoRecTuned()),
            ("eco_rec", "numba", "eco_rec", lambda: baselines.NumbaEcoRec(None)),
            (
                "eco_rec_micro_batched", "numba", "eco_rec_micro_batched",
                lambda: baselines.NumbaEcoRec(),
            ),
            ("grouped_plain", "numba", "grouped_fused", lambda: baselines.NumbaGroupedPlain()),
            *papers,
        ]  # fmt: skip
    dense = [
        Contender(
            "dense_sgd", "fbgemm", "dense", partial(_TBEStep, optimizer="EXACT_SGD"), "fbgemm_gpu"
        ),
        Contender(
            "dense_rowwise_adagrad", "fbgemm", "dense",
            partial(_TBEStep, optimizer="EXACT_ROWWISE_ADAGRAD"), "fbgemm_gpu",
        ),
        Contender("dense_sgd", "torch", "dense", _DenseStep),
    ]  # fmt: skip
    return [
        *ours,
        *(
            Contender(
                name, engine, counter, _tt(partial(_baseline, make_pattern=make), _sgd),
                "numba" if engine == "numba" else "",
            )
            for name, engine, counter, make in papers
        ),
        *dense,
    ]  # fmt: skip


def _tt(
    lookup: Callable[[Cell, list[Tensor]], Tensor],
    make_optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
) -> Callable[[Cell], Step]:
    return partial(_TTStep, lookup=lookup, make_optimizer=make_optimizer)


def _grouped(cell: Cell, cores: list[Tensor], engine: str) -> Tensor:
    plan = index_plan(cell.ids_L, cell.offsets, single_table(cell.spec))
    return tt_lookup(
        plan, cores, None, num_features=1, mean=False, output_dtype=cores[0].dtype,
        workspace_bytes=None, engine=engine,
    )  # fmt: skip


def _baseline(cell: Cell, cores: list[Tensor], make_pattern: Callable[[], Pattern]) -> Tensor:
    return baseline_embedding_bag(
        cell.ids_L, cell.offsets, cores, cell.spec, make_pattern(), include_last_offset=True
    )


def _sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)


def _rowwise_adagrad(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    return RowWiseAdagrad(parameters, lr=_LEARNING_RATE)
