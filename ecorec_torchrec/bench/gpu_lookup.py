"""The lookup benchmark on a GPU, with the limits of the card measured in the same run.

Part of `make gpu-check` (`tests/gpu_check.py`): runs on a bare checkout, so it imports torch and
the kernels only. Contenders whose library is missing are rows that say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ecorec_torchrec.bench import lookup
from ecorec_torchrec.bench.lookup import CellResults, LookupOptions, measure_cells
from ecorec_torchrec.bench.measure import append_rows, copy_gbytes_per_second, git_sha

COLUMNS = (
    *lookup.COLUMNS, "gpu", "matmul_precision", "gemm_gflops", "copy_gbytes_per_s",
    "fraction_of_copy",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class GpuLookupOptions:
    """What to measure: 8 cells, in IEEE and in tf32 products."""

    csv: str
    """Rows are appended to this file."""

    device: str = "cuda"
    """cuda; or cpu with TRITON_INTERPRET=1, to see that everything runs."""

    quick: bool = False
    """One tiny cell, a step each."""

    sha: str = ""
    """The commit, where the checkout has no git folder."""

    def lookup_options(self) -> LookupOptions:
        options = LookupOptions(
            csv=self.csv,
            device=self.device,
            tables=((1_000_000, 64, 32), (40_000_000, 128, 64)),
            lookups=(81_920, 2_621_440),
            max_seconds=8.0,
            keep_freed_memory=False,
        )
        if self.quick:
            options.tables, options.lookups, options.id_orders = ((400, 8, 4),), (40,), ("hashed",)
            options.repeats, options.threads = 1, (1,)
            options.max_seconds = 600.0  # the interpreter is slow
        return options


def run_gpu_lookup(options: GpuLookupOptions) -> Iterator[CellResults]:
    """Measures cell after cell, and appends each to the CSV file as it comes."""
    device, before = torch.device(options.device), torch.get_float32_matmul_precision()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "none, interpreted"
    copy = copy_gbytes_per_second(device)
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for results in measure_cells(options.lookup_options()):
                facts = (card, precision, round(results.peak_gflops, 1), round(copy, 1))
                append_rows(Path(options.csv), COLUMNS, _rows(results, facts, options.sha))
                yield results
    finally:
        torch.set_float32_matmul_precision(before)


def _rows(results: CellResults, facts: tuple[object, ...], sha: str) -> Iterator[dict[str, object]]:
    for result, row in zip(results.results, results.rows(), strict=True):
        fraction: object = ""
        if result.runs:
            seconds = min(forward + backward for forward, backward, _ in result.runs)
            fraction = round(result.work.num_bytes / seconds / 1e9 / float(str(facts[-1])), 4)
        named = dict(zip(COLUMNS[len(lookup.COLUMNS) :], (*facts, fraction), strict=True))
        yield row | {"git_sha": git_sha() or sha} | named
