"""TorchRec's train pipeline, with a wait for the ids of each dist group alone."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineContext, TrainPipelineSparseDist

from ecorec_torchrec.dist import GroupedKJTListAwaitable
from ecorec_torchrec.sharding import ShardedTTEmbeddingBagCollection, ShardedTTEmbeddingCollection

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
        if self.step_times is None:
            return super().progress(dataloader_iter)
        with self.step_times.step(is_training=self._model.training):
            return super().progress(dataloader_iter)

    def reset(self) -> None:
        """Forgets the batches in flight, of both modes."""
        super().reset()
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
