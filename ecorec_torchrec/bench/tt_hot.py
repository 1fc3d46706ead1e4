"""Is a TT table with dense hot rows better than plain TT or hashing in as many bytes?

Quality on crosses of MovieLens-100K, over seeds; and hits and times of lookups on traces. See
`tt_hot_table` for the prototype.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ecorec_torchrec.bench.measure import append_rows, check_columns, git_sha, torch_threads
from ecorec_torchrec.bench.tt_hot_quality import CrossedData, Trained, crossed_movielens, train
from ecorec_torchrec.bench.tt_hot_table import (
    HotTTBag,
    TableShape,
    hottest,
    shapes_of_equal_bytes,
)
from ecorec_torchrec.train.profiling import TraceIds

COLUMNS = (
    "seed", "ids", "variant", "auc_test", "auc_val", "best_epoch", "hit_rate", "hot_rows", "bytes",
    "learning_rate_factor", "torch", "git_sha",
)  # fmt: skip
TIME_COLUMNS = (
    "ids", "variant", "rows", "dim", "lookups", "hit_rate", "hot_rows", "bytes", "forward_ms",
    "backward_ms", "step_ms", "threads", "torch", "numba", "git_sha",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class TTHotOptions:
    """Measure TT tables with dense hot rows beside plain TT and hashing in as many bytes.

    Test AUC on crosses of MovieLens-100K features, and, for each trace, hits of the hot rows and
    the time of a lookup, forward and backward.
    """

    csv: str = "docs/benchmarks/tt_hot.csv"
    """The AUCs are appended to this file, times to `<csv>_times.csv` beside it."""

    seeds: int = 5
    """Seeds 0, 1, ...: each has its own split, shuffling and initial values; 0: no training."""

    data: str | None = None
    """Folder of your own copy of MovieLens-100K."""

    ids: tuple[Literal["hashed", "crossed"], ...] = ("hashed", "crossed")
    """hashed: crosses hashed into `hashed_rows`; crossed: ids that keep both halves."""

    rank: int = 16
    """Of the plain TT table, which sets the bytes."""

    hot_ranks: tuple[int, ...] = (14, 12, 8)
    """Ranks of the TT tables with hot rows, which get the bytes that the lower rank leaves."""

    dim: int = 32
    """Columns of the crosses' tables."""

    hashed_rows: int = 1_000_000
    """Rows of a table of hashed crosses."""

    epochs: int = 4
    """Passes over the training split; validation chooses."""

    factors: tuple[float, ...] = (0.3, 1.0, 3.0)
    """Learning rates to try on seed 0, as multiples of the usual ones."""

    traces: tuple[str, ...] = ()
    """Text files of ids, one a line: lookups are timed on the second half, and the hot rows are
    those of the first half."""

    lookups: int = 16_384
    """Lookups of a batch of a trace."""

    trace_dim: int = 64
    """Columns of the tables of the traces."""

    repeats: int = 7
    """Times that a batch is looked up; the median counts."""

    threads: int = 1
    """Threads that compute."""

    def __post_init__(self) -> None:
        if Path(self.csv).suffix != ".csv":
            raise ValueError(f"--csv {self.csv}: the file must end in .csv")
        if self.seeds < 0:
            raise ValueError(f"--seeds {self.seeds}: at least 0")
        for name in ("rank", "dim", "hashed_rows", "epochs", "lookups", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 1")
        for rank in self.hot_ranks:
            if not 1 <= rank < self.rank:
                raise ValueError(f"--hot-ranks {rank}: from 1 to below --rank {self.rank}")

    @property
    def times_csv(self) -> Path:
        path = Path(self.csv)
        return path.with_name(f"{path.stem}_times.csv")


def run_quality(options: TTHotOptions) -> Iterator[dict[str, object]]:
    """Trains every variant over the seeds, crosses hashed and not, and appends the rows.

    Learning rates are tuned per variant on seed 0.

    Yields:
        One row per ids, seed and variant: `COLUMNS` to values.

    Raises:
        ValueError: MovieLens-100K is not there, or the CSV file has other columns.
    """
    path = Path(options.csv)
    check_columns(path, COLUMNS)
    with torch_threads(options.threads):
        for ids in options.ids:
            hashed_rows = options.hashed_rows if ids == "hashed" else None
            factors: dict[str, float] = {}
            for seed in range(options.seeds):
                data = crossed_movielens(options.data, seed, hashed_rows)
                for name, shapes in _variants(options, data).items():
                    if seed == 0:
                        factors[name] = max(
                            options.factors,
                            key=lambda f: train(data, shapes, 0, f, options.epochs).auc_val,
                        )
                    trained = train(data, shapes, seed, factors[name], options.epochs)
                    row = _quality_row(seed, ids, name, shapes, trained, factors[name])
                    append_rows(path, COLUMNS, [row])
                    yield row


def run_times(options: TTHotOptions) -> Iterator[dict[str, object]]:
    """Measures lookups on the traces, and appends the rows.

    Yields:
        One row per trace and variant: `TIME_COLUMNS` to values.

    Raises:
        ValueError: a trace is no list of ids, or too short, or the CSV file has other columns.
    """
    check_columns(options.times_csv, TIME_COLUMNS)
    with torch_threads(options.threads):
        for trace in options.traces:
            source = TraceIds(trace)
            [(name, num_rows)] = source.num_embeddings.items()
            num_ids = source.num_samples or 0
            half = num_ids // 2
            if half < options.lookups:
                raise ValueError(f"--traces {trace}: {num_ids} ids are fewer than twice --lookups")
            seen, rest = (
                torch.from_numpy(batch[name].ids_L)
                for batch in itertools.islice(source.batches(half), 2)
            )
            for shape in shapes_of_equal_bytes(
                num_rows, options.trace_dim, options.rank, options.hot_ranks
            ):
                row = _time_row(name, shape, seen, rest, options)
                append_rows(options.times_csv, TIME_COLUMNS, [row])
                yield row


def _variants(options: TTHotOptions, data: CrossedData) -> dict[str, list[TableShape]]:
    """By name, the shape of every cross's table; `dense` has a row for every id that is trained."""
    tables = [
        [
            TableShape("dense", options.dim, hot_rows=len(data.cross_ids("train", cross).unique())),
            *shapes_of_equal_bytes(num_rows, options.dim, options.rank, options.hot_ranks),
        ]
        for cross, num_rows in enumerate(data.num_rows)
    ]
    return {shapes[0].name: list(shapes) for shapes in zip(*tables, strict=True)}


def _quality_row(
    seed: int, ids: str, name: str, shapes: list[TableShape], trained: Trained, factor: float
) -> dict[str, object]:
    values = (
        seed, ids, name, round(trained.auc_test, 6), round(trained.auc_val, 6), trained.best_epoch,
        round(trained.hit_rate, 4), sum(shape.hot_rows for shape in shapes),
        sum(shape.nbytes for shape in shapes), factor, torch.__version__, git_sha(),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def _time_row(
    trace: str, shape: TableShape, seen: torch.Tensor, rest: torch.Tensor, options: TTHotOptions
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    table = HotTTBag(shape, seen, generator)
    offsets = torch.arange(options.lookups + 1)
    batches = itertools.cycle(rest.unfold(0, options.lookups, options.lookups))
    runs = []
    for ids_L in itertools.islice(batches, options.repeats + 1):  # the first warms up
        grad = torch.randn(len(ids_L), shape.embedding_dim, generator=generator)
        start = time.perf_counter()
        output = table(ids_L, offsets)
        middle = time.perf_counter()
        output.backward(grad)
        runs.append((middle - start, time.perf_counter() - middle))
        table.zero_grad()
    forward, backward = (1e3 * statistics.median(part) for part in zip(*runs[1:], strict=True))
    hits = float(torch.isin(rest, hottest(seen, shape.hot_rows)).double().mean())
    values = (
        trace, shape.name, shape.spec.num_embeddings if shape.spec else "", shape.embedding_dim,
        options.lookups, round(hits, 4), shape.hot_rows, shape.nbytes, round(forward, 3),
        round(backward, 3), round(forward + backward, 3), options.threads, torch.__version__,
        importlib.metadata.version("numba"), git_sha(),
    )  # fmt: skip
    return dict(zip(TIME_COLUMNS, values, strict=True))
