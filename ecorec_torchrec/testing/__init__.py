"""Helpers for tests of this package and of code that uses it: ranks on one machine.

Replaces `torchrec.distributed.test_utils.multi_process`, which spawns processes anew per test.
"""

from .ranks import RankPool

__all__ = ["RankPool"]
