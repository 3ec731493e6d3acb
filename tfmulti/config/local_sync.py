"""When workers that take steps of their own meet, and how: what a user may choose, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfmulti.errors import ConfigError

PACK_BYTES = 500_000  # of gradients that workers sum at a time
GATHER_BYTES = 32_768  # what is shorter is gathered and then summed: one way instead of two


@dataclass(frozen=True)
class SyncOptions:
    """How often workers meet (`local_steps`).

    Each worker takes `every` steps of its own (None: all steps are taken together, exactly). The
    mean of what weights have moved is then the gradient of SGD with Nesterov momentum.

    Raises:
        ConfigError: a value out of its range.
    """

    every: int | None = None
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(
                f"sync_every is {self.every}, but it must be at least 1: the steps that each "
                "worker takes by itself. Leave it out for exact training."
            )
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError(f"outer_learning_rate is {rate}, but it must be above 0.")
        if not 0 <= momentum < 1:
            raise ConfigError(
                f"outer_momentum is {momentum}, but it must be at least 0 and below 1."
            )

    def check_place(self, workers: int, local_replicas: int) -> None:
        """Checks that each of several workers is one replica.

        Raises:
            ConfigError: it is not: replicas of one worker would have to meet in each step.
        """
        if self.every is not None and workers > 1 and local_replicas > 1:
            raise ConfigError(
                f"--sync_every {self.every} needs workers of one replica each, but each of the "
                f"{workers} workers has {local_replicas}. Start a worker for each GPU "
                f"(python -m tfmulti.launch --nproc-per-node {local_replicas} …), or leave "
                "--sync_every out."
            )
