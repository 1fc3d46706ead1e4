"""A whole run on one rank: the model, its twins when asked for, and the summary."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ecorec_torchrec.kernels.tt_index.op import numba_error
from ecorec_torchrec.train.checkpoint import Checkpoints, read_progress
from ecorec_torchrec.train.config import OptimizerConfig, TrainConfig
from ecorec_torchrec.train.config_file import dump_config, load_config
from ecorec_torchrec.train.data import Dataset, load_dataset
from ecorec_torchrec.train.elastic import is_restart, record_job
from ecorec_torchrec.train.initial_weights import check_match, match_weights
from ecorec_torchrec.train.metrics import Quality
from ecorec_torchrec.train.model import DENSE, Variant, main_variant
from ecorec_torchrec.train.placement import PlannedModel, plan_variant
from ecorec_torchrec.train.plots import plot_comparison, plot_metrics
from ecorec_torchrec.train.report import human_bytes, print_figures
from ecorec_torchrec.train.run_folder import (
    SUMMARY_FILE,
    prepare_run_folder,
    write_json,
    write_text,
)
from ecorec_torchrec.train.saved_state import open_state
from ecorec_torchrec.train.trainer import Trainer, TrainResult

_FP32_BYTES = 4
# Optimizer state of a dense table: values per weight, values per row.
_STATE_SIZE = {
    "sgd": (0, 0),
    "adagrad": (1, 0),
    "rowwise_adagrad": (0, 1),
    "adam": (2, 0),
}


def run(config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Trains as configured and writes the run folder. All ranks call it; returns the summary.

    Raises:
        ValueError: data, tables, shapes or plan do not fit.
        FloatingPointError: the loss is not finite.
    """
    folder = Path(config.output.folder) / config.name
    is_first = dist.get_rank() == 0
    # Mistakes in the configuration are found before an earlier run is moved aside.
    dataset = load_dataset(config.data, config.seed)
    if config.plan.file is not None and not Path(config.plan.file).is_file():
        raise ValueError(f"plan.file={config.plan.file!r} does not exist")
    variant = main_variant(config)
    planned = plan_variant(config, dataset.schema, variant, device)
    if config.checkpoint.init_from is not None:
        state = open_state(Path(config.checkpoint.init_from))
        check_match(match_weights(state, planned.model), config.checkpoint.init_may_differ)
    if is_restart(folder):
        config = replace(config, resume=True)
    if is_first:
        prepare_run_folder(folder, resume=config.resume)
        if config.resume:
            _check_same_run(folder, config)
        write_text(folder / "config.yaml", dump_config(config))
        record_job(folder)
        print(f"{config.data.name}: {dataset.describe()}", flush=True)
        if config.tt.tables and device.type == "cpu" and (why := numba_error()) is not None:
            print(
                f"TT lookups run in PyTorch operators, several times slower: {why}; "
                "install numba for the CPU kernels",
                flush=True,
            )
    dist.barrier()
    results = [_train(config, dataset, variant, folder, device, planned)]
    if config.compare_dense:
        results += _train_twins(config, dataset, results[0], folder, device)
    summary = summarise(config, dataset, results)
    if is_first:
        write_json(folder / SUMMARY_FILE, summary)
        _print_summary(summary, results, folder)
        if config.output.plots:
            _draw(results, folder)
    dist.barrier()
    return summary


def _check_same_run(folder: Path, now: TrainConfig) -> None:
    """Refuses to go on with other data, tables, optimizers or batches than the run had."""
    before = load_config(str(folder / "config.yaml"), TrainConfig)
    options = ["seed", "data", "model", "tt", "tiers.tables"]
    options += [f"optim.{part}.name" for part in ("tt", "embedding", "dense")]
    newest = Checkpoints(folder / "checkpoints", keep=1).newest()
    if newest is not None and read_progress(newest).batches:
        # The place inside an epoch is counted in batches; at its end any size will do.
        options.append("train.batch_size")
    for option in options:
        _check_same(option, *(attrgetter(option)(config) for config in (before, now)))


def _check_same(option: str, old: Any, new: Any) -> None:
    """Names the very field of a group of options that has changed."""
    if is_dataclass(old):
        for field in fields(old):
            _check_same(
                f"{option}.{field.name}", getattr(old, field.name), getattr(new, field.name)
            )
    elif old != new:
        raise ValueError(f"resume=True: {option} was {old}, and is now {new}")


def summarise(config: TrainConfig, dataset: Dataset, results: list[TrainResult]) -> dict[str, Any]:
    """The content of `summary.json`: every figure with the variant's name behind it."""
    summary: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "world_size": dist.get_world_size(),
        "num_test_rows": results[0].test.num_rows,
    }
    for result in results:
        summary |= {
            f"auc_{result.variant}": result.test.auc,
            f"loss_{result.variant}": result.test.loss,
            f"ne_{result.variant}": result.test.ne,
            f"best_epoch_{result.variant}": result.best_epoch,
            f"embedding_bytes_{result.variant}": result.embedding_bytes,
            f"samples_per_second_{result.variant}": result.samples_per_second,
        }
    by_name = {result.variant: result for result in results}
    if "tt" in by_name and "dense" in by_name:
        tt, dense = by_name["tt"], by_name["dense"]
        summary["bytes_ratio_dense_to_tt"] = dense.embedding_bytes / tt.embedding_bytes
        if occurring := _bytes_of_rows_that_occur(dataset, dense):
            summary["embedding_bytes_dense_rows_that_occur"] = occurring
            summary["bytes_ratio_rows_that_occur_to_tt"] = occurring / tt.embedding_bytes
        summary["speed_ratio_tt_to_dense"] = tt.samples_per_second / dense.samples_per_second
        summary["auc_loss_tt"] = dense.test.auc - tt.test.auc
    return summary


