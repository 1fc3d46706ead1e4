"""What TorchRec asks of every compute kernel, where a table has no `<table>.weight`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding


class WeightlessKernel(BaseEmbedding):
    """A compute kernel whose tables the sharded collection registers and saves itself.

    TorchRec's bookkeeping speaks of one whole weight per table, which tables of TT cores and of
    memory tiers do not have. Comes before one of TorchRec's two base classes of compute kernels.
    """

    def split_embedding_weights(self) -> list[Tensor]:
        return []

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        return {} if destination is None else destination

    def named_split_embedding_weights(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()
