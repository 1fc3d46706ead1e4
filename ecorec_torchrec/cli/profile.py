"""`ecorec profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ecorec_torchrec.cli.options import parse_options
from ecorec_torchrec.train.config import TrainConfig

if TYPE_CHECKING:
    from ecorec_torchrec.planner import Profile
    from ecorec_torchrec.train.profiling import IdSource

_FLOAT_BYTES = 4
_COLUMNS = (
    "table", "rows", "lookups", "per row", "hottest 1 %", "miss", "first touch", "GB/s",
    "cached GB/s",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class ProfileOptions(TrainConfig):
    """Measure what the training data of a configuration asks of its tables, for the planner.

    Reads the data twice and writes, per table: lookups per sample, distinct rows and TT prefixes by
    batch size, what caches would miss, first touches, the hottest rows. `plan.profile` takes the
    file.
    """

    trace: str | None = None
    """Profile this file, with one index of one table a line, in place of the data set."""

    trace_lookups_per_sample: int = 1
    """Lines of the trace that make one sample."""

    trace_rows: int | None = None
    """Rows of the trace's table; without it the largest index and one more."""

    batch_size: int | None = None
    """Samples of a global batch, whose distinct rows are what a cache is asked for; without it
    `train.batch_size`."""

    largest_batch: int = 65_536
    """Distinct rows are counted in batches of 1, 2, 4, .. up to so many samples."""

    max_samples: int | None = None
    """Stop after so many samples."""

    exact_rows: int = 1 << 20
    """Reuse of a table with more rows is estimated from so many of its rows."""

    hot_rows: int = 100_000
    """The hottest rows to list, in the .npz file beside the profile."""

    samples_per_second: float = 1e6
    """Throughput that the printed GB/s are for."""

    out: str = "profile.yaml"
    """The file to write."""

    plots: str | None = None
    """Also draw the curves into this folder, as PNG files (needs matplotlib)."""

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        for name in (
            "trace_lookups_per_sample",
            "trace_rows",
            "batch_size",
            "largest_batch",
            "max_samples",
            "exact_rows",
            "hot_rows",
            "samples_per_second",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be > 0")


def run(arguments: list[str]) -> None:
    options = parse_options(ProfileOptions, arguments, command="profile")
    from ecorec_torchrec.planner import save_profile
    from ecorec_torchrec.train.profiling import ProfileSettings, measure_profile

    settings = ProfileSettings(
        batch_size=options.batch_size or options.train.batch_size,
        largest_batch=options.largest_batch,
        max_samples=options.max_samples,
        exact_rows=options.exact_rows,
        hot_rows=options.hot_rows,
    )
    profile = measure_profile(_source(options), settings)
    if not profile.tables:
        raise ValueError("the data has no ids: nothing to write")
    _print(profile, options, settings.batch_size)
    save_profile(profile, options.out)
    print(f"written to {options.out}")
    if options.plots is not None:
        from ecorec_torchrec.train.profiling.plots import plot_profile

        for path in plot_profile(profile, Path(options.plots)):
            print(f"written to {path}")


def _source(options: ProfileOptions) -> IdSource:
    from ecorec_torchrec.train.data import load_dataset
    from ecorec_torchrec.train.profiling import DatasetIds, TraceIds

    if options.trace is None:
        return DatasetIds(load_dataset(options.data, options.seed), options.data.name)
    return TraceIds(
        options.trace,
        lookups_per_sample=options.trace_lookups_per_sample,
        num_embeddings=options.trace_rows,
    )


def _print(profile: Profile, options: ProfileOptions, batch_size: int) -> None:
    """A line per table; GB/s without a cache, with one of a tenth of the rows, and for all."""
    from ecorec_torchrec.train.report import print_table

    row_bytes = _FLOAT_BYTES * options.model.embedding_dim
    rate = options.samples_per_second
    rows, totals = [], [0.0, 0.0]
    for table in profile.tables.values():
        cache_rows = max(1, table.num_embeddings // 10)
        assert table.reuse is not None and table.hot is not None
        gb_per_s = [table.gb_per_s(rate, batch_size, row_bytes, rows) for rows in (0, cache_rows)]
        totals = [total + part for total, part in zip(totals, gb_per_s, strict=True)]
        lookups = table.all_lookups_per_sample
        rows.append(
            [
                table.name,
                f"{table.num_embeddings:,}",
                f"{lookups:.3g}",
                f"{lookups * batch_size / table.unique_rows(batch_size):.2f}",
                f"{table.hot.share(max(1, table.num_embeddings / 100)):.1%}",
                f"{table.reuse.miss_ratio(cache_rows):.1%}",
                f"{table.reuse.first_touch_rate:.1%}",
                *(f"{number:.2f}" for number in gb_per_s),
            ]
        )
    rows.append(["total", "", "", "", "", "", "", *(f"{total:.2f}" for total in totals)])
    print_table(f"{profile.samples:,} samples of {profile.source}", _COLUMNS, rows)
    print(
        f"lookups: per sample; per row: lookups of a distinct row in {batch_size:,} samples; "
        "miss, cached: with a cache of a tenth of the rows; "
        f"GB/s: training {rate:,.0f} samples/s, D = {options.model.embedding_dim} in float32"
    )
