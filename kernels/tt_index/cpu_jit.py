"""How the loops of the CPU engine are compiled: once per machine, outside of the GIL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from numba import njit

# No reference counts: the callers hold the arrays, and counting them up and down around every inner
# call, atomically, took a fifth of a lookup. The loops can therefore not allocate.
_OPTIONS = {"nogil": True, "_nrt": False}


def compiled(signature: Any = None, **options: Any) -> Callable[[Callable], Any]:
    """`numba.njit` without the GIL and without allocation, with the machine code kept on disk.

    numba keeps it beside the source or, where that is read-only, in the user's cache folder
    (`NUMBA_CACHE_DIR` chooses another). It looks at the source file of the function alone: after a
    change to a function that others call, touch the files of the callers too.

    Args:
        signature: compile for these types at once and for no others; None: on the first call.
        options: of `numba.njit`.

    Warns:
        RuntimeWarning: there is no folder to write to, so that each process compiles anew.
    """

    def decorate(function: Callable) -> Any:
        arguments = () if signature is None else (signature,)
        try:
            return njit(*arguments, cache=True, **_OPTIONS, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            warnings.warn(
                "numba finds no folder for its cache, each process compiles for some seconds; "
                "set NUMBA_CACHE_DIR to a writable folder",
                RuntimeWarning,
                stacklevel=1,
            )
            return njit(*arguments, **_OPTIONS, **options)(function)

    return decorate
