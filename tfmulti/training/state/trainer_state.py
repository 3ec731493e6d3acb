"""What a prepared model remembers, and the votes by which all workers stop at the same step.

Each worker votes with every execution. The votes travel with the metrics, in the same collective.
All workers follow the sum of the votes, so none of them is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfmulti.config.reading import ReadOptions
from tfmulti.config.training_options import TrainingOptions

# The reasons to stop. A later one outweighs an earlier one.
REASONS = ("requested", "SIGINT", "SIGTERM")
# The votes that travel with each execution.
VOTES = (*REASONS, "checkpoint", "pace")


@dataclass
class TrainerState:
    """What a prepared model remembers besides its variables.

    Attributes:
        options: how the model trains.
        reading: how the examples of a source are read.
        verification: the result of the last comparison.
        interrupted: the reason to stop that `interrupt` has set in this process.
        stopped_by: the reason for which the votes stopped the run, the same on all workers.
        steps: the steps since the run of the last `fit` began.
        examples: the examples since then.
        steps_before: those of the steps that were taken before the run was resumed here.
        examples_before: those of the examples that were taken before.
        epoch_s: the seconds that the steps of the last epoch took.
        waited_s: the part of `epoch_s` in which the steps waited for data.
        reader_threads: the number of threads that read the data.
        lost: how many examples of the run could not be read.
        gathers: whether a step gathers rows, which it can do only once in an execution.
        traces: how often an execution of training was traced.
        taken: the variables of each optimizer, from a trace of the step that built its parts.
        unknown: the reasons why it is unknown how values of the steps depend on the rows.
        specs: the shapes and dtypes of a global batch of the last `fit`.
        seeds_drawn: how many seeds of the data order `fit` has drawn, where `seed` is None.
        saved_variables: the states, from the checkpoint of a resumed run, of seeds whose layers are
            not built yet.
    """

    options: TrainingOptions = field(default_factory=TrainingOptions)
    reading: ReadOptions = field(default_factory=ReadOptions)
    verification: Any = None
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
    """Returns this worker's votes, one number for each of `VOTES`.

    Args:
        wants_stop: whether this worker wants to stop.
        interrupted: the signal that asks this worker to stop, or None.
        wants_checkpoint: whether this worker wants a checkpoint after this execution.
        pace: the steps that this worker wants for each execution; 0 wants no change.
    """
    asked = {"requested": wants_stop, "checkpoint": wants_checkpoint, "pace": pace}
    return [float(asked.get(vote, False) or vote == interrupted) for vote in VOTES]


def verdict(counted: Sequence[float]) -> str | None:
    """Returns the weightiest reason to stop that has a vote, or None to go on.

    >>> verdict([1, 0, 2, 0])
    'SIGTERM'
    """
    given = [reason for reason, count in zip(REASONS, counted, strict=False) if count > 0]
    return given[-1] if given else None


def wants_checkpoint(counted: Sequence[float]) -> bool:
    """Returns whether the workers make a checkpoint after this execution.

    >>> wants_checkpoint([0, 0, 0, 1, 0])
    True
    """
    return counted[VOTES.index("checkpoint")] > 0


def agreed_pace(counted: Sequence[float], local_replicas: int) -> int:
    """Returns the steps that the chief wants for each execution; 0 wants no change.

    The sum counts the chief's vote once for each of its replicas.

    >>> agreed_pace([0, 0, 0, 0, 40], 2)
    20
    """
    return round(counted[VOTES.index("pace")] / local_replicas)


def state_of(model: object) -> TrainerState:
    """Returns the state of a prepared model."""
    state = vars(model)["_tfmulti"]
    assert isinstance(state, TrainerState)
    return state


def is_prepared(model: object) -> bool:
    """Returns whether a model is a prepared model."""
    return "_tfmulti" in vars(model)


def remember(model: object, state: TrainerState) -> None:
    """Stores the state of a model as an attribute that Keras does not track."""
    vars(model)["_tfmulti"] = state


def interrupt(model: object, reason: str) -> None:
    """Makes a running `fit` or `evaluate` end after the next execution, on all workers.

    It is safe to call this from a signal handler or from another thread.

    Args:
        model: the prepared model.
        reason: SIGINT or SIGTERM.
    """
    state_of(model).interrupted = reason
