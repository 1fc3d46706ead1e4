"""A TorchRec that is missing, too old or cannot start is named, with the cure."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from ecorec_torchrec import errors


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(errors, "version", lambda name: version(name.replace("-", "_")))


def test_this_installation_is_accepted() -> None:
    errors.require_torchrec()


def test_missing_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(ImportError, match=r"torchrec is not installed; version 1\.8 or newer"):
        errors.require_torchrec()


def test_old_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torchrec="1.7.1")
    with pytest.raises(ImportError, match=r"torchrec 1\.7\.1 is too old, 1\.8 or newer is needed"):
        errors.require_torchrec()


@pytest.mark.parametrize("version", ["1.8.0", "1.9.2", "1.10.0"])
def test_newer_torchrec(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, torchrec=version)
    errors.require_torchrec()


def test_cuda_fbgemm_without_a_driver_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fbgemm_gpu")
    pretend(monkeypatch, torchrec="1.8.0", fbgemm_gpu="1.8.0")
    with pytest.raises(ImportError, match=r"libcuda.*--no-deps -r requirements/cpu\.txt"):
        errors.require_torchrec()
