"""A rank that dies within a pipelined step ends the others."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

COLLECTIVE_TIMEOUT_S = 120


def test_a_rank_killed_within_a_step_ends_the_others(tmp_path: Path) -> None:
    """At once, with an error, not by the time-out of the process group; torchrun names the rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    # So rarely that the survivor ends by itself rather than by torchrun's hand.
    command += ["--monitor-interval", "3", "--standalone", __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COLLECTIVE_TIMEOUT_S)
    assert done.returncode != 0
    assert "exitcode  : -9" in done.stderr and "rank      : 1 (local_rank: 1)" in done.stderr
    assert "gloo" in (tmp_path / "survivor").read_text()  # not torchrun's signal


def main(folder: Path) -> None:
    """One rank under torchrun: trains until rank 1 is killed between two lookups of a step."""
    import torch
    import torch.distributed as dist

    from ecorec_torchrec import EcoRecTrainPipeline
    from ecorec_torchrec.testing import toy

    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    rank, names = dist.get_rank(), ("t_tw", "t_tw2", "t_q", "d_tw")
    tables = toy.configs(names)
    model = toy.ToyModel(toy.collection(tables, device="meta"), tables)
    model = toy.shard(model, toy.generators(names, 2), num_dist_groups=2)
    optimizer = toy.optimizer_of(model, lambda params: torch.optim.SGD(params, lr=0.05))
    pipeline = EcoRecTrainPipeline(model, optimizer, torch.device("cpu"))
    batches = iter([toy.make_batch(names, step, rank) for step in range(8)])
    for _ in range(3):
        pipeline.progress(batches)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        model.module.ebc._lookups[1].register_forward_pre_hook(die)
    try:
        pipeline.progress(batches)
    except RuntimeError as error:
        (folder / "survivor").write_text(str(error))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
