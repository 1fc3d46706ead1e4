"""`ecorec bench plan`."""

from __future__ import annotations

from pathlib import Path

from ecorec_torchrec.bench.plan import (
    PlanBenchOptions,
    prediction_summary,
    read_rows,
    regret,
    run_plan_check,
)
from ecorec_torchrec.bench.plan_report import write_report
from ecorec_torchrec.cli.options import parse_flags
from ecorec_torchrec.train.report import print_table

_SHOWN = {
    "prediction": (
        "number", "local_batch_size", "embedding_dim", "tables", "tt_tables", "rank",
        "predicted_ms", "measured_ms", "predicted_mib", "measured_mib",
    ),
    "regret": ("plan", "tt_tables", "predicted_ms", "measured_ms"),
}  # fmt: skip


def run(arguments: list[str]) -> None:
    options = parse_flags(PlanBenchOptions, arguments, command="bench plan")
    rows = run_plan_check(options)
    shown = _SHOWN[options.check]
    print_table(options.check, shown, [[str(row[column]) for column in shown] for row in rows])
    if options.check == "regret":
        print(f"the chosen plan's step is {regret(rows):.1%} longer than the best")
    else:
        of_seed = read_rows(Path(options.csv), options.seed)
        for name, value in prediction_summary(of_seed).items():
            print(f"{name}: {value:.3g}")
    if options.report:
        write_report(Path(options.csv).parent, Path(options.report))
    print(f"written to {options.csv}")
