"""Where the time of a training step goes: lookups, exposed communication, data, dense part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.types import Awaitable

from ecorec_torchrec.sharding import ShardedTTEmbeddingBagCollection, ShardedTTEmbeddingCollection

LOOKUP, EXPOSED_COMM, WAIT = "lookup", "exposed_comm", "wait"
_PARTS = (LOOKUP, EXPOSED_COMM, WAIT)
_UNFINISHED_STEPS = 2  # that a GPU may be behind before its times are asked for

Mark = Any
"""A point in time: seconds of the host, or an event on the computing stream of a device."""


class StepTimes:
    """Time of training steps by part, measured where a rank computes or stands waiting.

    - `lookup_ms`: lookups, their gradients and the updates of tables in the backward pass.
    - `exposed_comm_ms`: waits for ids, pooled rows or sequences, and their gradients. What travels
      while something is computed does not count.
    - `wait_ms`: waits for the next batch of the data set.
    - `dense_ms`: everything else: the dense part, its optimizer, the all-reduce of its gradients.

    On CPUs by the host's clock; on GPUs by events on the stream that computes, which are read two
    steps later, so that the host never waits for the device. The hooks take some tenths of a
    millisecond of the host's time per dist group and step: on a CPU less than 1 % of steps of a few
    hundred milliseconds, more of short ones.

    Args:
        device: of the model.

    Example::

        pipeline = EcoRecTrainPipeline(model, optimizer, device, times_steps=True)
        for _ in range(20):
            pipeline.progress(batches)
        pipeline.step_times.take()  # {"step_ms": 9.1, "lookup_ms": 4.0, ..}: means of 20 steps
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = None if device.type == "cpu" else torch.get_device_module(device)
        self._is_open = False
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._handles: list[RemovableHandle] = []
        self._finished: deque[tuple[Mark, Mark, list[tuple[str, Mark, Mark]]]] = deque()
        self._clear()

    def watch(
        self, collection: ShardedTTEmbeddingBagCollection | ShardedTTEmbeddingCollection
    ) -> None:
        """Times the lookups of a sharded collection, and its waits for what they send."""
        for lookup in collection._lookups:
            begin, end = self._brackets(LOOKUP)
            lookup.register_forward_pre_hook(begin)
            lookup.register_forward_hook(end)
            lookup.register_forward_hook(self._watch_lookup_backward)
        for output_dist in collection._output_dists:
            output_dist.register_forward_hook(self._watch_output)

    @contextmanager
    def step(self, is_training: bool) -> Iterator[None]:
        """Around a step; one that is not of training, or that raises, does not count."""
        self._is_open = is_training
        start = self._mark() if is_training else None
        try:
            yield
            if is_training:
                self._finished.append((start, self._mark(), self._spans))
                self._read(leave=_UNFINISHED_STEPS)
        finally:
            self._is_open = False
            self._spans = []
            for handle in self._handles:  # some nodes of the graph outlive the step
                handle.remove()
            self._handles = []

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Counts what is done inside to a part of the current step."""
        begin, end = self._brackets(part)
        begin()
        yield
        end()

    def take(self) -> dict[str, float]:
        """Mean milliseconds of the steps since the last call: `step_ms`, and its parts.

        Empty if there were no training steps. The parts add up to `step_ms`.
        """
        self._read(leave=0)
        if not self._num_steps:
            return {}
        means = {f"{name}_ms": ms / self._num_steps for name, ms in self._sums_ms.items()}
        means["dense_ms"] = means["step_ms"] - sum(means[f"{part}_ms"] for part in _PARTS)
        self._clear()
        return means

    def _clear(self) -> None:
        self._num_steps = 0
        self._sums_ms = dict.fromkeys(("step", *_PARTS), 0.0)

    def _read(self, leave: int) -> None:
        """Adds up finished steps but for the last `leave`, which a device may still be at."""
        while len(self._finished) > leave:
            start, end, spans = self._finished.popleft()
            if self._streams is not None:
                end.synchronize()
            self._num_steps += 1
            for part, begin, finish in [("step", start, end), *spans]:
                self._sums_ms[part] += self._elapsed_ms(begin, finish)

    def _mark(self) -> Mark:
        if self._streams is None:
            return time.perf_counter()
        event = self._streams.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_ms(self, begin: Mark, end: Mark) -> float:
        return (end - begin) * 1e3 if self._streams is None else begin.elapsed_time(end)

    def _brackets(self, part: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Two hooks for before and after something that counts to a part.

        A second end counts what has been done since the first.
        """
        counted_to: list[Mark] = []

        def begin(*_: Any) -> None:
            if self._is_open:
                counted_to[:] = [self._mark()]

        def end(*_: Any) -> None:
            if self._is_open and counted_to:
                now = self._mark()
                self._spans.append((part, counted_to[0], now))
                counted_to[0] = now

        return begin, end

    def _watch_output(self, _dist: nn.Module, _inputs: Any, output: Awaitable[Tensor]) -> Any:
        return _TimedWait(output, self) if self._is_open else None

    def _watch_lookup_backward(self, _lookup: nn.Module, _inputs: Any, output: Tensor) -> None:
        if not self._is_open or output.grad_fn is None:
            return
        # The engine goes through a lookup's few nodes in one go: a hook at the first of them, and
        # one at each of the last, the parameters', whose gradient hooks update the tables.
        begin, end = self._brackets(LOOKUP)
        self._handles.append(output.grad_fn.register_prehook(begin))
        for node in _graph_below(output.grad_fn):
            if not node.next_functions:
                self._handles.append(node.register_hook(end))

    def watch_gradient_wait(self, output: Tensor) -> None:
        """TorchRec's collectives are pairs of nodes: in backward `_Wait` sends, `_Req` waits."""
        if self._is_open and output.grad_fn is not None:
            for node in _graph_below(output.grad_fn, _waits_for_gradients):
                if _waits_for_gradients(node):
                    begin, end = self._brackets(EXPOSED_COMM)
                    self._handles += [node.register_prehook(begin), node.register_hook(end)]


class _TimedWait(Awaitable[Tensor]):
    """An output on its way, the wait for which counts as exposed communication."""

    def __init__(self, output: Awaitable[Tensor], times: StepTimes) -> None:
        super().__init__()
        self._output = output
        self._times = times

    def _wait_impl(self) -> Tensor:
        with self._times.span(EXPOSED_COMM):
            output = self._output.wait()
        self._times.watch_gradient_wait(output)
        return output


def _waits_for_gradients(node: Node) -> bool:
    return node.name().endswith("_ReqBackward")


def _graph_below(root: Node, is_last: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """The nodes that a gradient passes from `root` on, none of them below one that `is_last`."""
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        yield node
        if is_last(node):
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
