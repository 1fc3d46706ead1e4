"""What memory tiers cost: training through a cache of few rows beside the whole table in memory.

One table under FBGEMM's table-batched embedding with row-wise Adagrad, a small MLP behind it. The
same batches are trained twice from equal weights: with every row in memory, and with S slots whose
rows come from a file. The losses of both must be equal to the last bit; if they are not there is
no figure.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ecorec_torchrec.bench.measure import (
    ZIPF_EXPONENT,
    append_rows,
    check_columns,
    git_sha,
    torch_threads,
    zipf_ids,
)
from ecorec_torchrec.bench.raw_file import RawFile
from ecorec_torchrec.tiers import RowInit, RowLayout, Ticket, TieredTable, TierSpec
from ecorec_torchrec.train.profiling import TraceIds
from ecorec_torchrec.train.report import print_table

COLUMNS = (
    "policy", "cache_fraction", "prefetch_depth", "file_mode", "step_ms", "step_over_dram",
    "hit_rate", "io_ms", "wait_ms", "dram_ms", "step_over_bound", "lookup_share", "worker_ms",
    "rows_read", "rows_written", "postponed", "ids", "rows", "dim", "lookups", "unique_rows",
    "steps", "threads", "torch", "fbgemm", "numpy", "git_sha",
)  # fmt: skip
_SHOWN = COLUMNS[:9] + COLUMNS[9:11]
BOUND = 1.3
"""A step through the tiers should take at most this many times the longer of the step with the
whole table in memory and the I/O alone."""

_DEFAULT_ROWS = 1_000_000
_HIDDEN = 32
_LEARNING_RATE = 0.05
_FILL_ROWS = 1 << 16
_PAGE_BYTES = 4096

FileMode = Literal["mapped", "direct"]


@dataclass(kw_only=True, slots=True)
class TiersOptions:
    """Measure training steps of a table behind a cache, over policies, cache sizes and lookahead.

    Every row of the table is in the file beforehand, so that nothing is read for nothing. The I/O
    of a step is also measured alone, on a file of the same size. Run it on an otherwise idle
    machine of at least two cores: one trains, one fetches.
    """

    csv: str = "docs/benchmarks/tiers.csv"
    """Rows are appended to this file; empty: no file."""

    folder: str = "."
    """A folder on the storage to measure; the files made there are removed."""

    trace: str | None = None
    """A text file of ids, one a line, which are looked up in that order; without it Zipf ids."""

    rows: int | None = None
    """Rows of the table; without it a million, or what the ids of the trace need."""

    dim: int = 64
    """Columns of the table."""

    lookups: int = 32_768
    """Lookups of a batch."""

    bag_size: int = 16
    """Lookups of an example."""

    policies: tuple[Literal["lfu", "lru"], ...] = ("lfu", "lru")
    """Which rows leave first."""

    cache_fractions: tuple[float, ...] = (0.1,)
    """Slots, as a fraction of the rows."""

    prefetch: tuple[int, ...] = (0, 1, 2, 3, 4)
    """How many batches ahead rows are fetched."""

    file_modes: tuple[FileMode, ...] = ("mapped", "direct")
    """mapped: the file in the page cache; direct: past it, so that every miss goes to storage."""

    steps: int = 30
    """Steps that are timed."""

    warmup_steps: int = 10
    """Steps before that, in which the cache fills."""

    threads: int = 1
    """Threads that train; the table's own thread comes on top."""

    def __post_init__(self) -> None:
        for name in ("dim", "lookups", "bag_size", "steps", "warmup_steps", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1")
        if self.lookups % self.bag_size:
            raise ValueError(f"--lookups {self.lookups}: no multiple of --bag-size {self.bag_size}")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"--rows {self.rows}: at least 1")
        for fraction in self.cache_fractions:
            if not 0 < fraction <= 1:
                raise ValueError(f"--cache-fractions {fraction}: above 0, at most 1")
        if not self.prefetch or min(self.prefetch) < 0:
            raise ValueError(f"--prefetch {self.prefetch}: numbers of at least 0")
        if not Path(self.folder).is_dir():
            raise ValueError(f"--folder {self.folder}: no such folder")

    @property
    def num_batches(self) -> int:
        """What training takes, and what is fetched ahead while its last step runs."""
        return self.warmup_steps + self.steps + max(self.prefetch)


