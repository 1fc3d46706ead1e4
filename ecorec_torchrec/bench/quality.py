"""How much quality TT tables cost, over seeds, with controls that tell a trained table from none.

Every variant is trained on the same splits and batches. Its learning rate is tuned on the
validation split of seed 0; the test figure is taken at the epoch that validation chooses.
"""

from __future__ import annotations

import csv
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import device

from ecorec_torchrec.train.config import OptimizerConfig, TrainConfig
from ecorec_torchrec.train.data import Dataset, load_dataset
from ecorec_torchrec.train.model import DENSE, TT, Variant
from ecorec_torchrec.train.run import hashing_rows
from ecorec_torchrec.train.trainer import Trainer, TrainResult

COLUMNS = ("seed", "variant", "auc_test", "best_epoch", "embedding_bytes")
TUNING_COLUMNS = ("variant", "option", "learning_rate", "auc_val", "chosen")
_HASHING_RANK = 16


@dataclass(frozen=True)
class QualityVariant:
    """One row of the comparison.

    Attributes:
        name: in the CSV file.
        kind: how the tables of `tt.tables` are held: `tt`; `frozen`, TT cores that keep their
            initial values; `dense`; or `hashing`, dense tables of the bytes of TT tables of
            `rank`.
        rank: of the TT tables.
    """

    name: str
    kind: Literal["dense", "tt", "frozen", "hashing"]
    rank: int = _HASHING_RANK

    @property
    def tuned_optimizer(self) -> Literal["tt", "embedding"]:
        """Whose learning rate is tuned: that of the tables that train."""
        return "tt" if self.kind == "tt" else "embedding"


VARIANTS = (
    QualityVariant("dense", "dense"),
    QualityVariant("tt_r8", "tt", 8),
    QualityVariant("tt_r16", "tt", 16),
    QualityVariant("tt_r32", "tt", 32),
    QualityVariant("tt_r16_frozen", "frozen", 16),
    QualityVariant("hash_equal_bytes_r16", "hashing", 16),
)


class QualityBench:
    """Trains variants over seeds; needs a process group.

    Args:
        config: what to train; `tt.rank` and the learning rates are set per variant.
        factors: learning rates tried, as multiples of the configuration's.

    Example::

        with process_group("cpu") as cpu:
            bench = QualityBench(load_config("movielens_100k", TrainConfig), cpu)
            bench.tune(VARIANTS)
            rows = list(bench.measure(VARIANTS, seeds=range(8)))
    """

    def __init__(
        self, config: TrainConfig, cpu: device, factors: Iterable[float] = (0.5, 1.0, 2.0)
    ) -> None:
        self._config = config
        self._device = cpu
        self._factors = tuple(factors)
        self._datasets: dict[int, Dataset] = {}
        self._folded_rows: dict[str, int] | None = None
        self._learning_rates: dict[str, float] = {}
        self.tuning: list[dict[str, object]] = []

    def tune(
        self, variants: Iterable[QualityVariant], report: Callable[[str], None] = print
    ) -> None:
        """Chooses every variant's learning rate by validation on seed 0; see `tuning`."""
        for variant in variants:
            optimizer: OptimizerConfig = getattr(self._config.optim, variant.tuned_optimizer)
            scores = {}
            for factor in self._factors:
                rate = optimizer.learning_rate * factor
                scores[rate] = self._train(variant, 0, rate).val_score
            best = max(scores, key=lambda rate: scores[rate])
            self._learning_rates[variant.name] = best
            for rate, score in scores.items():
                option = f"optim.{variant.tuned_optimizer}.learning_rate"
                row = (variant.name, option, rate, round(score, 6), rate == best)
                self.tuning.append(dict(zip(TUNING_COLUMNS, row, strict=True)))
            report(f"{variant.name}: learning rate {best:g}, validation AUC {scores[best]:.4f}")

    def measure(
        self, variants: Iterable[QualityVariant], seeds: Iterable[int]
    ) -> Iterator[dict[str, object]]:
        """Rows of `COLUMNS`, one per seed and variant, as they come."""
        for seed in seeds:
            for variant in variants:
                result = self._train(variant, seed, self._learning_rates[variant.name])
                row = (
                    seed,
                    variant.name,
                    round(result.test.auc, 6),
                    result.best_epoch,
                    result.embedding_bytes,
                )
                yield dict(zip(COLUMNS, row, strict=True))
            self._datasets.pop(seed, None)

    def _train(self, variant: QualityVariant, seed: int, learning_rate: float) -> TrainResult:
        config = self._configure(variant, seed, learning_rate)
        model_variant = {"dense": DENSE, "tt": TT, "frozen": TT}.get(variant.kind)
        if model_variant is None:
            model_variant = Variant("hash_equal_bytes", folded_rows=self._hashing_rows())
        if seed not in self._datasets:
            self._datasets[seed] = load_dataset(config.data, seed)
        with tempfile.TemporaryDirectory() as folder:
            return Trainer(
                config,
                self._datasets[seed],
                model_variant,
                Path(folder),
                self._device,
                quiet=True,
            ).fit()

    def _configure(self, variant: QualityVariant, seed: int, learning_rate: float) -> TrainConfig:
        optim = self._config.optim
        tuned = replace(getattr(optim, variant.tuned_optimizer), learning_rate=learning_rate)
        optim = replace(optim, **{variant.tuned_optimizer: tuned})
        if variant.kind == "frozen":
            optim = replace(optim, tt=OptimizerConfig(name="sgd", learning_rate=0.0))
        return replace(
            self._config,
            seed=seed,
            tt=replace(self._config.tt, rank=variant.rank),
            optim=optim,
            checkpoint=replace(self._config.checkpoint, keep=0, every_steps=None),
        )

    def _hashing_rows(self) -> dict[str, int]:
        """Rows of the hashing variant: from the measured bytes of a TT model of its rank."""
        if self._folded_rows is None:
            config = replace(self._config, train=replace(self._config.train, max_steps=1))
            probe = QualityBench(config, self._device)
            rate = config.optim.tt.learning_rate
            table_bytes = probe._train(QualityVariant("tt", "tt"), 0, rate).table_bytes
            self._folded_rows = hashing_rows(
                {table: table_bytes[table] for table in config.tt.tables},
                config.model.embedding_dim,
                config.optim.embedding,
            )
        return self._folded_rows


def write_rows(
    path: Path, columns: Iterable[str], rows: Iterable[dict[str, object]]
) -> list[dict[str, object]]:
    """Writes a CSV file row by row as they come, and returns them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()
            written.append(row)
    return written


def gaps(rows: Iterable[dict[str, object]], better: str, worse: str) -> tuple[float, float]:
    """Mean and standard error of the paired difference of test AUC, `better` - `worse`.

    The standard error is NaN for fewer than two seeds.
    """
    auc = {(row["seed"], row["variant"]): float(str(row["auc_test"])) for row in rows}
    differences = [
        value - auc[seed, worse]
        for (seed, variant), value in auc.items()
        if variant == better and (seed, worse) in auc
    ]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, math.nan
    return mean, statistics.stdev(differences) / math.sqrt(len(differences))
