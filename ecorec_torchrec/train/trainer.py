"""The training loop of one variant of the model."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from tqdm import tqdm

from ecorec_torchrec.pipeline import EcoRecTrainPipeline, StepTimes
from ecorec_torchrec.plan import save_plan
from ecorec_torchrec.sharding import tiered_rows
from ecorec_torchrec.train.checkpoint import Checkpoints, Progress
from ecorec_torchrec.train.config import TrainConfig
from ecorec_torchrec.train.data import Dataset, RankBatch, Split, fold_ids
from ecorec_torchrec.train.initial_weights import load_weights
from ecorec_torchrec.train.measure import embedding_bytes
from ecorec_torchrec.train.metrics import BinaryQuality, Quality
from ecorec_torchrec.train.model import Variant
from ecorec_torchrec.train.optimizers import build_optimizer, warm_up
from ecorec_torchrec.train.placement import PlannedModel, plan_variant, shard_model
from ecorec_torchrec.train.run_folder import MetricsWriter
from ecorec_torchrec.train.tiers import tier_figures

_CHANCE_MARGIN = 0.005


@dataclass(frozen=True)
class TrainResult:
    """What came out of a run.

    Attributes:
        variant: its name.
        test: quality on the test split after the best epoch.
        best_epoch: the epoch (from 1) that validation chose.
        val_score: its validation AUC (or, where that is not defined, minus its loss).
        samples_per_second: median over the warm log windows, all ranks together.
        table_bytes: bytes by table, optimizer state included.
        history: rows of `metrics.csv`.
    """

    variant: str
    test: Quality
    best_epoch: int
    val_score: float
    samples_per_second: float
    table_bytes: dict[str, int]
    history: list[dict[str, object]]

    @property
    def embedding_bytes(self) -> int:
        return sum(self.table_bytes.values())


class Trainer:
    """Plans, shards and trains one variant of the model; needs a process group.

    Args:
        config: of the run.
        dataset: whose batches every variant sees in the same order.
        variant: which model.
        folder: where plan, metrics and checkpoints go (it exists).
        device: of this rank.
        planned: of `plan_variant`, when the model was planned beforehand.
        quiet: print nothing but warnings.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        variant: Variant,
        folder: Path,
        device: torch.device,
        *,
        planned: PlannedModel | None = None,
        quiet: bool = False,
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._variant = variant
        self._folder = folder
        self._device = device
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._prints = self._rank == 0 and not quiet

        if planned is None:
            planned = plan_variant(config, dataset.schema, variant, device)
        if self._prints:
            print(f"plan of the {variant.name} model:")
            planned.report.print()
        if self._rank == 0:
            save_plan(planned.plan, folder / "plan.yaml", world_size=self._world_size)
        self.model = shard_model(planned, variant, config, device)
        self.optimizer = build_optimizer(self.model, planned.tt_specs, config.optim)
        self._pipeline, self._step_times = self._make_pipeline()
        rows = {f.name: f.num_embeddings for f in dataset.schema.sparse} | variant.folded_rows
        self._checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep, rows)
        self._progress = Progress()
        self._window = _Window(device)
        torch.manual_seed(config.seed * self._world_size + self._rank + 1)  # dropout

    def _make_pipeline(self) -> tuple[TrainPipelineSparseDist, StepTimes | None]:
        """The twins have TorchRec's own, which tells no times."""
        if not self._variant.is_ours:
            return TrainPipelineSparseDist(self.model, self.optimizer, self._device), None
        pipeline: EcoRecTrainPipeline = EcoRecTrainPipeline(
            self.model,
            self.optimizer,
            self._device,
            times_steps=self._config.train.step_times,
        )
        return pipeline, pipeline.step_times

    def fit(self) -> TrainResult:
        """Trains to the end, going on from the newest checkpoint when the run resumes.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        if not (self._config.resume and self._go_on()):
            self._start_from_weights()
        progress = self._progress
        self._metrics = self._open_metrics()
        num_steps = self._config.optim.warmup_steps
        self._learning_rates = warm_up(self.optimizer, num_steps, progress.steps)
        while progress.epoch < self._config.train.epochs and not self._is_out_of_steps():
            self._train_epoch()
            self._evaluate_epoch()
            if not self._is_out_of_steps() or self._is_epoch_complete():
                progress.epoch, progress.batches = progress.epoch + 1, 0
            self._save()
        if self._metrics is not None:
            self._metrics.close()
        speeds = [r["samples_per_second"] for r in progress.history if "samples_per_second" in r]
        result = TrainResult(
            variant=self._variant.name,
            test=Quality(**progress.best["test"]),
            best_epoch=progress.best["epoch"],
            val_score=progress.best["score"],
            samples_per_second=statistics.median(speeds[1:] or speeds),
            table_bytes=embedding_bytes(self.model, self.optimizer),
            history=progress.history,
        )
        for rows in tiered_rows(self.model):
            rows.close()
        return result

    def _start_from_weights(self) -> None:
        options = self._config.checkpoint
        if options.init_from is None:
            return
        match = load_weights(options.init_from, self.model, may_differ=options.init_may_differ)
        if self._prints:
            print(f"{match.describe()}; the optimizers start anew", flush=True)

    def _go_on(self) -> bool:
        """Takes everything from the newest checkpoint, where there is one."""
        found = self._checkpoints.load_newest(self.model, self.optimizer)
        if found is None:
            return False
        checkpoint, self._progress = found
        states = self._progress.rank_states
        # With another number of ranks the line of metrics.csv that was begun starts anew.
        if len(states) == self._world_size:
            self._window = _Window(self._device, states[self._rank]["window"])
        if self._prints:
            print(f"{self._variant.name}: going on from {checkpoint}", flush=True)
        return True

    def _save(self) -> None:
        """Saves a checkpoint, unless its weights are spoilt.

        Raises:
            FloatingPointError: they are, on any rank; the last good checkpoint is still there.
        """
        spoilt = torch.tensor(float(bool(self._spoilt_parameters())), device=self._device)
        dist.all_reduce(spoilt)
        if spoilt:
            raise FloatingPointError(self._describe_divergence())
        rank_state = {"window": self._window.sums()}
        self._checkpoints.save(self.model, self.optimizer, self._progress, rank_state)

    def evaluate(self, split: Split) -> Quality:
        """Quality on all rows of a split."""
        quality = BinaryQuality(self._device)
        self.model.eval()
        with torch.no_grad():
            for _, logits, labels in self._run(self._batches(split)):
                quality.update(logits, labels)
        self.model.train()
        return quality.compute()

    def _open_metrics(self) -> MetricsWriter | None:
        if self._rank != 0:
            return None
        tensorboard = self._config.output.tensorboard
        return MetricsWriter(self._folder, self._progress.history, tensorboard)

    def _is_out_of_steps(self) -> bool:
        limit = self._config.train.max_steps
        return limit is not None and self._progress.steps >= limit

    def _is_epoch_complete(self) -> bool:
        """False also where the number of batches is not known: the rest may turn out empty."""
        total = self._dataset.num_batches("train", self._config.train.batch_size)
        return self._progress.batches == total

    def _batches(self, split: Split, epoch: int = 0, start_batch: int = 0) -> Iterator[RankBatch]:
        batches = self._dataset.batches(
            split,
            batch_size=self._config.train.batch_size,
            rank=self._rank,
            world_size=self._world_size,
            epoch=epoch,
            start_batch=start_batch,
        )
        folded_rows = self._variant.folded_rows
        return fold_ids(batches, folded_rows) if folded_rows else batches

    def _run(
        self, batches: Iterator[RankBatch]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Runs the pipeline to its end: the pipeline holds batches, so it is never left halfway."""
        while True:
            try:
                output = self._pipeline.progress(batches)
            except StopIteration:
                return
            yield output

    def _train_epoch(self) -> None:
        progress, options = self._progress, self._config.train
        batches = self._batches("train", progress.epoch, progress.batches)
        if options.max_steps is not None:
            batches = itertools.islice(batches, options.max_steps - progress.steps)
        bar = tqdm(
            self._run(batches),
            desc=f"{self._variant.name} epoch {progress.epoch + 1}/{options.epochs}",
            initial=progress.batches,
            total=self._dataset.num_batches("train", options.batch_size),
            unit="batch",
            disable=not self._prints or not sys.stderr.isatty(),
            leave=False,
        )
        for loss, logits, _ in bar:
            progress.steps += 1
            progress.batches += 1
            self._learning_rates.step()
            self._window.add(loss, logits.numel())
            if self._window.steps >= options.log_every_steps:  # more, where a resumed run lowers it
                self._log_window()
                bar.set_postfix(loss=f"{progress.history[-1]['loss']:.4f}")
            if self._is_checkpoint_due():
                self._save()
        if self._window.steps:
            self._log_window()

    def _is_checkpoint_due(self) -> bool:
        every = self._config.checkpoint.every_steps
        return every is not None and self._progress.steps % every == 0

    def _log_window(self) -> None:
        window, self._window = self._window, _Window(self._device)
        loss, samples_per_second = window.close()
        if not math.isfinite(loss):
            raise FloatingPointError(self._describe_divergence(f"the training loss is {loss}"))
        values = {"loss": loss}
        # The speed of an epoch's last few small batches would say little.
        if window.steps >= self._config.train.log_every_steps or not self._last_speed():
            values["samples_per_second"] = samples_per_second
        if self._step_times is not None:
            values |= _mean_over_ranks(self._step_times.take(), self._device)
        values |= tier_figures(self.model, window.steps, self._device)
        self._record("train", **values)

    def _last_speed(self) -> float:
        speeds = (row.get("samples_per_second") for row in reversed(self._progress.history))
        return next((speed for speed in speeds if speed), 0.0)

    def _spoilt_parameters(self) -> list[str]:
        """Names of those of this rank that are not finite."""
        return [n for n, p in self.model.named_parameters() if not torch.isfinite(p).all()]

    def _describe_divergence(self, what: str = "weights are not finite") -> str:
        spoilt = self._spoilt_parameters()
        where = f"not finite on rank {self._rank}: {', '.join(spoilt[:5])}" if spoilt else ""
        return (
            f"{what} at step {self._progress.steps} (epoch {self._progress.epoch + 1}). "
            f"Try lower learning rates (optim.tt, optim.embedding, optim.dense). {where}"
        )

    def _evaluate_epoch(self) -> None:
        val = self.evaluate("val")
        self._record("val", **_metrics_of(val))
        if abs(val.auc - 0.5) <= _CHANCE_MARGIN and self._rank == 0:
            warnings.warn(
                f"validation AUC is {val.auc:.4f} after epoch {self._progress.epoch + 1}: "
                "the model is guessing; check labels, learning rates and initial weights",
                stacklevel=2,
            )
        line = f"val auc {val.auc:.4f} loss {val.loss:.4f} ne {val.ne:.4f}"
        # Without both labels there is no AUC, in any epoch; the loss chooses then.
        score = -val.loss if math.isnan(val.auc) else val.auc
        best = self._progress.best
        if not best or score > best["score"]:
            test = self.evaluate("test")
            self._record("test", **_metrics_of(test))
            epoch = self._progress.epoch + 1
            self._progress.best = {"score": score, "epoch": epoch, "test": asdict(test)}
            line += f" | best so far: test auc {test.auc:.4f} loss {test.loss:.4f}"
        if self._prints:
            epoch = self._progress.epoch + 1
            speed = f"{self._last_speed():,.0f} samples/s"
            print(f"{self._variant.name} epoch {epoch}: {line} | {speed}", flush=True)

    def _record(self, split: str, **values: float) -> None:
        progress = self._progress
        row = {"step": progress.steps, "epoch": progress.epoch + 1, "split": split, **values}
        if self._metrics is None:
            progress.history.append(row)
        else:
            self._metrics.add(**row)  # its history is that of the progress