def hashing_rows(
    tt_bytes: dict[str, int], embedding_dim: int, optimizer: OptimizerConfig
) -> dict[str, int]:
    """Rows of dense tables that take no more bytes than the TT tables, optimizer state included.

    Args:
        tt_bytes: bytes of every TT table with its optimizer state.
        embedding_dim: D.
        optimizer: of the dense tables.

    Example::

        hashing_rows({"user_id": 26_000}, 64, OptimizerConfig(name="rowwise_adagrad"))
        # {"user_id": 100}: a row takes 64 weights and one accumulator of 4 bytes each
    """
    per_weight, per_row = _STATE_SIZE[optimizer.name]
    row_bytes = _FP32_BYTES * (embedding_dim * (1 + per_weight) + per_row)
    return {table: max(1, num_bytes // row_bytes) for table, num_bytes in tt_bytes.items()}


def _train_twins(
    config: TrainConfig, dataset: Dataset, tt: TrainResult, folder: Path, device: torch.device
) -> list[TrainResult]:
    tt_bytes = {table: tt.table_bytes[table] for table in config.tt.tables}
    rows = hashing_rows(tt_bytes, config.model.embedding_dim, config.optim.embedding)
    # No table needs more rows than it has ids.
    schema_rows = {feature.name: feature.num_embeddings for feature in dataset.schema.sparse}
    rows = {table: min(count, schema_rows[table]) for table, count in rows.items()}
    twins = [DENSE, Variant("hash_equal_bytes", folded_rows=rows)]
    return [_train_twin(config, dataset, twin, folder, device) for twin in twins]


def _train(
    config: TrainConfig,
    dataset: Dataset,
    variant: Variant,
    folder: Path,
    device: torch.device,
    planned: PlannedModel | None = None,
) -> TrainResult:
    result = Trainer(config, dataset, variant, folder, device, planned=planned).fit()
    gc.collect()  # the next variant's tables need the room
    return result


def _train_twin(
    config: TrainConfig, dataset: Dataset, variant: Variant, folder: Path, device: torch.device
) -> TrainResult:
    """Trains a twin in a folder of its own. It is a yardstick, so it leaves no checkpoints; when a
    run resumes, a finished twin is read back and another one starts anew."""
    folder = folder / variant.name
    result_file = folder / "result.json"
    is_done = [config.resume and result_file.is_file()]
    dist.broadcast_object_list(is_done)
    if is_done[0]:
        content = json.loads(result_file.read_text(encoding="utf-8"))
        return TrainResult(**content | {"test": Quality(**content["test"])})
    folder.mkdir(exist_ok=True)
    checkpoint = replace(config.checkpoint, keep=0, init_from=None)
    config = replace(config, resume=False, checkpoint=checkpoint)
    result = _train(config, dataset, variant, folder, device)
    if dist.get_rank() == 0:
        write_json(result_file, asdict(result))
    return result


def _bytes_of_rows_that_occur(dataset: Dataset, dense: TrainResult) -> int:
    """What the dense tables would take if they held only rows that some split names."""
    counts = dataset.rows_that_occur()
    return sum(
        dense.table_bytes[feature.name] * counts[feature.name] // feature.num_embeddings
        for feature in dataset.schema.sparse
        if counts
    )


def _print_summary(summary: dict[str, Any], results: list[TrainResult], folder: Path) -> None:
    figures = {
        result.variant: {
            "test AUC": f"{result.test.auc:.4f}",
            "test loss": f"{result.test.loss:.4f}",
            "NE": f"{result.test.ne:.4f}",
            "best epoch": str(result.best_epoch),
            "embedding bytes": human_bytes(result.embedding_bytes),
            "samples/s": f"{result.samples_per_second:,.0f}",
        }
        for result in results
    }
    num_ranks = summary["world_size"]
    print_figures(f"{summary['name']}, {num_ranks} rank{'s' if num_ranks > 1 else ''}", figures)
    if "bytes_ratio_dense_to_tt" in summary:
        line = (
            f"TT embeddings are {summary['bytes_ratio_dense_to_tt']:,.0f}x smaller than the dense "
            f"tables (optimizer state included)"
        )
        if "bytes_ratio_rows_that_occur_to_tt" in summary:
            ratio = summary["bytes_ratio_rows_that_occur_to_tt"]
            line += f", {ratio:.2f}x against only the rows that ever occur"
        loss = summary["auc_loss_tt"]
        print(
            f"{line}; AUC {abs(loss):.4f} {'below' if loss > 0 else 'above'} dense, at "
            f"{summary['speed_ratio_tt_to_dense']:.2f}x its speed"
        )
    print(f"run folder: {folder}", flush=True)


def _draw(results: list[TrainResult], folder: Path) -> None:
    plot_metrics({result.variant: result.history for result in results}, folder / "metrics.png")
    if len(results) > 1:
        figures = {
            result.variant: {
                "auc": result.test.auc,
                "embedding_bytes": float(result.embedding_bytes),
                "samples_per_second": result.samples_per_second,
            }
            for result in results
        }
        plot_comparison(figures, folder / "comparison.png")
