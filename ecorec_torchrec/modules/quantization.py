"""Collections with TT tables where `torchrec.inference` quantizes: TT tables have no rows to."""

from __future__ import annotations

import warnings
from typing import Any

from ecorec_torchrec.tt import TTSpec


class NotQuantizable:
    """A collection with TT tables stays as it is where a model is quantized.

    `torch.ao.quantization`, and `torchrec.inference.modules.quantize_embeddings` on top of it, mark
    every module with a `qconfig` before anything is converted: None for those that they leave as
    they are. A collection without TT tables is marked as any other.
    """

    _tt_specs: dict[str, TTSpec]

    @property
    def qconfig(self) -> Any:
        """The mark. Setting it raises NotImplementedError where there are TT tables."""
        try:
            return self.__dict__["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    @qconfig.setter
    def qconfig(self, config: Any) -> None:
        tables = list(self._tt_specs)
        if tables and config is not None:
            raise NotImplementedError(
                f"TT tables {tables} cannot be quantized for inference: export the model with "
                "torch.export (docs/guides/serving.md), or make the tables dense with "
                "ecorec_torchrec.to_dense"
            )
        if tables:
            warnings.warn(
                f"the collection with TT tables {tables} is not quantized, it stays as it is",
                stacklevel=4,
            )
        self.__dict__["qconfig"] = config

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]
