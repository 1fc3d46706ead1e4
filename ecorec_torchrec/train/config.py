"""What a run is: one nested dataclass, filled from YAML and overridden by flags.

The docstring under a field is its help text on the command line and its documentation.
Nothing heavy is imported here, so that `ecorec train --help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from ecorec_torchrec.train.data_config import DataConfig, require

OptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw"]


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The dense part of DLRM, and the width of all tables."""

    embedding_dim: int = 64
    """D, the same for every table (DLRM takes dot products between them)."""

    dense_arch: tuple[int, ...] = (64,)
    """Hidden layers of the MLP over the dense features; a layer of `embedding_dim` is added."""

    over_arch: tuple[int, ...] = (128, 64)
    """Hidden layers of the MLP over the interactions; the layer with the logit is added."""

    dropout: float = 0.0
    """Dropout behind every layer of both MLPs but the logit."""

    pooling: Literal["mean", "sum"] = "mean"
    """How the rows of a bag become one vector."""

    def __post_init__(self) -> None:
        require(self.embedding_dim >= 1, "model.embedding_dim", self.embedding_dim, "must be >= 1")
        for name in ("dense_arch", "over_arch"):
            sizes = getattr(self, name)
            require(all(size >= 1 for size in sizes), f"model.{name}", sizes, "must be positive")
        require(bool(self.over_arch), "model.over_arch", self.over_arch, "needs a layer")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "must lie in [0, 1)")


@dataclass(kw_only=True, slots=True)
class TTShapeConfig:
    """The shape of one tensor-train table, written out."""

    row_factors: tuple[int, ...]
    """p: their product is at least the rows of the table."""

    col_factors: tuple[int, ...]
    """q: their product is `model.embedding_dim`."""

    ranks: tuple[int, ...]
    """The inner ranks, one fewer than the factors."""


