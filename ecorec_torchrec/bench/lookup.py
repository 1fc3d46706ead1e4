"""Speed and memory of one training step of a table, by all patterns and engines, side by side.

All contenders of a cell run in turns in one process, on the same ids, and are checked against the
same float64 result before they are timed.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ecorec_torchrec.bench.counters import Work, single_table
from ecorec_torchrec.bench.lookup_cases import (
    Cell,
    CellPlan,
    Contender,
    Step,
    contenders,
    trace_cells,
    zipf_cells,
)
from ecorec_torchrec.bench.measure import (
    PeakMemory,
    append_rows,
    available_bytes,
    check_columns,
    clock,
    git_sha,
    keep_freed_memory,
    sgemm_peak_gflops,
    torch_threads,
)
from ecorec_torchrec.kernels.tt_index import index_plan
from ecorec_torchrec.kernels.tt_lookup import batched_tt_embedding_bag
from ecorec_torchrec.kernels.tt_lookup.op import tt_lookup

COLUMNS = (
    "pattern", "engine", "device", "id_order", "lookups", "rows", "dim", "rank", "dtype",
    "threads", "forward_ms", "backward_ms", "update_ms", "step_ms", "peak_workspace_mib", "gflop",
    "gbyte", "fraction_of_peak", "max_relative_error", "torch", "triton", "git_sha",
)  # fmt: skip
MAX_RELATIVE_ERROR = 1e-4
"""Against float64, of the largest value of a tensor; above it nothing is compared."""
_MAX_TF32_RELATIVE_ERROR = 1e-2

_MIB = 2**20
_PROBE_LOOKUPS = 2048
_TRUTH_LOOKUPS = 512
_MIN_STEPS = 3
_SECONDS_OF_RUNS = 4.0
_LONG_STEP_SECONDS = 5.0
# The first step of a turn finds in the caches what another contender left there.
_STEPS_PER_TURN = 2
_MEMORY_SHARE = 0.8


@dataclass(kw_only=True, slots=True)
class LookupOptions:
    """Measure a training step of one TT table: our kernels, the papers' patterns, dense tables.

    The default is 24 cells: 2 id orders x 3 batch sizes x 4 tables, each at one thread and at all.
    """

    csv: str = "docs/benchmarks/lookup.csv"
    """Rows are appended to this file."""

    report: str = ""
    """Write the tables of the whole CSV file to this Markdown file, below its marker line."""

    plot: str = ""
    """Draw the step times of the CSV file into this PNG file."""

    tables: tuple[tuple[int, int, int], ...] = (
        (1_000_000, 64, 16),
        (1_000_000, 64, 32),
        (40_000_000, 128, 64),
        (40_000_000, 128, 128),
    )
    """Rows, dimension and rank of each table."""

    lookups: tuple[int, ...] = (81_920, 1_000_000, 2_621_440)
    """Lookups per batch."""

    id_orders: tuple[str, ...] = ("hashed", "frequency")
    """How the Zipf ids lie in the table."""

    bag_length: int = 20
    """Lookups per bag."""

    trace: tuple[str, ...] = ()
    """Files of ids, one a line: each is measured under every dimension and rank of `tables`, in
    place of the Zipf batches."""

    patterns: tuple[str, ...] = ()
    """Measure only these patterns; without it all."""

    threads: tuple[int, ...] = (1, 0)
    """Numbers of CPU threads; 0: all cores."""

    device: str = "cpu"
    """cpu or cuda."""

    repeats: int = 11
    """Steps per contender: fewer, but 3, where they would take more than 4 seconds. A step of more
    than 5 seconds is done once, and its check is the run."""

    max_seconds: float = 60.0
    """A contender that needs more in a cell is skipped."""

    cells: tuple[int, ...] = ()
    """Measure only these of the cells, counted from 1 in the order in which they come."""

    resume: bool = False
    """Skip cells of which the CSV file has rows of the same commit and version of torch."""

    minutes: float = 0.0
    """Begin no further cell after so long; 0: no limit. With --resume the benchmark is done in
    pieces."""

    keep_freed_memory: bool = True
    """Have the C library keep freed memory, as the allocators used for training do; without it the
    patterns with large intermediates pay for fresh pages in every step."""

    quick: bool = False
    """A small cell and 3 repeats, to see that everything runs."""

    def __post_init__(self) -> None:
        known = {"hashed", "frequency"}
        if unknown := set(self.id_orders) - known:
            raise ValueError(f"id_orders: {sorted(unknown)} not in {sorted(known)}")
        for name in ("bag_length", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.quick:
            self.tables, self.lookups = ((20_000, 16, 8),), (2_000,)
            self.threads, self.repeats = (1,), 3

    def plans(self) -> Iterator[CellPlan]:
        """The cells to measure."""
        if self.trace:
            paths = map(Path, self.trace)
            plans = [x for path in paths for x in trace_cells(path, self.tables, self.bag_length)]
        else:
            plans = list(zipf_cells(self.id_orders, self.lookups, self.tables, self.bag_length))
        if unknown := [n for n in self.cells if not 1 <= n <= len(plans)]:
            raise ValueError(f"cells: {unknown} not in 1..{len(plans)}")
        return (plan for n, plan in enumerate(plans, 1) if not self.cells or n in self.cells)

    def thread_counts(self) -> tuple[int, ...]:
        if self.device != "cpu":
            return (torch.get_num_threads(),)
        return tuple(dict.fromkeys(n or os.cpu_count() or 1 for n in self.threads))


Run = tuple[float, float, float]
"""Seconds of forward, backward and update."""


@dataclass
class Result:
    """What is known of one contender in one cell; seconds per step, in the order of the runs."""

    contender: Contender
    work: Work
    skipped: str = ""
    relative_error: float | None = None
    error_limit: float = MAX_RELATIVE_ERROR
    peak_bytes: int | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.relative_error is not None and self.relative_error <= self.error_limit

    @property
    def step_ms(self) -> float:
        return 1e3 * min(sum(run) for run in self.runs)

    @property
    def median_step_ms(self) -> float:
        return 1e3 * statistics.median(sum(run) for run in self.runs)

    def part_ms(self, part: int) -> float:
        return 1e3 * min(run[part] for run in self.runs)

    def fraction_of_peak(self, peak_gflops: float) -> float:
        """Useful FLOPs of forward and backward per second, over those of a large product."""
        seconds = min(forward + backward for forward, backward, _ in self.runs)
        return self.work.useful_flops / seconds / 1e9 / peak_gflops


@dataclass
class CellResults:
    """All contenders of a cell at one number of threads."""

    cell: Cell
    threads: int
    peak_gflops: float
    results: list[Result]

    def rows(self) -> Iterator[dict[str, object]]:
        """Lines of the CSV file: times are the best of the runs."""
        for result in self.results:
            yield dict(zip(COLUMNS, self._values(result), strict=True))

    def _values(self, result: Result) -> tuple[object, ...]:
        contender, spec = result.contender, self.cell.spec
        key = (
            contender.pattern, contender.engine, self.cell.ids_L.device.type, self.cell.id_order,
            len(self.cell.ids_L), spec.num_embeddings, spec.embedding_dim,
            "" if contender.is_dense else spec.ranks[0], "float32", self.threads,
        )  # fmt: skip
        times: tuple[object, ...] = ("", "", "", f"skipped: {result.skipped}")
        fraction: object = ""
        if result.runs:
            times = (*(round(result.part_ms(part), 3) for part in range(3)),
                     round(result.step_ms, 3))  # fmt: skip
            if not contender.is_dense:
                fraction = round(result.fraction_of_peak(self.peak_gflops), 4)
        peak, error = result.peak_bytes, result.relative_error
        return (
            *key, *times, "" if peak is None else round(peak / _MIB, 2),
            round(result.work.useful_flops / 1e9, 4), round(result.work.num_bytes / 1e9, 4),
            fraction, "" if error is None else f"{error:.1e}",
            torch.__version__, _triton_version(), git_sha(),
        )  # fmt: skip


def run_lookup(options: LookupOptions) -> Iterator[CellResults]:
    """Measures cell after cell, and appends each to the CSV file as it comes.

    Raises:
        ValueError: a pattern or cell is unknown, or a file cannot be used.
    """
    path = Path(options.csv)
    done = _measured_cells(path) if options.resume else set()
    for results in measure_cells(options, done):
        append_rows(path, COLUMNS, results.rows())
        yield results


def measure_cells(
    options: LookupOptions, done: set[tuple[str, ...]] | None = None
) -> Iterator[CellResults]:
    """Measures cell after cell, but none whose `(*CellPlan.key, threads)` is in `done`."""
    device, start = torch.device(options.device), time.monotonic()
    chosen = contenders(device)
    if unknown := set(options.patterns) - {c.pattern for c in chosen}:
        known = ", ".join(dict.fromkeys(c.pattern for c in chosen))
        raise ValueError(f"patterns: {', '.join(sorted(unknown))} is not one of {known}")
    if options.patterns:
        chosen = [c for c in chosen if c.pattern in options.patterns]
    if options.keep_freed_memory:
        keep_freed_memory()
    for plan in options.plans():
        missing = [n for n in options.thread_counts() if (*plan.key, str(n)) not in (done or ())]
        if not missing:
            continue
        cell = plan.make().to(device)
        truth = _Truth.of(cell)
        for threads in missing:
            if options.minutes and time.monotonic() - start > 60 * options.minutes:
                return
            with torch_threads(threads):
                yield _measure_cell(cell, truth, chosen, threads, options)


def _measured_cells(path: Path) -> set[tuple[str, ...]]:
    """The cells and threads that the CSV file has of this commit and version of torch."""
    check_columns(path, COLUMNS)
    if not path.exists():
        return set()
    names = ("id_order", "lookups", "rows", "dim", "rank", "threads")
    with open(path, encoding="utf-8", newline="") as file:
        return {
            tuple(row[name] for name in names)
            for row in csv.DictReader(file)
            if (row["git_sha"], row["torch"]) == (git_sha(), torch.__version__)
        }


@dataclass(frozen=True)
class _Truth:
    """Output and core gradients of a cell in float64."""

    output_BD: Tensor
    core_grads: list[Tensor]

    @classmethod
    def of(cls, cell: Cell) -> _Truth:
        """By the grouped form in float64, which is itself checked against the product chain of
        every single lookup on the first bags."""
        head = cell.head(_TRUTH_LOOKUPS)
        batch = single_table(cell.spec)

        def grouped(part: Cell, cores: list[Tensor]) -> Tensor:
            plan = index_plan(part.ids_L, part.offsets, batch)
            return tt_lookup(
                plan, cores, None, num_features=1, mean=False, output_dtype=torch.float64,
                workspace_bytes=None, engine="torch",
            )  # fmt: skip

        def chain(part: Cell, cores: list[Tensor]) -> Tensor:
            return batched_tt_embedding_bag(
                part.ids_L, part.offsets, cores, batch, backend="reference"
            )

        error = cls._by(head, grouped).relative_error(cls._by(head, chain))
        assert error < 1e-10, f"the float64 result differs from the reference by {error}"
        return cls._by(cell, grouped)

    @classmethod
    def _by(cls, cell: Cell, lookup) -> _Truth:  # type: ignore[no-untyped-def]
        cores = [core.double().requires_grad_() for core in cell.random_cores()]
        output = lookup(cell, cores)
        return cls(
            output.detach(), list(torch.autograd.grad(output, cores, cell.random_grad().double()))
        )

    def relative_error(self, truth: _Truth) -> float:
        ours = [self.output_BD, *self.core_grads]
        pairs = zip(ours, [truth.output_BD, *truth.core_grads], strict=True)
        return max(_relative_error(x, y) for x, y in pairs)


def _relative_error(value: Tensor, truth: Tensor) -> float:
    difference = float((value.detach().to(truth) - truth).abs().max())
    return difference / max(float(truth.abs().max()), 1e-300)


def _measure_cell(
    cell: Cell, truth: _Truth, chosen: list[Contender], threads: int, options: LookupOptions
) -> CellResults:
    device, workload, grad = cell.ids_L.device, cell.workload(), cell.random_grad()
    is_ieee = device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"
    error_limit = MAX_RELATIVE_ERROR if is_ieee else _MAX_TF32_RELATIVE_ERROR
    peaks = [sgemm_peak_gflops(device)]
    results, steps, repeats = [], [], []
    for contender in chosen:
        result = Result(contender, contender.work(workload), error_limit=error_limit)
        results.append(result)
        needed = contender.needed_bytes(workload)
        if not contender.is_importable:
            result.skipped = f"needs {contender.library}"
            continue
        if needed > _MEMORY_SHARE * available_bytes(device):
            result.skipped = f"needs {needed / 2**30:.1f} GiB"
            continue
        seconds = _estimate_seconds(contender, cell, result.work)
        is_long = seconds > _LONG_STEP_SECONDS
        needed_seconds = seconds * (1 if is_long else 1 + _MIN_STEPS)
        if needed_seconds > options.max_seconds:
            result.skipped = f"needs {needed_seconds:.0f} s"
            continue
        step = contender.make(cell)
        first_run = _check(result, step, grad, truth)
        if is_long:
            result.runs.append(first_run)
            continue
        steps.append((result, step))
        affordable = int(_SECONDS_OF_RUNS / seconds) if seconds else options.repeats
        repeats.append(min(options.repeats, max(_MIN_STEPS, affordable)))
    for _ in range(0, max(repeats, default=0), _STEPS_PER_TURN):
        for (result, step), count in zip(steps, repeats, strict=True):
            for _ in range(min(_STEPS_PER_TURN, count - len(result.runs))):
                result.runs.append(_timed_step(step, grad, device)[1])
        peaks.append(sgemm_peak_gflops(device))
    return CellResults(cell, threads, max(peaks), results)


def _timed_step(
    step: Step, grad: Tensor, device: torch.device, memory: PeakMemory | None = None
) -> tuple[Tensor, Run]:
    """`memory`: told of forward and backward."""
    with memory or nullcontext():
        start = clock(device)
        output = step.forward()
        forward = clock(device)
        step.backward(output, grad)
        backward = clock(device)
    update = clock(device)
    step.update()
    return output, (forward - start, backward - forward, clock(device) - update)


def _estimate_seconds(contender: Contender, cell: Cell, work: Work) -> float:
    """Seconds of a step, from one of a few lookups (the second of two: the first may compile)."""
    if contender.is_dense:
        return 0.0  # memory is what limits dense tables
    head = cell.head(_PROBE_LOOKUPS)
    step, grad = contender.make(head), head.random_grad()
    device = cell.ids_L.device
    seconds = min(sum(_timed_step(step, grad, device)[1]) for _ in range(2))
    small = contender.work(head.workload())
    return seconds * max(work.useful_flops / small.useful_flops, work.num_bytes / small.num_bytes)


def _check(result: Result, step: Step, grad: Tensor, truth: _Truth) -> Run:
    """One step: its times, its peak of memory, and how far it is from the truth (dense tables:
    their output from that of their own rows in float64)."""
    device = grad.device
    if result.contender.is_dense:
        expected = _dense_truth(step)
        output, run = _timed_step(step, grad, device)
        result.relative_error = _relative_error(output, expected)
        return run
    memory = PeakMemory(device)
    output, run = _timed_step(step, grad, device, memory)
    parameters = step.parameters  # type: ignore[attr-defined]
    core_grads = [p.grad.view_as(x) for p, x in zip(parameters, truth.core_grads, strict=True)]
    kept = output.nbytes + sum(core_grad.nbytes for core_grad in core_grads)
    result.peak_bytes = None if memory.peak_bytes is None else max(0, memory.peak_bytes - kept)
    result.relative_error = _Truth(output.detach(), core_grads).relative_error(truth)
    return run


def _dense_truth(step) -> Tensor:  # type: ignore[no-untyped-def]
    ids, inverse = step.cell.ids_L.unique(return_inverse=True)
    rows = step.weight()[ids].double()
    return embedding_bag(inverse, rows, step.cell.offsets, mode="sum", include_last_offset=True)


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
