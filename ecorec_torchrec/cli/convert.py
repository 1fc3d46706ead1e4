"""`ecorec convert`: dense tables of a checkpoint to TT cores, and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from ecorec_torchrec.cli.options import parse_flags


@dataclass(kw_only=True, slots=True)
class ConvertOptions:
    """Write a checkpoint in which large dense tables are tensor-train cores, found by TT-SVD.

    Give one of --rank, --max-error and --max-bytes; or --to-dense for the way back. Tables whose
    cores would take no fewer bytes stay dense. Optimizer state cannot be converted and is left out.
    """

    checkpoint: str
    """A folder of torch.distributed.checkpoint, a run folder (for its newest checkpoint), or a
    state dict that torch.save has written. Of our own trainer or of any TorchRec program."""

    out: str
    """The folder to make, for torch.distributed.checkpoint."""

    rank: int | None = None
    """The rank of every table."""

    max_error: float | None = None
    """For every table the smallest rank whose relative error ||TT - dense|| / ||dense|| is not
    larger."""

    max_bytes: int | None = None
    """For every table the largest rank whose cores take no more bytes."""

    num_cores: int = 3
    """Cores of every table. The fast kernels are written for 3."""

    tables: tuple[str, ...] = ()
    """The tables to convert; without it all of --min-bytes or more (with --to-dense, all)."""

    min_bytes: int = 1 << 20
    """Dense tables that take less stay as they are, unless --tables names them."""

    to_dense: bool = False
    """Turn TT tables into dense weights instead."""

    num_embeddings: dict[str, int] = field(default_factory=dict)
    """With --to-dense, rows of the tables of a checkpoint that another program has written, such as
    users 5000 items 300: the cores alone do not tell."""

    def __post_init__(self) -> None:
        sizes = [self.rank, self.max_error, self.max_bytes]
        if self.to_dense and any(size is not None for size in sizes):
            raise ValueError("--to-dense takes no --rank, --max-error or --max-bytes")
        if not self.to_dense and sum(size is not None for size in sizes) != 1:
            raise ValueError("give exactly one of --rank, --max-error and --max-bytes")
        if self.num_embeddings and not self.to_dense:
            raise ValueError("--num-embeddings goes with --to-dense")


def run(arguments: list[str]) -> None:
    options = parse_flags(ConvertOptions, arguments, command="convert")
    from ecorec_torchrec.train.convert import RankChoice, compress, decompress
    from ecorec_torchrec.train.report import human_bytes
    from ecorec_torchrec.train.table_sizes import config_of_shapes, print_sizes

    if options.to_dense:
        result = decompress(
            options.checkpoint,
            options.out,
            tables=options.tables,
            num_embeddings=options.num_embeddings,
        )
    else:
        choice = RankChoice(options.rank, options.max_error, options.max_bytes, options.num_cores)
        result = compress(
            options.checkpoint,
            options.out,
            choice,
            tables=options.tables,
            min_bytes=options.min_bytes,
        )
    print_sizes(f"{options.checkpoint} -> {options.out}", result.tables)
    print(
        f"{options.out}: {result.tensor_bytes:,} bytes of tensors, MLPs included, in files of "
        f"{result.file_bytes:,} bytes ({human_bytes(result.file_bytes)})"
    )
    if result.dropped:
        print(
            f"optimizer state is not converted: {result.dropped} tensors of it are left out, and "
            "training goes on with a new optimizer (checkpoint.init_from)"
        )
    if shapes := config_of_shapes(result.tables):
        print(f"\nthe tables in a configuration of `ecorec train`:\n\n{shapes}")