@dataclass(kw_only=True, slots=True)
class TTConfig:
    """Which tables are held as tensor-train cores, and how."""

    tables: tuple[str, ...] = ()
    """Feature names whose tables become TT tables; all others stay dense. With `data.name: tables`
    also patterns, such as `*`."""

    choice: Literal["always", "auto"] = "always"
    """always: the tables above are TT. auto: the planner makes them TT only where the dense
    table does not fit under the memory caps of `plan`."""

    rank: int = 16
    """Rank of every TT table without a shape of its own in `tt.shapes` (only in a file)."""

    num_cores: int = 3
    """Cores of every TT table without a shape of its own in `tt.shapes`."""

    shapes: dict[str, TTShapeConfig] = field(default_factory=dict)
    """Shapes of single tables, in place of `rank` and `num_cores`."""

    entry_std: float | None = None
    """Standard deviation of the entries of the table that the initial cores stand for; without
    it max(1 / sqrt(3 N), 0.01)."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, "tt.rank", self.rank, "must be >= 1")
        require(self.num_cores >= 2, "tt.num_cores", self.num_cores, "must be >= 2")
        if self.entry_std is not None:
            require(self.entry_std > 0, "tt.entry_std", self.entry_std, "must be > 0")
        for table in self.shapes:
            require(table in self.tables, f"tt.shapes.{table}", table, "is not in tt.tables")


@dataclass(kw_only=True, slots=True)
class TiersConfig:
    """Which tables are larger than memory, and the memories that hold them."""

    tables: tuple[str, ...] = ()
    """Feature names whose tables are tiered: trained exactly as dense ones, with some rows in the
    slots of the lookup and the others in memory and in a file."""

    sharding: Literal["table_wise", "row_wise"] = "table_wise"
    """table_wise: each table on one rank, which the planner chooses. row_wise: each over all."""

    cache_rows: int = 65_536
    """Slots of each table, of each rank with row_wise: at least the distinct ids of a batch, and
    with prefetching those of all batches in flight."""

    memory_rows: int = 0
    """Rows of each table in a second level in memory; 0 for none."""

    memory_folder: str | None = None
    """Folder on a byte-addressable device (tmpfs, DAX) for the second level; without it ordinary
    memory."""

    folder: str | None = None
    """Folder of the row files, on fast block storage of each host; without it `tiers` in the run
    folder."""

    prefetch_batches: int = 1
    """How many batches ahead rows are brought in; 0 brings them in when they are looked up."""

    policy: Literal["lfu", "lru"] = "lfu"
    """Which rows leave first: the least frequently (with ageing) or least recently used."""

    direct_reads: bool = False
    """Read and write the files past the page cache."""

    hot_ids_file: str | None = None
    """The .npz file that `ecorec profile` writes beside a profile: the hottest rows of a table come
    first in its row file."""

    pinned_rows: int = 0
    """Hottest rows of each table, by `tiers.hot_ids_file`, that never leave their slots."""

    def __post_init__(self) -> None:
        least_values = {"cache_rows": 1, "memory_rows": 0, "prefetch_batches": 0, "pinned_rows": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            require(value >= least, f"tiers.{name}", value, f"must be >= {least}")


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """One optimizer."""

    name: OptimizerName = "adam"
    """sgd, adagrad, rowwise_adagrad, adam or adamw."""

    learning_rate: float = 1e-3
    """Step size; 0 freezes the parameters."""

    eps: float = 1e-8
    """Term in the denominator (not used by sgd)."""

    weight_decay: float = 0.0
    """Weight decay, in the manner of the optimizer."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0, f"{name} of {self.name}", value, "must be >= 0")


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """Who updates what. Tables are updated in the backward pass, by the rank that holds them."""

    tt: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=4e-3))
    """The cores of TT tables."""

    embedding: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(name="rowwise_adagrad", learning_rate=0.05)
    )
    """Dense and tiered tables."""

    dense: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The MLPs."""

    warmup_steps: int = 0
    """Steps over which all learning rates rise, in equal parts, to their values."""

    max_gradient_norm: float | None = None
    """Scale gradients down to this norm, taken over all that steps after the backward pass: the
    MLPs and data-parallel tables."""

    nonfinite_gradients: Literal["ignore", "stop"] = "ignore"
    """stop: end the run before a NaN or infinite gradient changes a TT table or a tensor of the
    MLPs, and name it. Without it the run ends when the loss is not finite."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "must be >= 0")
        if self.max_gradient_norm is not None:
            require(
                self.max_gradient_norm > 0,
                "optim.max_gradient_norm",
                self.max_gradient_norm,
                "must be > 0",
            )
        rule = "is no fused optimizer of TorchRec: use adam, or one of the others"
        require(self.embedding.name != "adamw", "optim.embedding.name", "adamw", rule)
        rule = "is for tables: the biases of the MLPs have no rows; use adagrad"
        name = "rowwise_adagrad"
        require(self.dense.name != name, "optim.dense.name", name, rule)


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Where tables live."""

    file: Annotated[str | None, tyro.conf.arg(aliases=["--plan"])] = None
    """A plan file to use as it is; without it, or with `auto`, EcoRecPlanner makes the plan."""

    profile: Annotated[str | None, tyro.conf.arg(aliases=["--profile"])] = None
    """What `ecorec profile` wrote about the data, for the planner; without it ids count as drawn
    uniformly, one per sample and table."""

    hbm_cap_gib: float | None = None
    """Memory of one GPU for the planner; without it what the device has."""

    ddr_cap_gib: float | None = None
    """Host memory of one rank for the planner; without it TorchRec's default."""

    storage_cap_gib: float | None = None
    """Block storage of one rank for the files of tiered tables; without it what `hardware` says,
    or TorchRec's default."""

    tier_folder: str | None = None
    """A folder on that storage: the planner may tier tables of a list; without it, it does not."""

    hardware: str | None = None
    """Machines to plan for: a100, h100, h200, or a YAML file of your own; without it TorchRec's
    default bandwidths."""

    local_batch_size: int | None = None
    """Rows of a batch per rank that is planned for; without it `train.batch_size` shared out."""

    num_dist_groups: Literal["auto"] | int = 1
    """Groups that the tables of the TT model travel in, each while another is looked up. auto: the
    planner chooses them by predicted times; the plan file tells which table is in which."""

    dist_group_slope: float = 0.0
    """0: groups of equal size; 1: sizes that fall to one table."""

    def __post_init__(self) -> None:
        if self.file == "auto":
            self.file = None
        if self.num_dist_groups != "auto":
            count = self.num_dist_groups
            require(count >= 1, "plan.num_dist_groups", count, "must be >= 1")
        require(
            0 <= self.dist_group_slope <= 1,
            "plan.dist_group_slope",
            self.dist_group_slope,
            "must be within 0..1",
        )
        for name in ("hbm_cap_gib", "ddr_cap_gib", "storage_cap_gib", "local_batch_size"):
            value = getattr(self, name)
            if value is not None:
                require(value > 0, f"plan.{name}", value, "must be > 0")


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """The training loop."""

    epochs: int = 1
    """Passes over the training rows. Validation chooses the best; its test figure is reported."""

    batch_size: int = 1024
    """Rows of a global batch, shared out evenly over the ranks."""

    max_steps: int | None = None
    """Stop after this many steps."""

    log_every_steps: int = 20
    """Steps between two lines of `metrics.csv` (and TensorBoard)."""

    step_times: bool = True
    """Also write there how long a step of the TT model takes, and how much of it is lookups,
    exposed communication, the dense part, and waiting for the next batch."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a GPU is found."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "log_every_steps"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "must be >= 1")
        if self.max_steps is not None:
            require(self.max_steps >= 1, "train.max_steps", self.max_steps, "must be >= 1")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints below `<run folder>/checkpoints`, written by torch.distributed.checkpoint."""

    every_steps: int | None = None
    """Also save inside an epoch, after every so many steps; an epoch's end always saves."""

    keep: int = 1
    """Newest checkpoints kept; 0 writes none."""

    init_from: str | None = None
    """Start from the weights of this checkpoint (a run folder, or a folder of
    torch.distributed.checkpoint such as `ecorec convert` writes), with new optimizers."""

    init_may_differ: tuple[str, ...] = ()
    """Tables, or glob patterns of parameter names, that may be missing in `init_from` or in the
    model or have another shape; they keep their initial values. Nothing else may."""

    def __post_init__(self) -> None:
        require(self.keep >= 0, "checkpoint.keep", self.keep, "must be >= 0")
        if self.every_steps is not None:
            require(
                self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "must be >= 1"
            )


