"""Links between ranks on one machine: loopback, or cables of limited rate between namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "loopback"
_POLL_S = 0.05
_BURST, _LATENCY = "256kb", "100ms"  # of tc's token bucket: how much goes at once, and may queue


@dataclass(frozen=True)
class Place:
    """Where a rank runs: what its command starts with, and the network interface it uses."""

    prefix: tuple[str, ...]
    interface: str


@contextmanager
def link(rate: str, world_size: int) -> Iterator[list[Place]]:
    """A place for every rank.

    With a rate each rank has a network namespace of its own, joined to a bridge by a pair of
    virtual cards that both send at most at that rate (`tc tbf`): real TCP over a slower wire.

    Args:
        rate: "loopback", or as tc reads it, such as "100mbit" or "1gbit".
        world_size: number of ranks, at most 250.

    Raises:
        PermissionError: a rate, but not the rights to make namespaces.
        FileNotFoundError: a rate, but no `ip` and `tc` (Debian: iproute2).
        ValueError: tc does not understand the rate, or the kernel has no such device.
    """
    if rate == LOOPBACK:
        yield [Place((), "lo")] * world_size
        return
    if os.geteuid() != 0:
        raise PermissionError(f"link {rate}: network namespaces need root; use --links loopback")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"link {rate}: `{tool}` is missing (Debian: iproute2)")
    tag = f"ec{os.getpid()}"
    namespaces = [f"{tag}_{rank}" for rank in range(world_size)]
    bridge = f"{tag}b"
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for rank, namespace in enumerate(namespaces):
            inside, outside = f"{tag}i{rank}", f"{tag}o{rank}"
            _run("ip", "netns", "add", namespace)
            ends = ("link", "add", outside, "type", "veth", "peer", "name", inside)
            _run("ip", *ends, "netns", namespace)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            within = ("ip", "-n", namespace)
            _run(*within, "addr", "add", f"10.213.0.{rank + 1}/24", "dev", inside)
            _run(*within, "link", "set", "lo", "up")
            _run(*within, "link", "set", inside, "up")
            bucket = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            _run("tc", "qdisc", "add", "dev", outside, *bucket)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", inside, *bucket)
        yield [
            Place(("ip", "netns", "exec", namespace), f"{tag}i{rank}")
            for rank, namespace in enumerate(namespaces)
        ]
    finally:
        for namespace in namespaces:  # takes the cables along
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")


def start(
    places: Sequence[Place], command: Sequence[str], folder: Path
) -> list[subprocess.Popen[bytes]]:
    """Starts `command RANK INTERFACE` at every place; output goes to RANK.out and RANK.err."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, place in enumerate(places):
            with (
                open(folder / f"{rank}.out", "wb") as out,
                open(folder / f"{rank}.err", "wb") as err,
            ):
                arguments = [*place.prefix, *command, str(rank), place.interface]
                processes.append(subprocess.Popen(arguments, stdout=out, stderr=err))
    except BaseException:
        stop(processes)
        raise
    return processes


def first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits for all, or for one that fails: its rank, whose error is the cause of the others'."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or None not in codes:
            return failed[0] if failed else None
        time.sleep(_POLL_S)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those that still run."""
    for process in processes:
        process.kill()
        process.wait()
