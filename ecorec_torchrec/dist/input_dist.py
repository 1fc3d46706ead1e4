"""Input dist by groups: the ids of a group are waited for when its lookup asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import record_function
from torchrec.distributed.embedding_sharding import (
    KJTListAwaitable,
    KJTListSplitsAwaitable,
    _set_sharding_context_post_a2a,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


Waiting = Callable[[], AbstractContextManager[None]]
"""Makes what surrounds each wait, such as a measurement of its time."""


class GroupedKJTList(KJTList):
    """The ids of every dist group; asking for those of one group waits for that group only.

    Replaces `KJTList`, which TorchRec makes when all groups have arrived. Its sharded collections
    ask for the ids of a group right before they look them up, so the first lookup runs while later
    groups still travel.

    Args:
        awaitables: one per group, of ids on their way.
        ctx: context of the sharded collection, with one sharding context per group.
        device: of the ids.
        waiting: surrounds each wait.
    """

    def __init__(
        self,
        awaitables: Sequence[Awaitable[KeyedJaggedTensor]],
        ctx: Any,
        device: torch.device,
        waiting: Waiting = nullcontext,
    ) -> None:
        self._awaitables = awaitables
        self._waiting = waiting
        self._sharding_contexts = getattr(ctx, "sharding_contexts", [])
        self._arrived: list[KeyedJaggedTensor | None] = [None] * len(awaitables)
        self._device = device
        # Ids are received on the stream that was current when they were first waited for: in a
        # train pipeline not the one that computes, which `record_stream` then tells.
        self._stream = _current_stream(device)
        self._consumers: list[torch.Stream] = []

    def __len__(self) -> int:
        return len(self._awaitables)

    def __getitem__(self, group: int) -> KeyedJaggedTensor:
        features = self._arrived[group]
        if features is None:
            with self._waiting():
                features = self._arrived[group] = self._receive(group)
        return features

    def __setitem__(self, group: int, features: KeyedJaggedTensor) -> None:
        self._arrived[group] = features

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return (self[group] for group in range(len(self)))

    @property
    def features(self) -> list[KeyedJaggedTensor]:
        """The ids of all groups, which it waits for."""
        return list(self)

    def record_stream(self, stream: torch.Stream) -> None:
        """Makes `stream` wait for each group when it is asked for, and keeps its memory till then.

        As in TorchRec, whoever moves the list to another stream calls this.
        """
        self._consumers.append(stream)
        for features in self._arrived:
            if features is not None:
                features.record_stream(stream)

    def _receive(self, group: int) -> KeyedJaggedTensor:
        with (
            self._on_stream(),
            record_function(f"## ecorec_torchrec.dist: wait for ids {group} ##"),
        ):
            features = self._awaitables[group].wait()
        # TorchRec notes the variable batch sizes of all groups at once; here of this one.
        contexts = self._sharding_contexts[group : group + 1]
        _set_sharding_context_post_a2a([features], SimpleNamespace(sharding_contexts=contexts))
        for consumer in self._consumers:
            assert self._stream is not None, "streams are recorded on devices that have them"
            consumer.wait_stream(self._stream)
            features.record_stream(consumer)
        return features

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        return torch.get_device_module(self._device).stream(self._stream)


class GroupedKJTListAwaitable(KJTListAwaitable):
    """Ids on their way whose `wait` returns at once with a `GroupedKJTList`.

    Replaces `KJTListAwaitable`.

    Args:
        awaitables, ctx, device, waiting: see `GroupedKJTList`.
    """

    def __init__(
        self,
        awaitables: Sequence[Awaitable[KeyedJaggedTensor]],
        ctx: Any,
        device: torch.device,
        waiting: Waiting = nullcontext,
    ) -> None:
        super().__init__(awaitables, ctx)
        self._device = device
        self._waiting = waiting

    @classmethod
    def of(
        cls, stock: KJTListAwaitable, device: torch.device, waiting: Waiting = nullcontext
    ) -> GroupedKJTListAwaitable:
        """What waits group by group for the ids that TorchRec's awaitable waits for all at once."""
        return cls(stock.awaitables, stock.ctx, device, waiting)

    def _wait_impl(self) -> GroupedKJTList:
        return GroupedKJTList(self.awaitables, self.ctx, self._device, self._waiting)


class GroupedKJTListSplitsAwaitable(KJTListSplitsAwaitable):
    """Sizes on their way; its `wait` sends the ids of every group, each as soon as its sizes came.

    Replaces `KJTListSplitsAwaitable`. A train pipeline fuses the sizes of several collections and
    takes no notice of it, see `EcoRecTrainPipeline`.

    Args:
        stock: TorchRec's, made by the input dist of a sharded collection.
        device: of the ids.
    """

    def __init__(self, stock: KJTListSplitsAwaitable, device: torch.device) -> None:
        super().__init__(stock.awaitables, stock.ctx, stock._module_fqn, stock._sharding_types)
        self._device = device

    def _wait_impl(self) -> GroupedKJTListAwaitable:
        return GroupedKJTListAwaitable.of(super()._wait_impl(), self._device)


def _current_stream(device: torch.device) -> torch.Stream | None:
    """None on devices without streams."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device).current_stream(device)