@dataclass(kw_only=True, slots=True)
class OutputConfig:
    """What a run leaves behind."""

    folder: str = "runs"
    """Parent of the run folders."""

    plots: bool = True
    """Draw `metrics.png` (and `comparison.png`); needs matplotlib."""

    tensorboard: bool = False
    """Also write TensorBoard events below `<run folder>/tensorboard`."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Train a DLRM whose large tables are tensor-train cores.

    The values of `--config FILE`, or of `--config NAME` (a configuration that ships with the
    package), come first; other flags override them.
    """

    name: str = "run"
    """The run folder below `output.folder`. A finished run of that name is moved aside."""

    seed: int = 0
    """Splits, shuffling, initial weights and dropout follow from it."""

    nproc: int = 1
    """Processes on this machine (gloo on CPU, one GPU each with nccl). Under torchrun, torchrun's
    own number counts."""

    compare_dense: bool = False
    """Also train the dense twin (stock TorchRec) and a hashing twin (dense tables of the bytes of
    the TT tables) on the same batches, and write the figures side by side."""

    resume: bool = False
    """Go on from the newest checkpoint of the run folder. Under torchrun, a restarted job does so
    by itself."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tt: TTConfig = field(default_factory=TTConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def __post_init__(self) -> None:
        require(self.nproc >= 1, "nproc", self.nproc, "must be >= 1")
        require(self.seed >= 0, "seed", self.seed, "must be >= 0")
        path_parts = self.name.replace("\\", "/").split("/")
        require(
            len(path_parts) == 1 and self.name not in ("", ".", ".."),
            "name",
            self.name,
            "must be the name of one folder",
        )
        both = set(self.tiers.tables) & set(self.tt.tables)
        if both:
            raise ValueError(f"tiers.tables and tt.tables both name {sorted(both)}")
        if self.tiers.tables and self.checkpoint.init_from is not None:
            raise ValueError(
                f"checkpoint.init_from={self.checkpoint.init_from!r} cannot fill the tables of "
                "tiers.tables: resume a run with tiered tables instead"
            )
        if self.compare_dense and self.tiers.tables:
            raise ValueError(
                "compare_dense=True would hold the tables of tiers.tables in memory whole: name "
                "none"
            )
        if self.compare_dense and not self.tt.tables:
            raise ValueError("compare_dense=True needs a TT table: tt.tables=() names none")
