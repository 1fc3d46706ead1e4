"""How much of the CPU's arithmetic a TT lookup reaches, over shapes, id orders and threads.

Forward and backward of the public functional API, the sort of the ids included, as a fraction of
what one large matrix product reaches in the same process. FLOPs are those that the method needs:
P E1 + U E2 forward and twice that backward, with E1 = 2 q1 r1 q2 r2 per prefix and
E2 = 2 q1 q2 r2 q3 per unique row; recomputed prefixes are not counted.
"""

from __future__ import annotations

import importlib.metadata
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ecorec_torchrec.bench.counters import Workload
from ecorec_torchrec.bench.measure import (
    append_rows,
    check_columns,
    git_sha,
    sgemm_peak_gflops,
    torch_threads,
    zipf_ids,
)
from ecorec_torchrec.kernels import tt_embedding_bag
from ecorec_torchrec.train.report import print_table
from ecorec_torchrec.tt import TTSpec, init_cores_

COLUMNS = (
    "config", "rows", "dim", "rank", "lookups", "id_order", "threads", "forward_ms", "backward_ms",
    "step_ms", "gflop", "sgemm_gflops", "fraction_of_peak", "max_relative_error", "workspace_mib",
    "torch", "numba", "git_sha",
)  # fmt: skip
MAX_RELATIVE_ERROR = 1e-5
"""Against float64, of the largest value of a tensor."""


@dataclass(frozen=True)
class CpuLookupCase:
    """A table and the size of its batches."""

    name: str
    spec: TTSpec
    num_lookups: int = 65_536
    num_bags: int = 4096


def _million(col_factors: tuple[int, ...], ranks: tuple[int, int]) -> CpuLookupCase:
    spec = TTSpec(1_000_000, (100, 100, 100), col_factors, ranks)
    return CpuLookupCase(f"1M_d{spec.embedding_dim}_r{ranks[0]}", spec)


CASES = (
    _million((4, 4, 4), (16, 16)),
    _million((4, 4, 4), (32, 32)),
    _million((2, 4, 4), (16, 16)),
    _million((2, 4, 4), (32, 32)),
    _million((4, 4, 8), (16, 16)),
    _million((4, 4, 8), (32, 32)),
    _million((3, 4, 5), (12, 20)),
    _million((3, 5, 7), (29, 35)),
    CpuLookupCase("40M_d128_r64", TTSpec(40_000_000, (250, 400, 400), (4, 4, 8), (64, 64)), 81_920),
)


@dataclass(kw_only=True, slots=True)
class CpuLookupOptions:
    """Measure forward and backward of TT lookups on the CPU against the peak of a matrix product.

    The result of each configuration is compared with float64 first; a wrong one is an error and
    no figure. Run it on an otherwise idle machine.
    """

    csv: str = "docs/benchmarks/cpu_lookup.csv"
    """Rows are appended to this file; empty: no file."""

    configs: tuple[str, ...] = ()
    """Names of the configurations to measure; without it all of them."""

    id_orders: tuple[Literal["hashed", "frequency"], ...] = ("hashed", "frequency")
    """How the Zipf ids lie in the table."""

    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads."""

    repeats: int = 11
    """Steps per configuration; the fastest counts."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.threads or min(self.threads) < 1:
            raise ValueError(f"threads must be numbers of at least 1, got {self.threads}")
        known = [case.name for case in CASES]
        if unknown := set(self.configs) - set(known):
            raise ValueError(f"configs: {sorted(unknown)} not in {known}")

    def cases(self) -> list[CpuLookupCase]:
        return [case for case in CASES if not self.configs or case.name in self.configs]


def run_cpu_lookup(
    options: CpuLookupOptions, cases: Sequence[CpuLookupCase] | None = None
) -> Iterator[dict[str, object]]:
    """Measures the configurations, and appends each row to the CSV file as it comes.

    Args:
        options: what to measure.
        cases: tables in place of the options' configurations.

    Yields:
        One row per configuration, id order and number of threads: `COLUMNS` to values.

    Raises:
        ValueError: the CSV file has other columns.
        RuntimeError: a result differs from float64 by more than `MAX_RELATIVE_ERROR`.

    Example::

        rows = list(run_cpu_lookup(CpuLookupOptions(configs=("1M_d64_r16",), csv="")))
        print_rows(rows)
    """
    path = Path(options.csv) if options.csv else None
    if path is not None:
        check_columns(path, COLUMNS)
    for case in options.cases() if cases is None else cases:
        for id_order in options.id_orders:
            step = _Step(case, id_order)
            truth = step.truth()
            for num_threads in options.threads:
                with torch_threads(num_threads):
                    row = _measure(step, truth, num_threads, options.repeats)
                if path is not None:
                    append_rows(path, COLUMNS, [row])
                yield row


