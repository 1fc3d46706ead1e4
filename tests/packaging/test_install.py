"""What is installed: the wheel holds every package and file, and light imports stay light."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_holds_families_configs_and_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "runs", "__pycache__", "*.egg-info", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    subprocess.run(command, check=True, timeout=300)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for folder, prefix in (
        ("kernels", "ecorec_torchrec/kernels"),
        ("configs", "ecorec_torchrec/configs"),
    ):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]:
            assert f"{prefix}/{path.relative_to(ROOT / folder)}" in names
    assert "ecorec_torchrec/py.typed" in names
    assert not any(name.startswith(("kernels/", "tests/")) for name in names)


def test_importing_the_package_and_its_kernels_leaves_torchrec_alone() -> None:
    code = (
        "import sys, ecorec_torchrec, ecorec_torchrec.tt, ecorec_torchrec.kernels\n"
        "sys.exit(sum(name in sys.modules for name in ('torchrec', 'fbgemm_gpu')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_public_name_loads() -> None:
    import ecorec_torchrec

    for name in ecorec_torchrec.__all__:
        assert getattr(ecorec_torchrec, name).__name__ == name


def test_unknown_public_name_is_an_attribute_error() -> None:
    import pytest

    import ecorec_torchrec

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ecorec_torchrec.nothing  # noqa: B018
