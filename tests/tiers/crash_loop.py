"""A training loop that resumes from its last checkpoint, and a process that keeps killing it.

`python crash_loop.py FOLDER KILLS` forks the loop, kills it (SIGKILL) at a random moment between
its first breath and some later checkpoint, again and again, lets the last one finish, and prints
what happened as JSON.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecorec_torchrec.tiers import RowInit, RowLayout, TieredTable, TierSpec

NUM_ROWS, NUM_STEPS = 3000, 1500
STEPS_PER_CHECKPOINT = 5
LONGEST_LIFE_S = 0.4


def make_table(
    folder: Path, num_rows: int = NUM_ROWS, cache_rows: int = 150, **wishes: Any
) -> tuple[TieredTable, dict[str, Tensor]]:
    """The table and its slots; `wishes` go to `TierSpec`."""
    layout = RowLayout((("weight", 4, torch.float32), ("momentum1", 1, torch.float32)))
    slots = {"weight": torch.zeros(cache_rows, 4), "momentum1": torch.zeros(cache_rows, 1)}
    spec = TierSpec(cache_rows, str(folder / "tiers"), **wishes)
    init = RowInit(4, seed=1)
    return TieredTable("ads", num_rows, layout, spec, init, slots), slots


def batch(step: int) -> Tensor:
    """Ids of a step; row 0 is in every batch and its state counts the steps."""
    ids = np.random.default_rng(step).integers(0, NUM_ROWS, 40)
    return torch.from_numpy(np.unique(np.append(ids, 0)))


def train(folder: Path, num_steps: int, tell: Callable[[str], None]) -> TieredTable:
    """Trains from the last checkpoint on, with one batch prefetched; `tell` hears of it."""
    table, slots = make_table(folder, memory_rows=100)
    weight, momentum = slots["weight"], slots["momentum1"]
    if (folder / "ads.tier").exists():
        table.load(folder)
    start = int(table.read(torch.tensor([0]))["momentum1"])
    tell(f"start {start}")
    coming = table.prefetch(batch(start))
    for step in range(start, num_steps):
        ticket, coming = coming, table.prefetch(batch(step + 1))
        rows = table.remap(ticket)
        momentum[rows] += 1
        weight[rows] -= weight[rows].sin() / momentum[rows] + step % 3
        table.release(ticket, dirty=True)
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            tell(f"saving {step + 1}")
            table.save(folder)
            tell(f"saved {step + 1}")
    table.drain()
    return table


def fingerprint(table: TieredTable) -> str:
    columns = table.read(torch.arange(NUM_ROWS))
    content = b"".join(column.numpy().tobytes() for column in columns.values())
    return hashlib.sha256(content).hexdigest()


def live(folder: Path, life_s: float) -> list[str]:
    """Forks the loop and kills it after `life_s` (unless it is done); what it told until then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        table = train(folder, NUM_STEPS, lambda line: os.write(writer, f"{line}\n".encode()))
        os.write(writer, f"done {fingerprint(table)}\n".encode())
        os._exit(0)
    os.close(writer)
    if life_s < float("inf"):
        time.sleep(life_s)
        os.kill(child, signal.SIGKILL)
    with open(reader) as told:
        lines = told.read().splitlines()
    os.waitpid(child, 0)
    return lines


def main(folder: Path, num_kills: int) -> None:
    moments = random.Random(num_kills)
    last_saved, starts, behind, kills, within_save = 0, [], [], 0, 0
    lines: list[str] = []
    for number in range(num_kills + 1):
        last = number == num_kills
        lines = live(folder, float("inf") if last else moments.uniform(0, LONGEST_LIFE_S))
        told = [line.split() for line in lines]
        start = next((int(value) for word, value in told if word == "start"), None)
        if start is not None:
            starts.append(start)
            if start < last_saved:
                behind.append((start, last_saved))
        last_saved = max([last_saved, *(int(value) for word, value in told if word == "saved")])
        kills += not last
        within_save += bool(told) and told[-1][0] == "saving"
    report = {
        "kills": kills,
        "kills_within_a_save": within_save,
        "starts": starts,
        "resumed_behind": behind,
        "fingerprint": lines[-1].split()[1],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