def print_rows(rows: Iterable[dict[str, object]]) -> None:
    """Prints rows of `run_cpu_lookup` as a table."""
    shown = COLUMNS[:1] + COLUMNS[4:15]
    print_table(
        "TT lookup on the CPU", shown, [[str(row[column]) for column in shown] for row in rows]
    )


class _Step:
    """One batch of one table."""

    def __init__(self, case: CpuLookupCase, id_order: Literal["hashed", "frequency"]) -> None:
        self.case, self.id_order = case, id_order
        spec = case.spec
        self.ids_L = zipf_ids(case.num_lookups, spec.num_embeddings, id_order=id_order)
        self.offsets = torch.arange(case.num_bags + 1) * case.num_lookups // case.num_bags
        generator = torch.Generator().manual_seed(0)
        cores = [torch.empty(shape) for shape in spec.core_shapes]
        init_cores_(cores, spec, entry_std=0.1, generator=generator)
        self.cores = [core.requires_grad_() for core in cores]
        self.grad = torch.randn(case.num_bags, spec.embedding_dim, generator=generator)

    def forward(self, cores: list[Tensor]) -> Tensor:
        return tt_embedding_bag(
            self.ids_L, self.offsets, cores, self.case.spec, include_last_offset=True, backend="cpu"
        )

    def run(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        for core in self.cores:
            core.grad = None
        start = time.perf_counter()
        output = self.forward(self.cores)
        middle = time.perf_counter()
        output.backward(self.grad)
        return middle - start, time.perf_counter() - middle

    def truth(self) -> list[Tensor]:
        """Output and core gradients in float64, which the numba engine does not compute."""
        cores = [core.detach().double().requires_grad_() for core in self.cores]
        output = self.forward(cores)
        return [output.detach(), *torch.autograd.grad(output, cores, self.grad.double())]

    def relative_error(self, truth: list[Tensor]) -> float:
        output = self.forward(self.cores)
        results = [output.detach(), *torch.autograd.grad(output, self.cores, self.grad)]
        return max(
            float((result - wanted).abs().max() / wanted.abs().max())
            for result, wanted in zip(results, truth, strict=True)
        )

    def workspace_bytes(self) -> int:
        """Peak of the buffers of numpy, which are all that the engine allocates beside results and
        the tensors of the index plan."""
        tracemalloc.start()
        self.run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    def flops(self) -> int:
        """Useful FLOPs of forward and backward."""
        spec = self.case.spec
        work = Workload.of(self.ids_L, self.offsets, spec)
        (q1, q2, q3), (r1, r2) = spec.col_factors, spec.ranks
        return 3 * (work.prefixes * 2 * q1 * r1 * q2 * r2 + work.rows * 2 * q1 * q2 * r2 * q3)


def _measure(step: _Step, truth: list[Tensor], num_threads: int, repeats: int) -> dict[str, object]:
    case, spec = step.case, step.case.spec
    error = step.relative_error(truth)
    if not error <= MAX_RELATIVE_ERROR:
        raise RuntimeError(
            f"{case.name}, {step.id_order} ids, {num_threads} threads: the result differs from "
            f"float64 by {error:.1e}, the limit is {MAX_RELATIVE_ERROR:.0e}; not measured"
        )
    workspace_bytes = step.workspace_bytes()
    peak = sgemm_peak_gflops(torch.device("cpu"))
    runs = [step.run() for _ in range(repeats)]
    peak = max(peak, sgemm_peak_gflops(torch.device("cpu")))
    forward, backward = (min(seconds) for seconds in zip(*runs, strict=True))
    seconds, gflop = min(sum(run) for run in runs), step.flops() / 1e9
    values = (
        case.name, spec.num_embeddings, spec.embedding_dim, spec.ranks[0], case.num_lookups,
        step.id_order, num_threads, round(1e3 * forward, 3), round(1e3 * backward, 3),
        round(1e3 * seconds, 3), round(gflop, 4), round(peak, 1),
        round(gflop / seconds / peak, 4), f"{error:.1e}", round(workspace_bytes / 2**20, 2),
        torch.__version__, importlib.metadata.version("numba"), git_sha(),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))
