"""Trains by PyTorch, alone or under DistributedDataParallel with gloo.

    python -m benchmarks.peers.training_torch WORKLOAD one|workers

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which worker this is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.peers.training_clock import StepClock
from benchmarks.workloads import (
    DEPTH,
    HEADS,
    LEARNING_RATE,
    MOMENTUM,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    WORKLOADS,
)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(inputs, outputs, 3, stride), nn.ReLU(), *_conv_norm(outputs, outputs, 3, 1)
        )
        same = stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(inputs, outputs, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs, 1e-5, 0.1)]


class Encoder(nn.Module):
    """Attention and two dense layers, with a normalization before each of both."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dense(self.between(x))


class Transformer(nn.Module):
    """Embeds tokens and positions, and returns logits of the mean of the encoders' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.05 * torch.randn(SEQUENCE, WIDTH))
        self.encoders = nn.Sequential(*[Encoder() for _ in range(DEPTH)])
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoders(self.tokens(x) + self.positions)
        logits: torch.Tensor = self.output(self.norm(x).mean(1))
        return logits


def model_of(name: str) -> nn.Module:
    """Returns the network of a workload; images have their channels first, as PyTorch's do."""
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
    if name == "cnn":
        return nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
    if name == "transformer":
        return Transformer()
    blocks, inputs = [], 16
    for stage, outputs in enumerate((16, 32, 64)):
        for number in range(3):
            blocks.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    begin = [*_conv_norm(3, 16, 3, 1), nn.ReLU()]
    return nn.Sequential(*begin, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main(name: str, kind: str) -> None:
    work = WORKLOADS[name]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rank, workers = 0, 1
    if kind == "workers":
        torch.distributed.init_process_group("gloo")
        rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model: Any = model_of(name)
    if workers > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    loss_of = nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(part) for part in work.data())
    y = y.long()
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    local_batch = work.batch // workers
    clock = StepClock(work.warm_up)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    right = torch.zeros(())
    for number in range(work.warm_up + work.steps):
        rows = order[number * work.batch + rank * local_batch :][:local_batch]
        optimizer.zero_grad()
        logits = model(x[rows])
        loss = loss_of(logits, y[rows])
        loss.backward()
        optimizer.step()
        right += (logits.argmax(1) == y[rows]).sum()
        loss.item()
        clock.end(number + 1)
    clock.print()
    if workers > 1:
        torch.distributed.barrier()
        # Threads of gloo sometimes abort a process that ends normally.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
