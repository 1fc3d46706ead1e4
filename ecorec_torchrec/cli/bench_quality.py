"""`ecorec bench quality`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ecorec_torchrec.cli.options import parse_flags
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.config_file import load_config
from ecorec_torchrec.train.launch import process_group


@dataclass(kw_only=True, slots=True)
class QualityOptions:
    """Train dense, TT and control variants over seeds, and write their test AUC to a CSV file.

    Learning rates are tuned on seed 0 and written beside it, to `<csv>_learning_rates.csv`.
    """

    config: str = "movielens_100k"
    """Configuration file or name."""

    seeds: int = 8
    """Seeds 0, 1, ...: each has its own split, shuffling and initial weights."""

    variants: tuple[str, ...] = ()
    """Names of the variants to train; without it all of them."""

    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Learning rates to try, as multiples of the configuration's."""

    csv: str = "docs/benchmarks/movielens_quality.csv"
    """The file for the results."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds}: at least 1")
        if Path(self.csv).suffix != ".csv":
            raise ValueError(f"--csv {self.csv}: the file must end in .csv")


def run(arguments: list[str]) -> None:
    options = parse_flags(QualityOptions, arguments, command="bench quality")
    config = load_config(options.config, TrainConfig)
    from ecorec_torchrec.bench.quality import (
        COLUMNS,
        TUNING_COLUMNS,
        VARIANTS,
        QualityBench,
        gaps,
        write_rows,
    )

    names = options.variants or tuple(variant.name for variant in VARIANTS)
    variants = [variant for variant in VARIANTS if variant.name in names]
    if unknown := set(names) - {variant.name for variant in variants}:
        known = ", ".join(variant.name for variant in VARIANTS)
        raise ValueError(f"--variants: {', '.join(sorted(unknown))} is not one of {known}")
    out = Path(options.csv)
    with process_group("cpu") as cpu:
        bench = QualityBench(config, cpu, options.factors)
        bench.tune(variants)
        tuning_file = out.with_name(f"{out.stem}_learning_rates.csv")
        write_rows(tuning_file, TUNING_COLUMNS, bench.tuning)
        rows = write_rows(out, COLUMNS, _shown(bench.measure(variants, range(options.seeds))))
    for other in names:
        if "dense" in names and other != "dense":
            mean, error = gaps(rows, "dense", other)
            print(f"dense - {other}: {mean:+.4f} +- {error:.4f} (mean and standard error)")
    if {"tt_r16", "hash_equal_bytes_r16"} <= set(names):
        mean, error = gaps(rows, "tt_r16", "hash_equal_bytes_r16")
        print(f"tt_r16 - hash_equal_bytes_r16: {mean:+.4f} +- {error:.4f}")
    print(f"written to {out} and {tuning_file}")


def _shown(rows: Iterable[dict[str, object]]) -> Iterator[dict[str, object]]:
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        yield row
