"""Starting from the weights of another model: what fits is loaded, the rest is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from ecorec_torchrec.train.checkpoint import readable
from ecorec_torchrec.train.saved_state import SavedState, open_state
from ecorec_torchrec.train.saved_tables import model_names, table_of

_NAMES_SHOWN = 8


@dataclass(frozen=True)
class WeightMatch:
    """How the tensors of a checkpoint fit those of a model, by the model's names.

    Attributes:
        path: the checkpoint.
        prefix: what stands before the model's names in the checkpoint.
        matching: found in both, in one shape.
        missing: of the model, and not in the checkpoint.
        unexpected: in the checkpoint, and not of the model.
        other_shapes: found in both; the shape in the checkpoint, and the model's.
    """

    path: Path
    prefix: str
    matching: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def differing(self, may_differ: Sequence[str] = ()) -> list[str]:
        """All names that do not match, but for those of `may_differ` (as of `load_weights`)."""
        names = [*self.missing, *self.unexpected, *self.other_shapes]
        return [
            name
            for name in names
            if not any(fnmatchcase(name, p) or table_of(name) == p for p in may_differ)
        ]

    def describe(self) -> str:
        """A few lines for people."""
        shapes = [
            f"{name} (there {list(saved)}, here {list(own)})"
            for name, (saved, own) in self.other_shapes.items()
        ]
        lines = [f"{len(self.matching)} tensors of {self.path} fit the model"]
        for what, names in (
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("of another shape", shapes),
        ):
            if names:
                rest = f", and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else ""
                lines.append(f"  {len(names)} {what}: {', '.join(names[:_NAMES_SHOWN])}{rest}")
        if any(".tt_cores." in name for name in self.missing) and any(
            name.endswith(".weight") and table_of(name) for name in self.unexpected
        ):
            lines.append("  `ecorec convert` makes TT cores of dense tables")
        return "\n".join(lines)


def match_weights(state: SavedState, model: nn.Module) -> WeightMatch:
    """Compares names and shapes; reads and changes nothing.

    Args:
        state: of `open_state`; in a DCP folder the model may lie under any key.
        model: unsharded or sharded.
    """
    own = {name: _whole_shape(value) for name, value in model.state_dict().items()}
    saved_names = model_names(state)
    prefix = _common_prefix(saved_names, own)
    saved = {
        name.removeprefix(prefix): state.tensors[name].shape
        for name in saved_names
        if name.startswith(prefix)
    }
    both = [name for name in own if name in saved]
    return WeightMatch(
        path=state.path,
        prefix=prefix,
        matching=tuple(name for name in both if saved[name] == own[name]),
        missing=tuple(name for name in own if name not in saved),
        unexpected=tuple(name for name in saved if name not in own),
        other_shapes={n: (saved[n], own[n]) for n in both if saved[n] != own[n]},
    )


def check_match(match: WeightMatch, may_differ: Sequence[str] = ()) -> None:
    """Raises ValueError with the whole report, where more differs than may."""
    if match.differing(may_differ):
        raise ValueError(
            f"{match.describe()}\nnothing was loaded; name what may differ, as glob patterns of "
            "names or as tables (may_differ, checkpoint.init_may_differ)"
        )
    if not match.matching:
        raise ValueError(f"{match.describe()}\nnothing was loaded")


def load_weights(
    checkpoint: str | Path, model: nn.Module, *, may_differ: Sequence[str] = ()
) -> WeightMatch:
    """Loads the weights that fit from a checkpoint, of another model maybe, whatever its placement.

    Nothing is changed unless everything matches but what `may_differ` allows; that keeps the values
    it has. Optimizer state is left alone. With a process group, all ranks call it together.

    Args:
        checkpoint: a folder of torch.distributed.checkpoint, or a run folder.
        model: unsharded, or sharded by `DistributedModelParallel`.
        may_differ: glob patterns of the model's names, or names of tables, that may be missing
            here or there or have another shape; `*` for all.

    Returns:
        What was loaded and what was not.

    Raises:
        ValueError: more differs, nothing fits, or the checkpoint cannot be read.

    Example::

        # A table was added, and the last layer is a new one.
        load_weights("runs/last", model, may_differ=["new_table", "*.over_arch.model.1.*"])
    """
    state = open_state(Path(checkpoint))
    if not state.path.is_dir():
        raise ValueError(
            f"{state.path} is a file: a sharded model loads folders of torch.distributed.checkpoint"
        )
    match = match_weights(state, model)
    check_match(match, may_differ)
    values = model.state_dict()
    with readable(state.path):
        dcp.load({match.prefix + n: values[n] for n in match.matching}, checkpoint_id=state.path)
    model.load_state_dict(values)
    return match


def _whole_shape(value: Tensor | ShardedTensor) -> tuple[int, ...]:
    # Asked in the ordinary way, a ShardedTensor warns that it is deprecated.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


def _common_prefix(saved: Iterable[str], own: Iterable[str]) -> str:
    """What to put before the model's names so that the most of them are found."""
    names, counts = set(own), Counter[str]()
    for key in saved:
        parts = key.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in names:
                counts["".join(f"{part}." for part in parts[:start])] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")
