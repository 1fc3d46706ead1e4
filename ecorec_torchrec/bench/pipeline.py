"""What overlap is worth: three ways to train the same tables, over links of several rates."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ecorec_torchrec.bench.links import LOOPBACK, first_failure, link, start, stop
from ecorec_torchrec.bench.measure import append_rows, git_sha
from ecorec_torchrec.bench.pipeline_trace import plot_steps, traces_of

VARIANTS = ("torchrec_dense", "tt_ungrouped", "ecorec")
COLUMNS = (
    "variant", "link", "world_size", "dist_groups", "batch_size", "num_tables", "num_embeddings",
    "embedding_dim", "rank", "step_ms", "exposed_comm_ms", "lookup_ms", "samples_per_second",
    "ideal_step_ms", "steps", "torch", "torchrec", "git_sha",
)  # fmt: skip
MEASURED = ("step_ms", "exposed_comm_ms", "lookup_ms")


@dataclass(kw_only=True, slots=True)
class PipelineBenchOptions:
    """Measure training steps of TT tables in dist groups beside ungrouped and dense ones.

    Variants: torchrec_dense (dense tables, TorchRec's planner and pipeline), tt_ungrouped (TT
    tables in TorchRec's pipeline) and ecorec (the same tables in dist groups, in
    EcoRecTrainPipeline). They take turns step by step. Every rank computes with one thread; rates
    other than loopback need root and iproute2.
    """

    csv: str = "docs/benchmarks/pipeline.csv"
    """Rows are appended to this file."""

    links: tuple[str, ...] = (LOOPBACK, "100mbit", "1gbit", "10gbit")
    """Rates between the ranks, as tc reads them, or loopback."""

    variants: tuple[str, ...] = VARIANTS
    """What to measure."""

    world_size: int = 2
    """Number of ranks, all on this machine."""

    dist_groups: int = 8
    """Groups of the variant ecorec."""

    batch_size: int = 8192
    """Examples of a global batch."""

    num_tables: int = 16
    """Tables, dealt out to the ranks in turn; one id per table and example."""

    num_embeddings: int = 100_000
    """Rows of a table."""

    embedding_dim: int = 64
    """Columns of a table."""

    rank: int = 16
    """TT rank."""

    steps: int = 30
    """Steps per variant; their median counts."""

    warmup_steps: int = 3
    """Steps before that."""

    plot: bool = False
    """Also draw one step of the variants with TT tables, to a PNG file per link beside the CSV."""

    def __post_init__(self) -> None:
        self.links, self.variants = tuple(self.links), tuple(self.variants)
        for name in ("world_size", "dist_groups", "num_tables", "steps", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch_size < self.world_size:
            raise ValueError(f"batch_size={self.batch_size} leaves ranks without examples")
        if not self.variants or (unknown := set(self.variants) - set(VARIANTS)):
            raise ValueError(
                f"variants: {sorted(unknown) if self.variants else '()'}, of {VARIANTS}"
            )


def run_pipeline(options: PipelineBenchOptions) -> Iterator[list[dict[str, object]]]:
    """Measures link by link; yields the rows of each, which are in the CSV file by then.

    Raises:
        PermissionError, FileNotFoundError, ValueError: see `link`; `plot` without matplotlib.
        RuntimeError: a rank failed.
    """
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot=True: matplotlib is not installed; `pip install matplotlib`")
    csv_file = Path(options.csv)
    for rate in options.links:
        found = _measure(options, rate)
        rows = _rows(options, rate, found["figures"])
        append_rows(csv_file, COLUMNS, rows)
        if found["traces"]:
            path = csv_file.with_name(f"{csv_file.stem}_{rate}.png")
            plot_steps(traces_of(found["traces"]), f"One step over {rate}", path)
        yield rows


def _measure(options: PipelineBenchOptions, rate: str) -> dict[str, Any]:
    module = "ecorec_torchrec.bench.pipeline_rank"
    with link(rate, options.world_size) as places, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = json.dumps(dataclasses.asdict(options))
        command = [sys.executable, "-m", module, str(folder / "store"), settings]
        processes = start(places, command, folder)
        try:
            failed = first_failure(processes)
            if failed is not None:
                errors = (folder / f"{failed}.err").read_text().strip()
                raise RuntimeError(f"link {rate}, rank {failed}: {errors[-2000:]}")
        finally:
            stop(processes)
        return json.loads((folder / "0.out").read_text().splitlines()[-1])


def _rows(
    options: PipelineBenchOptions, rate: str, found: dict[str, dict[str, float]]
) -> list[dict[str, object]]:
    ideal_ms = ""
    if "tt_ungrouped" in found:
        step_ms, exposed_ms, _ = found["tt_ungrouped"].values()
        # If the shorter of computing and waiting hid wholly behind the longer.
        ideal_ms = f"{max(exposed_ms, step_ms - exposed_ms):.2f}"
    return [
        {
            "variant": variant,
            "link": rate,
            "world_size": options.world_size,
            "dist_groups": options.dist_groups if variant == "ecorec" else 1,
            "batch_size": options.batch_size,
            "num_tables": options.num_tables,
            "num_embeddings": options.num_embeddings,
            "embedding_dim": options.embedding_dim,
            "rank": "" if variant == "torchrec_dense" else options.rank,
            "step_ms": f"{figures['step_ms']:.2f}",
            "exposed_comm_ms": f"{figures['exposed_comm_ms']:.2f}",
            "lookup_ms": f"{figures['lookup_ms']:.2f}",
            "samples_per_second": f"{options.batch_size / figures['step_ms'] * 1e3:.0f}",
            "ideal_step_ms": "" if variant == "torchrec_dense" else ideal_ms,
            "steps": options.steps,
            "torch": version("torch"),
            "torchrec": version("torchrec"),
            "git_sha": git_sha(),
        }
        for variant, figures in found.items()
    ]