def _metrics_of(quality: Quality) -> dict[str, float]:
    return {"loss": quality.loss, "auc": quality.auc, "ne": quality.ne}


def _mean_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """All ranks call it with the same names."""
    sums = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return dict(zip(values, (sums / dist.get_world_size()).tolist(), strict=True))


class _Window:
    """Loss and speed of the steps between two log lines.

    Args:
        device: of the losses.
        sums: of a window that was begun before a checkpoint.
    """

    def __init__(self, device: torch.device, sums: torch.Tensor | None = None) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = self._rows = 0
        self._start = time.perf_counter()
        if sums is not None:
            loss, rows, elapsed_s, steps = sums.tolist()
            self._loss += loss
            self._rows, self.steps = int(rows), int(steps)
            self._start -= elapsed_s

    def add(self, loss: torch.Tensor, num_rows: int) -> None:
        self.steps += 1
        self._rows += num_rows
        self._loss += loss

    def sums(self) -> torch.Tensor:
        """This rank's loss, rows, seconds and steps; waits for the device."""
        loss = self._loss.item()
        elapsed_s = time.perf_counter() - self._start
        return torch.tensor([loss, self._rows, elapsed_s, self.steps], dtype=torch.float64)

    def close(self) -> tuple[float, float]:
        """The mean loss per row and the rows per second of all ranks; they call it together."""
        sums = self.sums().to(self._loss.device)
        dist.all_reduce(sums)
        loss, rows, elapsed_s, steps = sums.tolist()
        return loss / steps, rows / (elapsed_s / dist.get_world_size())
