"""What a rank computes and sends within one training step, from a profile, and a picture of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

COMPUTE, NETWORK = "compute", "network"
_STEP = "## benchmarked step ##"
_LOOKUP = re.compile(r"\[lookup\]_\[ebc\]_\[table_wise(?:#(\d+))?\]")
_LOOKUP_BACKWARD, _SENT_BY_GLOO = "_TTLookupBackward", "gloo:all_to_all"
# TorchRec's ranges around its all-to-alls, and what these carry.
_SENDERS = {
    "## all2all_data:kjt splits ##": "ids",
    "## all2all_data:kjt lengths ##": "ids",
    "## all2all_data:kjt values ##": "ids",
    "## All2All_Pooled_fwd ##": "output",
    "## All2All_Pooled_bwd ##": "gradient",
}


class Span(NamedTuple):
    """Something that a rank did, in milliseconds since it began the step.

    Attributes:
        lane: "compute" or "network".
        kind: "lookup", "lookup backward"; "ids" (of the next batch), "output" or "gradient".
        group: dist group, -1 for ids.
    """

    lane: str
    kind: str
    group: int
    start_ms: float
    end_ms: float


def trace_step(step: Callable[[], object]) -> list[Span]:
    """Runs one step, on the CPU over gloo, and tells what it looked up and sent.

    What travels is known from gloo's own events: from when it takes up a transfer to its end.
    """
    with torch.profiler.profile() as profile, record_function(_STEP):
        step()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    (origin,) = (event.time_range.start for event in events if event.name == _STEP)
    return [*_lookups(events, origin), *_transfers(events, origin)]


def _lookups(events: Sequence[FunctionEvent], origin_us: float) -> Iterator[Span]:
    groups = []
    for event in events:
        if match := _LOOKUP.fullmatch(event.name):
            groups.append(int(match[1] or 0))
            yield _span(COMPUTE, "lookup", groups[-1], event, origin_us)
    backward = (event for event in events if event.name == _LOOKUP_BACKWARD)
    for group, event in zip(reversed(groups), backward, strict=True):
        yield _span(COMPUTE, "lookup backward", group, event, origin_us)


def _transfers(events: Sequence[FunctionEvent], origin_us: float) -> Iterator[Span]:
    """gloo takes transfers up in the order in which they were asked for."""
    kinds = [_SENDERS[event.name] for event in events if event.name in _SENDERS]
    transfers = (event for event in events if event.name == _SENT_BY_GLOO)
    num_groups = kinds.count("output")
    seen = dict.fromkeys(kinds, 0)
    for kind, event in zip(kinds, transfers, strict=True):
        place = seen[kind]
        seen[kind] += 1
        # The gradients of the last group are sent first.
        group = {"ids": -1, "output": place, "gradient": num_groups - 1 - place}[kind]
        yield _span(NETWORK, kind, group, event, origin_us)


def _span(lane: str, kind: str, group: int, event: FunctionEvent, origin_us: float) -> Span:
    times = event.time_range
    return Span(lane, kind, group, (times.start - origin_us) / 1e3, (times.end - origin_us) / 1e3)


@dataclass(frozen=True)
class TracedVariant:
    """One step of one variant.

    Args:
        name: of the variant.
        spans: by rank.
    """

    name: str
    spans: Sequence[Sequence[Span]]

    @property
    def end_ms(self) -> float:
        return max(span.end_ms for spans in self.spans for span in spans)


def plot_steps(variants: Sequence[TracedVariant], title: str, path: Path) -> None:
    """Draws ranks by what they compute and send over one time axis, a panel per variant.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(variants), figsize=(11, 2.4 * len(variants) + 0.6), sharex=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    num_groups = 1 + max(s.group for v in variants for spans in v.spans for s in spans)
    colors = pyplot.get_cmap("viridis", max(num_groups, 2))
    for axes, variant in zip(panels[:, 0], variants, strict=True):
        lanes = [(rank, lane) for rank in range(len(variant.spans)) for lane in (COMPUTE, NETWORK)]
        for y, (rank, lane) in enumerate(lanes):
            for span in (span for span in variant.spans[rank] if span.lane == lane):
                backwards = span.kind in ("lookup backward", "gradient")
                axes.barh(
                    y,
                    span.end_ms - span.start_ms,
                    left=span.start_ms,
                    color="lightgrey" if span.group < 0 else colors(span.group),
                    hatch="//" if backwards else None,
                    edgecolor="white",
                    linewidth=0.5,
                )
        axes.set_yticks(range(len(lanes)), [f"rank {rank}: {lane}" for rank, lane in lanes])
        axes.invert_yaxis()
        axes.set_title(variant.name, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel(
        "ms. A colour per dist group. Plain: lookups and their output; hatched: lookups backward\n"
        "and gradients; grey: ids of the next batch. Between lookups: the dense part, or waiting"
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def traces_of(found: Mapping[str, Sequence[Sequence[Sequence[Any]]]]) -> list[TracedVariant]:
    """From JSON: by variant and rank, spans as lists."""
    return [
        TracedVariant(name, [[Span(*fields) for fields in spans] for spans in ranks])
        for name, ranks in found.items()
    ]
