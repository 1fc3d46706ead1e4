"""The house rules: packages are listed, imports go one way, the kernel families stand alone."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "ecorec_torchrec"

# Bottom-up: a package may import those before it.
IMPORT_ORDER = [
    "errors",
    "tt",
    "kernels",
    "tiers",
    "modules",
    "plan",
    "lookup",
    "dist",
    "sharding",
    "planner",
    "pipeline",
    "configs",
    "train",
    "bench",
    "cli",
    "testing",
]
KERNEL_LIBRARIES = {"torch", "triton", "numba", "llvmlite", "numpy"}


def setuptools_config() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    mapped = setuptools_config()["package-dir"]
    return ROOT / mapped.get(package, package.replace(".", "/"))


def modules_of(package: str) -> Iterator[Path]:
    yield from sorted(folder_of(package).glob("*.py"))


def imported_names(path: Path, package: str) -> Iterator[str]:
    """Absolute names of all that a file imports; relative imports resolved against `package`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join(base) if node.level else ""
            yield ".".join(filter(None, [prefix, node.module]))


def test_every_folder_with_modules_is_a_listed_package() -> None:
    mapped = {folder: name for name, folder in setuptools_config()["package-dir"].items()}
    on_disk = set()
    for top in (PACKAGE, "kernels", "configs"):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            on_disk.add(mapped.get(folder, folder.replace("/", ".")))
    assert on_disk == set(setuptools_config()["packages"])


def test_kernels_folder_is_no_package() -> None:
    """With an __init__.py it would shadow another project's `kernels` on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("package", setuptools_config()["packages"])
def test_imports_go_one_way(package: str) -> None:
    parts = package.split(".")
    if len(parts) == 1:
        return
    own_level = IMPORT_ORDER.index(parts[1])
    for path in modules_of(package):
        for name in imported_names(path, package):
            target = name.split(".")
            if target[0] == PACKAGE and len(target) > 1 and target[1] in IMPORT_ORDER:
                assert IMPORT_ORDER.index(target[1]) <= own_level, f"{path} imports {name}"


@pytest.mark.parametrize(
    "package", [p for p in setuptools_config()["packages"] if ".kernels." in p]
)
def test_kernel_families_import_no_more_than_their_libraries(package: str) -> None:
    import sys

    for path in modules_of(package):
        for name in imported_names(path, package):
            top = name.split(".")[0]
            inside = name.startswith(f"{PACKAGE}.kernels.")
            assert inside or top in KERNEL_LIBRARIES | sys.stdlib_module_names, f"{path}: {name}"


def test_every_dependency_is_pinned_in_the_cpu_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
        if "==" in line
    }
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = {dep.split(">")[0].split("=")[0].strip().lower() for dep in wanted}
    assert names <= pinned