@dataclass(frozen=True)
class Workload:
    """A table and what is looked up in it.

    Attributes:
        name: in the CSV file.
        num_rows: N.
        batches: ids, (L,) each.
    """

    name: str
    num_rows: int
    batches: list[Tensor]

    @classmethod
    def of(cls, options: TiersOptions) -> Workload:
        """Zipf ids, or those of the trace.

        Raises:
            ValueError: the trace is no list of ids below `rows`, or too short.
        """
        needed = options.num_batches * options.lookups
        if options.trace is None:
            num_rows = options.rows or _DEFAULT_ROWS
            ids = zipf_ids(needed, num_rows, id_order="hashed")
            return cls(f"zipf_{ZIPF_EXPONENT}", num_rows, list(ids.split(options.lookups)))
        trace = TraceIds(options.trace, num_embeddings=options.rows)
        num_ids = trace.num_samples or 0
        if num_ids < needed:
            raise ValueError(
                f"--trace {options.trace} has {num_ids} ids, {needed} are needed: lower "
                "--lookups or --steps"
            )
        [(name, num_rows)] = trace.num_embeddings.items()
        found = itertools.islice(trace.batches(options.lookups), options.num_batches)
        return cls(name, num_rows, [torch.from_numpy(batch[name].ids_L) for batch in found])


@dataclass(frozen=True)
class InMemory:
    """Training with the whole table in memory.

    Attributes:
        step_ms: mean over the timed steps.
        lookup_share: of a step, forward and backward of the lookup with the update of its rows.
        losses: of every step.
    """

    step_ms: float
    lookup_share: float
    losses: list[float]


def run_tiers(options: TiersOptions) -> Iterator[dict[str, object]]:
    """Measures all combinations, and appends each row to the CSV file as it comes.

    Yields:
        One row per file mode, policy, cache fraction and lookahead: `COLUMNS` to values.

    Raises:
        ValueError: the trace cannot be used, the CSV file has other columns, or a cache is too
            small for a batch.
        RuntimeError: the losses differ from those with the whole table in memory.
        OSError: the folder's file system lacks room, or direct reads.

    Example::

        print_rows(run_tiers(TiersOptions(csv="", policies=("lfu",), prefetch=(0, 2))))
    """
    path = Path(options.csv) if options.csv else None
    if path is not None:
        check_columns(path, COLUMNS)
    workload = Workload.of(options)
    with (
        torch_threads(options.threads),
        tempfile.TemporaryDirectory(prefix="tiers-", dir=options.folder) as folder,
    ):
        bench = _TiersBench(options, workload, Path(folder))
        for row in bench.rows():
            if path is not None:
                append_rows(path, COLUMNS, [row])
            yield row


def print_rows(rows: Iterable[dict[str, object]]) -> None:
    """Prints rows of `run_tiers` as a table."""
    found = list(rows)
    title = f"{found[0]['ids']}, {found[0]['rows']} rows" if found else "tiers"
    print_table(title, _SHOWN, [[str(row[column]) for column in _SHOWN] for row in found])
    for row in found:
        if row["prefetch_depth"] and float(str(row["step_over_bound"])) > BOUND:
            settings = ", ".join(f"{name} {row[name]}" for name in COLUMNS[:4])
            print(f"above {BOUND} x max(dram_ms, io_ms): {settings}")


