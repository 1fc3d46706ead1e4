"""Storage of a group of TT tables: K flat leaves inside, one view per table and core outside.

Tables with equal column factors and ranks lie one after the other along the row factor, so that a
lookup, an optimizer step and a gradient bucket take K tensors however many tables there are.

Legend: T tables, K cores, p rows of a core, q column factors, r ranks. A flat leaf is of shape
`(sum_t p_t, r_{k-1} * q_k * r_k)`; a table's view of it is `(p_k, r_{k-1}, q_k, r_k)`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.tt import TTSpec


class GroupableSpec:
    """A table's TT shape, equal to the shape of every table that may share its group.

    TorchRec groups tables by the equality of their `fused_params`; row factors may differ within a
    group, so they do not count here. Each table keeps its own `spec`.
    """

    def __init__(self, spec: TTSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupableSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"GroupableSpec({self.spec})"

    def _key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.spec.col_factors, self.spec.ranks


class CoreSlice(nn.Parameter):
    """One core of one table: a view of a flat leaf that optimizers and modules take for a leaf.

    The n-dimensional counterpart of TorchRec's `TableBatchedEmbeddingSlice`. Its `grad` is the
    slice of the leaf's; setting one core's `grad` to None drops that of the whole group.

    Args:
        flat: the leaf, 2-D.
        start: first row of the table in the leaf.
        shape: `(p_k, r_{k-1}, q_k, r_k)`.
    """

    def __new__(cls, flat: nn.Parameter, start: int, shape: tuple[int, ...]) -> CoreSlice:
        with torch.enable_grad():  # a view made without grad mode would not require grad
            rows = flat[start : start + shape[0]].view(shape)
            return rows.as_subclass(cls)

    def __init__(self, flat: nn.Parameter, start: int, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self._start = start
        self._grad_of_flat: Tensor | None = None
        self._grad_view: Tensor | None = None
        if self.requires_grad:  # not so under torch.inference_mode, for evaluation only
            self.retain_grad()  # torch.optim refuses a non-leaf unless it retains its gradient

    def rows_of(self, tensor: Tensor) -> Tensor:
        """This table's rows of a tensor laid out like the leaf, in the core's shape if they fit."""
        rows = tensor[self._start : self._start + self.shape[0]]
        return rows.view(self.shape) if rows.numel() == self.numel() else rows

    @property
    def grad(self) -> Tensor | None:
        grad = self.flat.grad
        if grad is None:
            return self._grad_view if self._grad_of_flat is None else None
        if self._grad_of_flat is not grad:
            self._grad_of_flat, self._grad_view = grad, self.rows_of(grad)
        return self._grad_view

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        # Without a gradient on the leaf the value is only kept: `KeyedOptimizer.init_state` sets
        # zeros this way to make the state of an optimizer.
        self._grad_of_flat, self._grad_view = None, grad
        if grad is None:
            self.flat.grad = None
        elif self.flat.grad is not None:
            self.rows_of(self.flat.grad).copy_(grad)

    def requires_grad_(self, requires_grad: bool = True) -> CoreSlice:
        """Keeps what is; a change would be one of all tables of the group.

        Raises:
            ValueError: `requires_grad` is not what it is.
        """
        if requires_grad != self.flat.requires_grad:
            raise ValueError(
                f"requires_grad of sharded TT cores cannot be set to {requires_grad}, they are "
                "views of storage that tables share: freeze a table's cores before the model is "
                "sharded, and evaluate under torch.no_grad()"
            )
        return self

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        return None  # nn.Module registers leaves only

    def __deepcopy__(self, memo: dict[int, Any]) -> CoreSlice:
        if id(self) not in memo:
            flat = copy.deepcopy(self.flat, memo)  # once per group: the copies share it
            memo[id(self)] = CoreSlice(flat, self._start, tuple(self.shape))
        return memo[id(self)]


class TableCores(nn.ParameterList):
    """The K core slices of one table, as users see them under `<collection>.<table>.tt_cores`.

    Conversions that would cut the slices off their storage are refused.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableCores:
        _refuse_conversion(fn, self)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            warnings.warn(
                f"load_state_dict(assign=True) is ignored for {prefix[:-1]}: the cores are views "
                "of a group's storage, so their values are copied",
                stacklevel=2,
            )
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class GroupCores(nn.Module):
    """The cores of T tables as K flat leaves.

    Args:
        batch: the tables.
        dtype: of the cores.
        device: of the cores.
        requires_grad: False freezes all tables of the group.

    Example::

        cores = GroupCores(batch, torch.float32, torch.device("cpu"))
        batched_tt_embedding_bag(indices_L, offsets, cores(), batch)
        cores.tables["user"][0].shape   # (4, 1, 2, 8), rows 0..3 of cores.flat[0]
    """

    def __init__(
        self,
        batch: TableBatch,
        dtype: torch.dtype,
        device: torch.device | None,
        requires_grad: bool = True,
    ) -> None:
        super().__init__()
        self._shapes = batch.core_shapes
        self.flat = nn.ParameterList(
            nn.Parameter(
                torch.zeros(shape[0], math.prod(shape[1:]), dtype=dtype, device=device),
                requires_grad=requires_grad,
            )
            for shape in self._shapes
        )
        self.tables: Mapping[str, list[CoreSlice]] = {
            name: [
                CoreSlice(flat, batch.core_offsets[k][table], (rows, *self._shapes[k][1:]))
                for k, (flat, rows) in enumerate(zip(self.flat, row_factors, strict=True))
            ]
            for table, (name, row_factors) in enumerate(
                zip(batch.table_names, batch.row_factors, strict=True)
            )
        }

    def forward(self) -> list[Tensor]:
        """The K cores of the group, `(sum_t p_t, r_{k-1}, q_k, r_k)`, for the lookup."""
        return [flat.view(shape) for flat, shape in zip(self.flat, self._shapes, strict=True)]

    def named_slices(self) -> dict[str, CoreSlice]:
        """Every core of every table under its public name `<table>.tt_cores.<k>`."""
        return {
            f"{table}.tt_cores.{k}": core
            for table, cores in self.tables.items()
            for k, core in enumerate(cores)
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupCores:
        _refuse_conversion(fn, self.flat)
        return self


def _refuse_conversion(fn: Callable[[Tensor], Tensor], cores: Iterable[Tensor]) -> None:
    """Moving or casting replaces storage, which would silently part the views from the leaf."""
    for core in cores:
        probe = core.detach()[:0]
        with torch.no_grad():
            converted = fn(probe)
        if converted.dtype != core.dtype or converted.device != core.device:
            raise TypeError(
                f"sharded TT cores cannot be converted from {core.dtype} on {core.device} to "
                f"{converted.dtype} on {converted.device}: set data_type in the table's config "
                "and the device of the sharded module instead"
            )
