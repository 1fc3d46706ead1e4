"""Compiles every Triton kernel for GPUs that are not at hand, and reads what the compiler reports.

The lookup runs on CPU tensors with the launches recorded instead of done; so exactly what the
program launches is compiled, for every shape and arithmetic. Triton's wheel brings the assemblers:
neither a GPU nor a driver nor a toolkit is needed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_index import reference as index_reference

SHARED_BYTES_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Target -> what a program may ask for; the compiler itself does not look."""

_COL_FACTORS = ((2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))
_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Launch:
    """What the compiler is given for one launch."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def config(self) -> str:
        """Constants, options and dtypes, readable."""
        dtypes = {t.lstrip("*") for _, t in self.signature} & {"fp16", "bf16"}
        pairs = [f"{k}={v}" for k, v in self.constants + self.options if v is not None]
        return " ".join([*pairs, *sorted(dtypes)])


@dataclass(frozen=True)
class Resources:
    """A row of the CSV."""

    kernel: str
    config: str
    target: str
    registers: int
    """Per thread; on AMD vector registers."""
    shared_bytes: int
    spills: int
    """Spilled bytes per thread on NVIDIA, spilled registers on AMD."""


@dataclass(kw_only=True)
class CompileOptions:
    """Compile the Triton kernels for GPUs not at hand: registers, shared memory, spills."""

    csv: Path | None = None
    """File for one row per kernel, configuration and target."""

    resume: bool = False
    """Compile only what the file has no row of, and append."""

    targets: tuple[str, ...] = tuple(SHARED_BYTES_LIMITS)
    """GPUs to compile for."""

    sample: int | None = None
    """Compile this many launches per target instead of all; every kernel is among the first."""

    seed: int = 0
    """Of the draw."""

    ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Ranks of the tables that are looked up."""

    candidates: bool = False
    """Compile every configuration that a search may choose (`ECOREC_TRITON_AUTOTUNE`), 8 times as
    many, instead of the heuristic's."""

    def __post_init__(self) -> None:
        unknown = set(self.targets) - set(SHARED_BYTES_LIMITS)
        if unknown:
            raise ValueError(f"targets {sorted(unknown)} are not among {list(SHARED_BYTES_LIMITS)}")
        if self.sample is not None and self.sample < 1:
            raise ValueError(f"sample={self.sample} must be at least 1")


