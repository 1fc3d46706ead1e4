"""TorchRec's train pipeline, with a wait for the ids of each dist group alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.profiler import record_function
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineContext, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.types import PipelineState
from torchrec.distributed.types import NoWait

from ecorec_torchrec.dist import GroupedKJTListAwaitable
from ecorec_torchrec.sharding import (
    ShardedTTEmbeddingBagCollection,
    ShardedTTEmbeddingCollection,
    tiered_rows,
)

from .step_times import EXPOSED_COMM, WAIT, StepTimes

In = TypeVar("In")
Out = TypeVar("Out")

_OURS = (ShardedTTEmbeddingBagCollection, ShardedTTEmbeddingCollection)


class EcoRecTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """A `TrainPipelineSparseDist` in which communication overlaps within a batch as well.

    TorchRec's pipeline sends the ids of the next batch while the current one is computed. On top,
    the collections of `get_ecorec_sharders` wait for the ids of one dist group at a time (see
    `num_dist_groups`): the lookup of a group starts when its ids have arrived, its output travels
    while the next group is looked up, and gradients mirror that. The numbers are those of training
    without a pipeline.

    The rows of tiered tables are brought into their slots by threads of their own while earlier
    batches are trained on: as many batches ahead as the `prefetch_batches` of some table's
    `TierSpec` asks for, the most of all tables. An evaluation brings none in.

    Batches that were fetched in training are trained on, and those fetched in evaluation are
    evaluated: `model.eval()` and `model.train()` may be called between any two steps, and the
    batches in flight of either mode wait for their turn.

    Args:
        args, kwargs: as `TrainPipelineSparseDist`: `model`, `optimizer`, `device`, and its options.
        times_steps: tell where the time of training steps goes, in `step_times`.

    Attributes:
        step_times: a `StepTimes`; None without `times_steps`.

    Raises:
        ValueError: (in the first `progress`) the model's `forward` takes `*args`.

    Example::

        pipeline = EcoRecTrainPipeline(model, optimizer, device)
        batches = iter(loader)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
    """

    def __init__(self, *args: Any, times_steps: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_times = StepTimes(self._device) if times_steps else None
        if self.step_times is not None:
            for module in self._model.modules():
                if isinstance(module, _OURS):
                    self.step_times.watch(module)
        self._was_training = self._model.training
        self._other_mode = self._nothing_in_flight()
        self._prefetch_batches = 0
        for rows in tiered_rows(self._model):
            rows.forget_prefetched()  # by a pipeline that was given up
            self._prefetch_batches = max(self._prefetch_batches, rows.prefetch_batches)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step on the next batch of the model's mode, training or evaluation.

        Raises:
            StopIteration: `dataloader_iter` is exhausted, and all its batches have been used.
        """
        if self._model.training != self._was_training:
            self._was_training = self._model.training
            self._swap_modes()
        if len(self.batches) == 1 and dataloader_iter is not self._dataloader_iter:
            # The last batch of another iterator. TorchRec would start no input dist for the next.
            self.enqueue_batch(dataloader_iter)
        is_training = self._model.training
        prefetches = self._prefetch_batches > 0 and is_training
        step = self._progress_with_prefetch if prefetches else super().progress
        if self.step_times is None:
            return step(dataloader_iter)
        with self.step_times.step(is_training=is_training):
            return step(dataloader_iter)

    def _progress_with_prefetch(self, dataloader_iter: Iterator[In]) -> Out:
        """A training step as TorchRec's, but with more batches between their ids and their lookup.

        While batch i is trained on, the rows of batches i + 1 to i + k are brought in, and the ids
        of batch i + k + 1 are sent: k steps are time to bring rows in, and one to send ids.
        """
        self._state = PipelineState.IDLE
        if not self._model_attached:
            self.attach(self._model)
        known, sending = self._prefetch_batches, self._prefetch_batches + 1
        while len(self.batches) <= sending + 1 and self.enqueue_batch(dataloader_iter):
            pass
        if not self.batches:
            raise StopIteration
        self._send_first_ids(sending)
        for context in list(self.contexts)[: known + 1]:
            self._prefetch_rows(context)
        self._set_module_context(self.contexts[0])
        with record_function("## zero_grad ##"):
            self._optimizer.zero_grad()
        self._wait_for_batch()
        if self._clear_data_dist_inputs:
            self.clear_sparse_data_dist_inputs(self.contexts[0])
        is_sending = len(self.batches) > sending
        if is_sending:
            self.start_sparse_data_dist(self.batches[sending], self.contexts[sending])
        with record_function(f"## forward {self.contexts[0].index} ##"):
            self._state = PipelineState.CALL_FWD
            losses, output = self._model_fwd(self.batches[0])
        if is_sending:
            self.wait_sparse_data_dist(self.contexts[sending])
        self._state = PipelineState.CALL_BWD
        self._backward(losses)
        self._optimizer_step()
        self.dequeue_batch()
        return output

    def _send_first_ids(self, count: int) -> None:
        """Sends the ids of the first batches, which none was trained on in the meantime."""
        if not self._pipelined_modules:
            self._pipeline_model(self.batches[0], self.contexts[0], self._pipelined_forward_type)
            self.wait_sparse_data_dist(self.contexts[0])
        for batch, context in list(zip(self.batches, self.contexts, strict=True))[:count]:
            if not context.input_dist_tensors_requests:
                self.start_sparse_data_dist(batch, context)
                self.wait_sparse_data_dist(context)

    def _prefetch_rows(self, context: TrainPipelineContext) -> None:
        """Waits for the ids of a batch, once, and has the rows of tiered tables brought in."""
        requests = context.input_dist_tensors_requests
        for module in self._pipelined_modules:
            name = module.forward.name
            is_tiered = isinstance(module, _OURS) and module.tiered_rows.specs
            if not is_tiered or isinstance(requests[name], NoWait):
                continue
            with record_function(f"## prefetch rows {context.index} ##"):
                with self._stream_context(self._data_dist_stream):
                    ids = requests[name].wait()
                if self._data_dist_stream is not None:
                    ids.record_stream(torch.get_device_module(self._device).current_stream())
                requests[name] = NoWait(ids)
                module.prefetch_rows(ids)

    def reset(self) -> None:
        """Forgets the batches in flight, of both modes."""
        super().reset()
        for rows in tiered_rows(self._model):
            rows.forget_prefetched()
        self._other_mode = self._nothing_in_flight()

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        """Sends the ids of a batch whose sizes are known, to be waited for group by group."""
        with self._counted_as(EXPOSED_COMM):
            super().wait_sparse_data_dist(context)
        requests = context.input_dist_tensors_requests
        ours = {m.forward.name for m in self._pipelined_modules if isinstance(m, _OURS)}
        for name in ours & requests.keys():
            requests[name] = GroupedKJTListAwaitable.of(
                requests[name], self._device, waiting=lambda: self._counted_as(EXPOSED_COMM)
            )

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        with self._counted_as(WAIT):
            return super()._next_batch(dataloader_iter)

    def _counted_as(self, part: str) -> AbstractContextManager[None]:
        return nullcontext() if self.step_times is None else self.step_times.span(part)

    def _pipeline_model(self, *args: Any, **kwargs: Any) -> None:
        model = self._model
        traced = model.module if isinstance(model, DistributedModelParallel) else model
        parameters = inspect.signature(traced.forward).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            # TorchRec would take args[0] for an item of the batch.
            raise ValueError(
                f"{type(traced).__name__}.forward takes *args: name its argument, such as `batch`, "
                "so that the pipeline can tell what of a batch goes to which collection"
            )
        super()._pipeline_model(*args, **kwargs)
        for name, module in traced.named_modules():
            if isinstance(module, _OURS) and module not in self._pipelined_modules:
                warnings.warn(
                    f"the input dist of {name!r} does not overlap with the batch before: its input "
                    "must be an attribute or item of the batch, such as batch.features, unchanged",
                    stacklevel=2,
                )

    def _nothing_in_flight(self) -> dict[str, Any]:
        """What TorchRec's pipeline keeps of the batches that it has fetched and not yet used."""
        return {
            "batches": type(self.batches)(),
            "contexts": type(self.contexts)(),
            "_dataloader_iter": None,
            "_dataloader_exhausted": False,
        }

    def _swap_modes(self) -> None:
        current = {name: getattr(self, name) for name in self._other_mode}
        for name, value in self._other_mode.items():
            setattr(self, name, value)
        self._other_mode = current
