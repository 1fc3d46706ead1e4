"""One clear error where TorchRec is missing, too old, or cannot start."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

MIN_TORCHREC_VERSION = "1.8"


def require_torchrec() -> None:
    """Imports TorchRec, or says what is wrong with the installation and how to mend it.

    Raises:
        ImportError: TorchRec is missing or older than `MIN_TORCHREC_VERSION`, or its FBGEMM is the
            CUDA build on a machine without an NVIDIA driver.
    """
    try:
        found = version("torchrec")
    except PackageNotFoundError as error:
        raise ImportError(
            f"torchrec is not installed; version {MIN_TORCHREC_VERSION} or newer is needed"
        ) from error
    if Version(found) < Version(MIN_TORCHREC_VERSION):
        raise ImportError(f"torchrec {found} is too old, {MIN_TORCHREC_VERSION} or newer is needed")
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(f"torchrec {found} cannot be imported: {error}{_cure()}") from error


def _cure() -> str:
    try:
        found = version("fbgemm-gpu")
    except PackageNotFoundError:
        return ""
    return (
        f". fbgemm-gpu {found} is installed, which needs an NVIDIA driver (torchrec depends on it, "
        "and it overwrites fbgemm-gpu-cpu, which lies in the same folder). On a machine without "
        "one, install the pinned CPU environment: pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu; "
        "pip install --no-deps -r requirements/cpu.txt"
    )