class _TiersBench:
    def __init__(self, options: TiersOptions, workload: Workload, folder: Path) -> None:
        self._options, self._workload, self._folder = options, workload, folder
        dim = options.dim
        self._init = RowInit(dim, seed=1)
        self._layout = RowLayout((("weight", dim, torch.float32), ("momentum1", 1, torch.float32)))
        timed = workload.batches[options.warmup_steps :][: options.steps]
        self._unique_rows = sum(len(ids.unique()) for ids in timed) / len(timed)

    def rows(self) -> Iterator[dict[str, object]]:
        options = self._options
        in_memory = self._in_memory()
        for mode in options.file_modes:
            raw = RawFile(
                self._folder / "raw",
                self._workload.num_rows,
                self._layout.record_bytes,
                direct=mode == "direct",
            )
            try:
                for policy, fraction, depth in itertools.product(
                    options.policies, options.cache_fractions, options.prefetch
                ):
                    spec = TierSpec(
                        max(1, int(self._workload.num_rows * fraction)),
                        str(self._folder),
                        prefetch_batches=depth,
                        policy=policy,
                        direct_reads=mode == "direct",
                    )
                    yield self._measure(spec, fraction, mode, raw, in_memory)
            finally:
                raw.close()

    def _in_memory(self) -> InMemory:
        num_rows, options = self._workload.num_rows, self._options
        model = _Model(num_rows, options)
        for ids in torch.arange(num_rows).split(_FILL_ROWS):
            model.weight[ids] = self._init.rows(ids)
        model.momentum.zero_()
        for step, ids in enumerate(self._workload.batches[: options.warmup_steps + options.steps]):
            if step == options.warmup_steps:
                start, model.lookup_ms = time.perf_counter(), 0.0
            model.train(step, ids)
        step_ms = (time.perf_counter() - start) * 1e3 / options.steps
        return InMemory(step_ms, model.lookup_ms / options.steps / step_ms, model.losses)

    def _measure(
        self, spec: TierSpec, fraction: float, mode: FileMode, raw: RawFile, in_memory: InMemory
    ) -> dict[str, object]:
        options, workload = self._options, self._workload
        step_ms, counts, losses = self._train_tiered(spec)
        for step, (loss, wanted) in enumerate(zip(losses, in_memory.losses, strict=True)):
            if loss != wanted:
                raise RuntimeError(
                    f"{spec.policy}, cache {fraction}, prefetch {spec.prefetch_batches}, {mode}: "
                    f"loss {loss!r} at step {step} differs from {wanted!r} in memory"
                )
        # The table's thread is some batches ahead: its work is counted by its own batches.
        per_batch = {name: value / max(1, counts["batches"]) for name, value in counts.items()}
        places = ("file_bytes_read", "file_bytes_written")
        size = _PAGE_BYTES if mode == "direct" else self._layout.record_bytes
        io_ms = raw.time_ms(*(round(per_batch[name] / size) for name in places))
        values = (
            spec.policy, fraction, spec.prefetch_batches, mode, round(step_ms, 2),
            round(step_ms / in_memory.step_ms, 3), round(float(counts["hit_rate"]), 4),
            round(io_ms, 3), round(counts["wait_ms"] / options.steps, 2),
            round(in_memory.step_ms, 2),
            round(step_ms / max(in_memory.step_ms, io_ms), 3), round(in_memory.lookup_share, 3),
            round(per_batch["prefetch_ms"], 2), round(per_batch["file_rows"]),
            round(per_batch["file_rows_written"]), counts["postponed"], workload.name,
            workload.num_rows, options.dim, options.lookups, round(self._unique_rows),
            options.steps, options.threads, torch.__version__, _fbgemm_version(), np.__version__,
            git_sha(),
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))

    def _train_tiered(self, spec: TierSpec) -> tuple[float, dict[str, int | float], list[float]]:
        """Milliseconds of a step, the table's counters over the timed steps, all losses."""
        options, workload = self._options, self._workload
        model = _Model(spec.cache_rows, options)
        slots = {"weight": model.weight, "momentum1": model.momentum}
        table = TieredTable("bench", workload.num_rows, self._layout, spec, self._init, slots)
        try:
            for ids in torch.arange(workload.num_rows).split(_FILL_ROWS):
                state = torch.zeros(len(ids), 1)
                table.write(ids, {"weight": self._init.rows(ids), "momentum1": state})
            coming = iter(workload.batches)
            in_flight: deque[Ticket] = deque()
            for step in range(options.warmup_steps + options.steps):
                if step == options.warmup_steps:
                    table.statistics()
                    start = time.perf_counter()
                while len(in_flight) <= spec.prefetch_batches:
                    in_flight.append(table.prefetch(next(coming)))
                ticket = in_flight.popleft()
                model.train(step, table.remap(ticket))
                table.release(ticket, dirty=True)
            step_ms = (time.perf_counter() - start) * 1e3 / options.steps
            return step_ms, table.statistics(), model.losses
        finally:
            table.close()


class _Model:
    """A lookup in rows (or slots) of one table, and an MLP.

    Attributes:
        weight, momentum: of the table, shared with it.
        losses: of every step.
        lookup_ms: time spent in the lookup, forward and backward.
    """

    def __init__(self, num_rows: int, options: TiersOptions) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._lookup = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, options.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=_LEARNING_RATE,
        )
        [self.weight] = self._lookup.split_embedding_weights()
        [(self.momentum,)] = self._lookup.split_optimizer_states()
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._mlp = nn.Sequential(
                nn.Linear(options.dim, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)
            )
        self._optimizer = torch.optim.SGD(self._mlp.parameters(), lr=_LEARNING_RATE)
        self._offsets = torch.arange(0, options.lookups + 1, options.bag_size)
        num_steps, num_bags = options.warmup_steps + options.steps, len(self._offsets) - 1
        self._labels = torch.randint(2, (num_steps, num_bags, 1), generator=generator).float()
        self.losses: list[float] = []
        self.lookup_ms = 0.0

    def train(self, step: int, rows_L: Tensor) -> None:
        start = time.perf_counter()
        pooled = self._lookup(rows_L, self._offsets)
        looked_up = time.perf_counter()
        leaf = pooled.detach().requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(self._mlp(leaf), self._labels[step])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())
        back = time.perf_counter()
        pooled.backward(leaf.grad)
        self.lookup_ms += (looked_up - start + time.perf_counter() - back) * 1e3


def _fbgemm_version() -> str:
    import fbgemm_gpu

    return fbgemm_gpu.__version__
