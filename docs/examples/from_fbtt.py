"""Cores of FBTT-Embedding become those of a table here."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ecorec_torchrec import TTEmbeddingBagCollection


@torch.no_grad()
def cores_from_fbtt(
    ebc: TTEmbeddingBagCollection, table: str, tt_cores: Sequence[Tensor], number: int = 0
) -> None:
    """Copies table `number` of a (table-batched) TTEmbeddingBag of FBTT into `table` of `ebc`."""
    for core, theirs in zip(ebc.embedding_bags[table].tt_cores, tt_cores, strict=True):
        core.copy_(theirs[number].view(core.shape))
