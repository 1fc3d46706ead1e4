"""Predicted memory against what a process takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TRAIN = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from ecorec_torchrec import EcoRecPlanner, TTEmbeddingBagCollection, TTSpec, get_ecorec_sharders

def resident_bytes(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024

def planned(spec, batch_size):
    table = EmbeddingBagConfig(num_embeddings=spec.num_embeddings, embedding_dim=spec.embedding_dim,
                               name="t", feature_names=["f"])
    ebc = TTEmbeddingBagCollection([table], tt={"t": spec}, device="meta")
    sharders = get_ecorec_sharders({"optimizer": torch.optim.Adam, "learning_rate": 0.01})
    planner = EcoRecPlanner(Topology(world_size=1, compute_device="cpu"), batch_size, debug=False)
    plan = planner.plan(ebc, sharders)
    model = DistributedModelParallel(ebc, device=torch.device("cpu"), plan=plan, sharders=sharders)
    return model, planner.report.ranks[0].needed_bytes

def train(model, spec, batch_size):
    for _ in range(2):
        ids = torch.randint(spec.num_embeddings, (batch_size,))
        ones = torch.ones(batch_size, dtype=torch.int64)
        batch = KeyedJaggedTensor(["f"], ids, lengths=ones)
        model(batch).wait().values().sum().backward()

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
small = TTSpec(1000, (10, 10, 10), (4, 4, 4), (8, 8))
model, _ = planned(small, 64)
train(model, small, 64)  # compiles, and allocates what does not depend on the table
spec, batch_size = TTSpec(10**7, (200, 500, 100), (4, 4, 4), (64, 64)), 16_384
before = resident_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
model, predicted = planned(spec, batch_size)
train(model, spec, batch_size)
print(json.dumps([predicted, resident_bytes("VmHWM") - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_a_tt_table_takes_what_was_predicted(tmp_path):
    """Cores, gradients, optimizer state, lookup: a plan that leaves some out ends out of memory."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    predicted, measured = json.loads(done.stdout.splitlines()[-1])
    assert measured > 50 * 2**20, "too small to tell from noise"
    assert 0.9 <= predicted / measured <= 1.5, (predicted, measured)
