"""Why a run stops before its end, and how all workers come to stop at the same step.

Each worker votes with every execution; the votes travel with the metrics, in the same
collective. What the sum says holds for all workers, so none is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfmulti.config.local_sync import SyncOptions
from tfmulti.config.reading import ReadOptions

REASONS = ("requested", "SIGINT", "SIGTERM")  # a later one outweighs an earlier one
VOTES = (*REASONS, "checkpoint", "pace")  # what travels with each execution


@dataclass
class TrainerState:
    """What a prepared model remembers beside its variables.

    `seed` is that of the data order (None: drawn at each fit). `interrupted` is set by a
    signal of this process; `stopped_by` by the vote, alike on all workers. `steps` and
    `examples` count since the run of the last `fit` began, of which `steps_before` and
    `examples_before` are from before it was resumed here. A step takes `microbatches` passes,
    batch statistics over all replicas if `sync_batch_norm`, and gradients that travel between
    workers as `gradient_compression` says, and XLA compiles its passes if `jit_compile` (None: as
    `compile` says, and on GPUs). If it `chooses_pace`, executions take as many steps as
    `pace` finds. Of the `epoch_s` seconds of the last epoch's steps
    `waited_s` went by without data, which `reader_threads` threads read; `lost` examples of the
    run could not be read. `gathers` says that a step gathers rows, which it can do once an
    execution only. Where workers take steps of their own, `synchronisation` says when they meet,
    and `outer` moves their weights then (`local_steps`). `traces` counts how often an execution of
    training was traced; `taken` are the variables that each optimizer took when a step was traced
    to build its parts, and `unknown` has the reasons why it is not known how values that the steps
    take depend on the rows. `specs` is the form of a global batch of the last `fit`.

    `seeds_drawn` counts the seeds of the data order that `fit` has drawn, where `seed` is None.

    `verify` says whether the first `verify_steps` steps are compared with those of one device
    (None: where parts are the user's own), and `verification` is what the last comparison found.

    `saved_variables` are the states, in the checkpoint that this run was resumed from, of seeds of
    layers that are yet to be built.
    """

    seed: int | None = None
    microbatches: int = 1
    sync_batch_norm: bool = True
    gradient_compression: str = "none"
    reading: ReadOptions = field(default_factory=ReadOptions)
    synchronisation: SyncOptions = field(default_factory=SyncOptions)
    outer: Any = None
    verify: bool | None = None
    verify_steps: int = 1
    verification: Any = None
    chooses_pace: bool = False
    jit_compile: bool | None = None
    interrupted: str | None = None
    stopped_by: str | None = None
    steps: int = 0
    examples: int = 0
    steps_before: int = 0
    examples_before: int = 0
    epoch_s: float = 0.0
    waited_s: float = 0.0
    reader_threads: int | None = None
    lost: int = 0
    gathers: bool = False
    traces: int = 0
    taken: dict[Any, Any] | None = None
    unknown: dict[str, None] = field(default_factory=dict)
    specs: Any = None
    seeds_drawn: int = 0
    saved_variables: dict[str, Any] = field(default_factory=dict)


def votes(
    wants_stop: bool, interrupted: str | None, *, wants_checkpoint: bool = False, pace: int = 0
) -> list[float]:
    """Returns this worker's vote for each of `VOTES`; that for a pace is its steps."""
    asked = {"requested": wants_stop, "checkpoint": wants_checkpoint, "pace": pace}
    return [float(asked.get(vote, False) or vote == interrupted) for vote in VOTES]


def verdict(counted: Sequence[float]) -> str | None:
    """Returns the weightiest reason that has a vote, or None to go on.

    >>> verdict([1, 0, 2, 0])
    'SIGTERM'
    """
    given = [reason for reason, count in zip(REASONS, counted, strict=False) if count > 0]
    return given[-1] if given else None


def wants_checkpoint(counted: Sequence[float]) -> bool:
    """Returns whether a checkpoint is to be made after this execution.

    >>> wants_checkpoint([0, 0, 0, 1, 0])
    True
    """
    return counted[VOTES.index("checkpoint")] > 0


def agreed_pace(counted: Sequence[float], local_replicas: int) -> int:
    """Returns the steps that the chief wants for each execution, which its replicas voted for.

    >>> agreed_pace([0, 0, 0, 0, 40], 2)
    20
    """
    return round(counted[VOTES.index("pace")] / local_replicas)


def state_of(model: object) -> TrainerState:
    """Returns what a prepared model remembers: counts, and why it stopped."""
    state = vars(model)["_tfmulti"]
    assert isinstance(state, TrainerState)
    return state


def is_prepared(model: object) -> bool:
    """Whether a model went through `prepare`."""
    return "_tfmulti" in vars(model)


def remember(model: object, state: TrainerState) -> None:
    """Gives a model its state, past Keras' tracking of attributes."""
    vars(model)["_tfmulti"] = state


def interrupt(model: object, reason: str) -> None:
    """Makes a running `fit` or `evaluate` end after the next execution, on all workers.

    Safe to call from a signal handler or another thread. `reason` is SIGINT or SIGTERM.
    """
    state_of(model).interrupted = reason
