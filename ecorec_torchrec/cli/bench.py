"""`ecorec bench`: one sub-command per measurement, each a module of `ecorec_torchrec.bench`."""

from __future__ import annotations

import importlib

_BENCHMARKS = {
    "cpu-lookup": ("ecorec_torchrec.cli.bench_cpu_lookup", "the CPU kernels beside sgemm's peak"),
    "compile": ("ecorec_torchrec.cli.bench_compile", "the Triton kernels, compiled for four GPUs"),
    "machine": ("ecorec_torchrec.cli.bench_machine", "what operations cost here, for the planner"),
    "lookup": ("ecorec_torchrec.cli.bench_lookup", "speed and memory beside the papers' patterns"),
    "plan": ("ecorec_torchrec.cli.bench_plan", "predicted against measured steps, plans by regret"),
    "pipeline": ("ecorec_torchrec.cli.bench_pipeline", "what overlap is worth, over slow links"),
    "tiers": ("ecorec_torchrec.cli.bench_tiers", "training through a cache beside all in memory"),
    "tt-hot": ("ecorec_torchrec.cli.bench_tt_hot", "TT tables whose hottest rows are dense"),
    "quality": ("ecorec_torchrec.cli.bench_quality", "test AUC over seeds, with controls"),
}


def run(arguments: list[str]) -> None:
    name = arguments[0] if arguments else ""
    usage = "usage: ecorec bench BENCHMARK [OPTIONS]\n\n" + "\n".join(
        f"  {name:<12} {summary}" for name, (_, summary) in _BENCHMARKS.items()
    )
    if name in ("", "-h", "--help"):
        print(usage)
        return
    if name not in _BENCHMARKS:
        raise ValueError(f"no benchmark {name!r}; there are {', '.join(_BENCHMARKS)}")
    importlib.import_module(_BENCHMARKS[name][0]).run(arguments[1:])