def compile_check(options: CompileOptions) -> list[str]:
    """Compiles the launches for all targets, and writes the CSV file if one is asked for.

    Returns:
        What breaks a limit, one line each: registers spilled on an NVIDIA target, or more shared
        memory than the chip has. Empty when all is well.

    Raises:
        ValueError: this process interprets Triton kernels instead of compiling them.

    Example::

        problems = compile_check(CompileOptions(csv=Path("docs/benchmarks/triton_compile.csv")))
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("with TRITON_INTERPRET set nothing is compiled: unset it")
    jobs = _jobs(options)
    if options.resume and options.csv is not None:
        jobs = _missing(jobs, options.csv)
    problems: list[str] = []
    with _csv_writer(options.csv, append=options.resume) as write:
        for launch, target in tqdm(jobs, desc="compile", unit="kernel", disable=None):
            row = compile_launch(launch, target)
            write([getattr(row, field.name) for field in fields(row)])
            problems += _problems(row)
    return problems


def _missing(jobs: list[tuple[Launch, str]], path: Path) -> list[tuple[Launch, str]]:
    """The jobs of which the file has no row. Launches that differ in the width of ids alone have
    equal rows, so rows are counted."""
    if not path.exists():
        return jobs
    with path.open(newline="") as file:
        rows = [(row["kernel"], row["config"], row["target"]) for row in csv.DictReader(file)]
    found, missing = Counter(rows), []
    for launch, target in jobs:
        key = (launch.kernel.__name__, launch.config, target)
        if found[key]:
            found[key] -= 1
        else:
            missing.append((launch, target))
    return missing


@contextlib.contextmanager
def _csv_writer(path: Path | None, append: bool) -> Iterator[Callable[[list], Any]]:
    """A function that writes a row, as soon as it is there."""
    if path is None:
        yield lambda row: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", newline="", buffering=1) as file:
        write = csv.writer(file, lineterminator="\n").writerow
        if not file.tell():
            write([field.name for field in fields(Resources)])
        yield write


def _problems(row: Resources) -> Iterator[str]:
    where = f"{row.kernel} [{row.config}] on {row.target}"
    if row.spills and row.target.startswith("sm_"):
        yield f"{where}: {row.spills} bytes spilled, the limit is 0"
    if row.shared_bytes > SHARED_BYTES_LIMITS[row.target]:
        limit = SHARED_BYTES_LIMITS[row.target]
        yield f"{where}: {row.shared_bytes} bytes of shared memory, the limit is {limit}"


def _jobs(options: CompileOptions) -> list[tuple[Launch, str]]:
    """What to compile for which target; a sample has one launch of every kernel first."""
    shapes = [(col_factors, rank) for col_factors in _COL_FACTORS for rank in options.ranks]
    generator = random.Random(options.seed)
    if options.sample is not None:
        shapes = generator.sample(shapes, 3)
    jobs = []
    for hip in (None, "6.4"):
        targets = [t for t in options.targets if t.startswith("sm_") == (hip is None)]
        launches = _launches(shapes, hip, options.candidates) if targets else []
        for target in targets:
            if options.sample is not None:
                generator.shuffle(launches)
                launches = _ones_first(launches)
            jobs += [(launch, target) for launch in launches[: options.sample]]
    return jobs


def _ones_first(launches: list[Launch]) -> list[Launch]:
    ones = {launch.kernel: launch for launch in reversed(launches)}
    return sorted(launches, key=lambda launch: ones[launch.kernel] is not launch)


# What the program launches


def _launches(
    shapes: Sequence[tuple[tuple[int, int, int], int]], hip: str | None, candidates: bool
) -> list[Launch]:
    """All different launches over shapes, dtypes, arithmetics, poolings and numbers of parts.

    Args:
        shapes: column factors and rank.
        hip: what `torch.version.hip` says where the kernels run.
        candidates: of all configurations that a search may choose.
    """
    found: dict[Launch, None] = {}
    before = torch.get_float32_matmul_precision()
    try:
        with _recorded(found), mock.patch.object(torch.version, "hip", hip):
            for precision in ("highest", "high"):
                torch.set_float32_matmul_precision(precision)
                for col_factors, rank in shapes:
                    _look_up(col_factors, rank, candidates)
    finally:
        torch.set_float32_matmul_precision(before)
    return list(found)


def _look_up(col_factors: tuple[int, int, int], rank: int, candidates: bool) -> None:
    """Plan, forward and backward, in every way that launches something different."""
    from ecorec_torchrec.kernels.tt_index import triton_plan
    from ecorec_torchrec.kernels.tt_lookup import triton_engine, triton_parts
    from ecorec_torchrec.kernels.tt_lookup.launch import LaunchConfig, dot_precision

    batch = TableBatch(("t",), (8_000,), ((20, 40, 10),), col_factors, (rank, rank), ("f",), (0,))
    ids, offsets = torch.randint(8_000, (3_000,)), torch.tensor([0, 1_000, 3_000])
    for dtype in (torch.int32, torch.int64):
        triton_plan.build_plan(ids.to(dtype), offsets.to(dtype), batch)
    plan, _ = index_reference.build_plan(ids, offsets, batch)
    for dtype in (torch.float32, torch.bfloat16):  # fp16 differs from bf16 in one conversion
        cores = [torch.zeros(shape, dtype=dtype) for shape in batch.core_shapes]
        grad = torch.zeros(2, batch.embedding_dim, dtype=dtype)
        heuristic = LaunchConfig.choose(col_factors, (rank, rank), dot_precision(dtype))
        configs = heuristic.candidates() if candidates else [heuristic]
        poolings = ((False, None), (True, torch.zeros(3_000)))
        for (mean, weights), workspace, config in product(
            poolings,
            (2**40, 0),  # one part; as many as possible
            configs,
        ):
            common = (plan, cores, weights, 1, mean)
            with mock.patch.object(triton_parts, "DEFAULT_WORKSPACE_BYTES", workspace):
                triton_engine.forward(*common, dtype, None, config)
                triton_engine.backward(grad, *common, True, True, None, config)


@contextlib.contextmanager
def _recorded(found: dict[Launch, None]) -> Iterator[None]:
    from triton.runtime.jit import JITFunction

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found[_launch(kernel, args, kwargs)] = None

    with mock.patch.object(JITFunction, "run", record):
        yield


def _launch(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs[name] for name in kwargs.keys() - set(kernel.arg_names)}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_DTYPE_NAMES[value.dtype]}"
        else:
            assert isinstance(value, int)
            signature[parameter.name] = "i32"
    return Launch(
        kernel,
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        options=tuple(sorted(options.items())),
    )


# What the compiler makes of it


def compile_launch(launch: Launch, target: str) -> Resources:
    """Compiles one launch.

    Raises:
        Exception: of the compiler, when it cannot.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    position = {name: (i,) for i, name in enumerate(launch.kernel.arg_names)}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={position[name]: value for name, value in launch.constants},
        # PyTorch's allocations are aligned; the launcher tells the compiler so, too.
        attrs={
            position[name]: [["tt.divisibility", 16]]
            for name, dtype in launch.signature
            if dtype.startswith("*")
        },
    )
    gpu = GPUTarget("hip", target, 64)
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    with _assembler_log() as log:
        compiled = triton.compile(source, target=gpu, options=dict(launch.options))
    registers, spills = (
        _nvidia_registers(log.getvalue())
        if target.startswith("sm_")
        else _amd_registers(compiled.asm["amdgcn"])
    )
    return Resources(
        launch.kernel.__name__, launch.config, target, registers, compiled.metadata.shared, spills
    )


@contextlib.contextmanager
def _assembler_log() -> Iterator[io.StringIO]:
    """What `ptxas` says of kernels compiled meanwhile; none comes out of the cache."""
    from triton import knobs

    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.nvidia.scope(),
        knobs.cache.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        yield log


def _nvidia_registers(log: str) -> tuple[int, int]:
    """Registers, and bytes spilled to and loaded from memory."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert registers is not None and spills, log
    return int(registers[1]), sum(map(int, spills))


def _amd_registers(assembly: str) -> tuple[int, int]:
    """Vector registers, accumulation registers included, and how many are spilled."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert found is not None, name
        return int(found[1])

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), spills
