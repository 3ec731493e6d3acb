"""Trains a small network with PyTorch (DDP over gloo), with a checkpoint every EVERY steps.

torchrun --nproc-per-node 2 benchmarks/peers/recovery_torch.py FOLDER STEPS EVERY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main(folder: str, steps: int, every: int) -> None:
    dist.init_process_group("gloo")
    rank, root = dist.get_rank(), Path(folder)
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(net, nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    file, first = root / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    with open(root / f"steps-{rank}", "a", buffering=1) as steps_file:
        for step in range(first + 1, steps + 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.02)
            steps_file.write(f"{step} {time.monotonic()}\n")
            if step % every == 0 and rank == 0:
                partial = root / "partial.pt"
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, partial)
                os.replace(partial, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
