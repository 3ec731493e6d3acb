"""Holds what a prepared model remembers besides its variables.

Each part has one owner, the only code that sets it:

    options, reading    `prepare`, and `run.setup` for the data of a run
    run                 `fit`: the training loop counts, and a resumed checkpoint restores
    epoch               `loop.step_clock`, at the end of an epoch
    traced              the step, while TensorFlow traces it
    verification        `verification`, before the first step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfmulti.config.reading import ReadOptions
from tfmulti.config.training_options import TrainingOptions

if TYPE_CHECKING:
    from tfmulti.training.state.kept_values import KeptValues

# A model keeps its state in this attribute, which Keras does not track.
ATTRIBUTE = "_tfmulti"


@dataclass
class RunCounts:
    """What the training loop counts from the begin of the run of the last `fit`.

    A resumed run goes on with the numbers of the run that was stopped.

    Attributes:
        steps: the steps.
        examples: the examples.
        steps_before: the steps before the run was resumed in this process.
        examples_before: the examples before the run was resumed in this process.
        lost: how many examples could not be read.
        stopped_by: the signal that stopped the run, the same on all workers.
    """

    steps: int = 0
    examples: int = 0
    steps_before: int = 0
    examples_before: int = 0
    lost: int = 0
    stopped_by: str | None = None


@dataclass(frozen=True)
class EpochTimes:
    """How the steps of the last epoch spent their time.

    Attributes:
        seconds: the seconds that they took.
        waited_s: the part of `seconds` in which they waited for data, on average of all workers.
        own_waited_s: the same on this worker.
        reader_threads: the number of threads that read the data; None if it is unknown.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    own_waited_s: float = 0.0
    reader_threads: int | None = None


@dataclass
class TracedStep:
    """What tracing has told about the steps of a model.

    Attributes:
        count: how often an execution of training was traced.
        addends: for each step the numbers of rows for which plain Keras takes a number for each
            row, which the step adds, for a bias.
        gathers: the steps that gather rows, which they can do only once in an execution.
        unknown: for each step, such as `train_step`, the reasons why it is unknown how its values
            depend on the rows.
        whole_batch: the steps in which each replica computes the whole batch (`step.whole_batch`).
        agreed: the steps of which several workers have agreed whether that is so.
        values: for each step the values in Python that its last trace may have read.
        changed: the names of the values in Python that traces of steps change.
        draws: for each eager step whether it may draw from Python's generator.
        batches: for each step how many times it was called for one batch.
        compared_s: how long the last comparison of values in Python took, in seconds.
        compared: the reasons of the `train_step` that a comparison with one device has settled.
        is_compared_now: whether a comparison with one device runs. It may show that the reasons do
            not matter.
        optimizer_variables: the variables of each optimizer, from a trace of the step that built
            its parts; None before such a trace.
        equal_on_replicas: whether it is known that all replicas give a variable the same value, by
            the ids of the variables that a compiled step changes.
    """

    count: int = 0
    addends: dict[str, set[int]] = field(default_factory=dict)
    gathers: set[str] = field(default_factory=set)
    unknown: dict[str, dict[str, None]] = field(default_factory=dict)
    whole_batch: set[str] = field(default_factory=set)
    agreed: set[str] = field(default_factory=set)
    values: dict[str, KeptValues] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    draws: dict[str, bool] = field(default_factory=dict)
    batches: Counter[str] = field(default_factory=Counter)
    compared_s: float = 0.0
    compared: set[str] = field(default_factory=set)
    is_compared_now: bool = False
    optimizer_variables: dict[Any, Any] | None = None
    equal_on_replicas: dict[int, bool] = field(default_factory=dict)


@dataclass
class TrainerState:
    """What a prepared model remembers besides its variables.

    Attributes:
        options: how the model trains.
        reading: how the examples of a source are read.
        run: the counts of the last `fit`.
        epoch: the times of its last epoch.
        traced: what tracing has told about the steps.
        is_eager: whether the functions of the steps were made for eager mode.
        wants_comparison: whether a callback of this worker asks all workers to compare their times.
        compares: whether all workers compare their times after this execution, in
            `on_train_batch_end`. `epoch` then has the times of the epoch so far.
        verification: the result of the last comparison with one device.
        metric_results: a function that returns the results of the metrics, if a callback has
            evaluated, trained or reset the metrics since the last step of `fit`; otherwise None.
        validation: the data of the validation that `fit` runs now, or None.
        interrupted: the signal that `interrupt` has noted in this process, or None.
        specs: the shapes and dtypes of a global batch of the last `fit`.
        seeds_drawn: how many seeds of the data order `fit` has drawn, where `seed` is None.
        told: the differences from plain Keras that were printed or warned of, each of them once.
        saved_variables: the values, from the checkpoint of a resumed run, of variables that are
            not made yet: seeds of layers that are not built, and variables outside of the model.
        calls_on_batch: how often `train_on_batch` and the like were called.
        built_function: the train function whose parts are built in this `fit`.
        checked_metrics: the metrics of the model whose first states were checked.
        evaluation_metrics: the variables of metrics that only evaluations use.
    """

    options: TrainingOptions = field(default_factory=TrainingOptions)
    reading: ReadOptions = field(default_factory=ReadOptions)
    run: RunCounts = field(default_factory=RunCounts)
    epoch: EpochTimes = field(default_factory=EpochTimes)
    traced: TracedStep = field(default_factory=TracedStep)
    is_eager: bool = False
    wants_comparison: bool = False
    compares: bool = False
    verification: Any = None
    metric_results: Callable[[], dict[str, Any]] | None = None
    validation: Any = None
    interrupted: str | None = None
    specs: Any = None
    seeds_drawn: int = 0
    calls_on_batch: int = 0
    told: set[str] = field(default_factory=set)
    saved_variables: dict[str, Any] = field(default_factory=dict)
    built_function: Any = None
    checked_metrics: list[Any] = field(default_factory=list)
    evaluation_metrics: list[Any] = field(default_factory=list)


def state_of(model: object) -> TrainerState:
    """Returns the state of a prepared model."""
    state = vars(model)[ATTRIBUTE]
    assert isinstance(state, TrainerState)
    return state


def is_prepared(model: object) -> bool:
    """Returns whether a model is a prepared model."""
    return ATTRIBUTE in vars(model)


def remember(model: object, state: TrainerState) -> None:
    """Stores the state of a model in the model."""
    vars(model)[ATTRIBUTE] = state


def interrupt(model: object, reason: str) -> None:
    """Makes a running `fit` or `evaluate` end after the next execution, on all workers.

    It is safe to call this from a signal handler or from another thread.
    """
    state_of(model).interrupted = reason
