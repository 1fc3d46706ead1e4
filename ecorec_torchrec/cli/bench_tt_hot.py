"""`ecorec bench tt-hot`."""

from __future__ import annotations

from ecorec_torchrec.bench.quality import gaps
from ecorec_torchrec.bench.tt_hot import TTHotOptions, run_quality, run_times
from ecorec_torchrec.cli.options import parse_flags
from ecorec_torchrec.train.report import print_table

_SHOWN_TIMES = ("ids", "variant", "hit_rate", "hot_rows", "bytes", "forward_ms", "backward_ms")


def run(arguments: list[str]) -> None:
    options = parse_flags(TTHotOptions, arguments, command="bench tt-hot")
    rows = []
    for row in run_quality(options):
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    for ids in dict.fromkeys(row["ids"] for row in rows):
        _print_gaps([row for row in rows if row["ids"] == ids], f"{ids} ids")
    times = list(run_times(options))
    if times:
        shown = [[str(row[name]) for name in _SHOWN_TIMES] for row in times]
        print_table("lookups", _SHOWN_TIMES, shown)
    print(
        "written to "
        + " and ".join(
            str(path) for path, found in ((options.csv, rows), (options.times_csv, times)) if found
        )
    )


def _print_gaps(rows: list[dict[str, object]], title: str) -> None:
    for variant in dict.fromkeys(str(row["variant"]) for row in rows):
        for other in ("tt", "hashing"):
            if variant.startswith("tt_hot"):
                mean, error = gaps(rows, variant, other)
                print(f"{title}: {variant} - {other}: {mean:+.4f} +- {error:.4f}")
