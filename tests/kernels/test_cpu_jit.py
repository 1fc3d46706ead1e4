"""Compiled loops where numba can keep them, and where it cannot."""

import pytest
from ecorec_torchrec.kernels.tt_index import cpu_jit


def double(x):  # noqa: ANN001, ANN201
    return 2 * x


def test_functions_are_cached():
    function = cpu_jit.compiled()(double)
    assert function(4) == 8
    assert function.stats.cache_path


def test_without_a_writable_folder_it_compiles_all_the_same(monkeypatch):
    """A container with a read-only file system and no home folder."""
    njit = cpu_jit.njit

    def without_folder(*signature, cache=False, **options):  # noqa: ANN002, ANN003, ANN202
        def decorate(function):  # noqa: ANN001, ANN202
            if cache:  # what numba says
                raise RuntimeError("cannot cache function 'double': no locator available")
            return njit(*signature, **options)(function)

        return decorate

    monkeypatch.setattr(cpu_jit, "njit", without_folder)
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        function = cpu_jit.compiled()(double)
    assert function(4) == 8
