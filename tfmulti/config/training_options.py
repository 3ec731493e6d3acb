"""`TrainingOptions`: the options that say how training is distributed.

`prepare(model, options)` takes them, and `FitConfig` inherits their fields. A field holds
everything about an option: its type, default, range and help text. The flags, `--help`, the checks
and the docs are made from the fields, so a new flag needs only a new field. The hyper-parameters,
such as the learning rate, are fields of `fit_config.FitConfig`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tfmulti.errors import ConfigError, did_you_mean

COMPRESSIONS = ("none", "float16", "bfloat16")
# Whether a run resumes from its newest checkpoint.
RESUME = ("auto", "never", "must")
# The defaults for checkpoints: the seconds between two of them, and how many are kept.
CHECKPOINT_EVERY_S = 60.0
KEEP_CHECKPOINTS = 2


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The help text and the range of an option, which go with its type and its default.

    Args:
        help: the text of `--help` and of the docs.
        choices: the allowed values. Empty: any value.
        low: the least allowed value.
        above: a number that the value must be greater than.
        below: a number that the value must be less than.
        path: whether the value names a file or folder.
        free: whether the value may differ when a stopped run resumes. Such an option says where
            and for how long the run trains, and does not change its numbers.
        since: the first version of tfmulti that has the option.
    """

    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    above: float | None = None
    below: float | None = None
    path: bool = False
    free: bool = False
    since: str = "0.1.0"


def flag(default: Any, help: str, **rule: Any) -> Any:
    """Returns a dataclass field for an option, with the values of a `Rule` as its metadata.

    Args:
        default: the default of the option.
        help: the text of `--help` and of the docs.
        rule: further values of the `Rule`.
    """
    return field(default=default, metadata=vars(Rule(help=help, **rule)))


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a prepared model trains.

    Args:
        seed: the seed of the data order. None takes a seed from the state of NumPy's generator and
            from how often `fit` was called. NumPy's generator keeps its state. All workers use the
            chief's seed.
        microbatches: the number of passes of one step. Each replica computes its rows in that many
            parts. The weights are updated once, by the gradient of the whole batch.
        sync_batch_norm: whether BatchNormalization layers take mean and variance over the rows of
            all replicas, as one device would. This needs two collectives for each layer and step.
            False leaves the choice to the `synchronized` of each layer. Moving statistics are then
            averaged over the replicas, weighted by their rows.
        gradient_compression: the type in which gradients travel between workers: `none` (their own
            type), `float16` or `bfloat16`. The two short types halve the traffic. They round each
            gradient, and then the sum, to 11 or 8 binary digits. The sum is computed in float32,
            but TensorFlow's collectives compute it in the short type. These serve on GPUs, and for
            workers that cannot connect to each other. float16 loses values below 6e-8 and overflows
            above 65,504, before gradients are clipped. bfloat16 does neither. All workers keep the
            same weights, whose last digits differ from one device's. Within one process the option
            has no effect.
        reader_threads: how many examples of a `Source` each worker reads at a time. 0 reads in the
            thread that feeds the steps. None uses one thread for each core if reading is slow.
        skip_bad_records: how many examples of a `Source` may be left out in a pass over the data
            because they cannot be read, counted over all workers. One more is an error.
        steps_per_execution: `auto` lets an execution of `fit` have as many steps as take a tenth of
            a second, if that saves more time than the compilation takes. Callbacks are called once
            for each execution, as with `compile(steps_per_execution=N)`. None uses the number that
            `compile` was given.
        jit_compile: whether XLA compiles the step of a single device as a whole, and of several
            replicas the forward and backward pass of each. None uses XLA on GPUs, as Keras does
            with one GPU, and where `compile(jit_compile=True)` asks for it. To turn it off on GPUs,
            give False here: Keras does not tell its own default False from the user's False. A
            step is not compiled if its replicas need each other's rows before the gradients are
            summed, or if it draws numbers that XLA would draw otherwise. These are all but those of
            `uniform`, `normal`, `randint` and `dropout` in `keras.random`. Nor is it compiled where
            TensorFlow's operations are deterministic, or by default with sparse, ragged or text
            data.
        verify: whether the first `fit` compares its first step with the same step on one device by
            plain Keras. If the numbers differ by more than rounding, `fit` raises
            VerificationError, and nothing is trained or changed. None compares with several
            replicas or microbatches if a part of the model is the user's own, or a part of Keras
            that is not known to be exact (docs/verify.md). The comparison takes one more trace and
            two steps of the whole batch on one device. With False, `evaluate` and `predict` also
            leave each replica its own rows where it is not known how a value depends on them.
            Otherwise each replica then computes the whole batch.
        verify_steps: how many first steps are compared.

    Raises:
        ConfigError: a value breaks its field's rule, or two fields contradict each other.

    >>> TrainingOptions(microbatches=4).sync_batch_norm
    True
    """

    # What stands before the name of a field in a message.
    _dashes: ClassVar[str] = ""

    seed: int | None = flag(None, "Seed of the data order.", low=0, below=2**32)
    microbatches: int = flag(
        1,
        "Passes of one step: each replica computes its rows in that many parts, to save memory, "
        "and the weights are updated once, by the gradient of the whole batch.",
        low=1,
        free=True,
    )
    sync_batch_norm: bool = flag(
        True,
        "BatchNormalization over the rows of all replicas, as on one device. "
        "--nosync_batch_norm: over the rows of each replica, which is faster. The moving "
        "statistics are averaged before saving.",
    )
    gradient_compression: str = flag(
        "none",
        "Send gradients between workers as float16 or bfloat16: half the bytes, but rounded, so "
        "the last digits differ from one device.",
        choices=COMPRESSIONS,
    )
    reader_threads: int | None = flag(
        None,
        "Number of examples that each worker reads at the same time. 0: read in the thread that "
        "feeds the steps. Default: the number of cores, if reading is slow.",
        low=0,
        free=True,
    )
    skip_bad_records: int = flag(
        0,
        "Leave out up to so many unreadable examples in each pass over the data, counted over all "
        "workers. Each is named. A damaged file is always an error. Default: the first unreadable "
        "example is an error.",
        low=0,
        free=True,
    )
    jit_compile: bool | None = flag(
        None,
        "XLA compiles the step, or with several replicas each one's forward and backward pass. "
        "Default: on GPUs. A step that exchanges rows between replicas is not compiled.",
    )
    verify: bool | None = flag(
        None,
        "Compare the first step with plain Keras on one device, and fail if the numbers differ by "
        "more than rounding. Default: with several replicas or microbatches, if a part of the "
        "model is your own, or is not known to be exact.",
        free=True,
    )
    verify_steps: int = flag(1, "Number of first steps that --verify compares.", low=1, free=True)
    steps_per_execution: str | None = flag(
        None,
        "auto: on CPUs, as many steps per call as take 0.1 s, if that saves time.",
        choices=("auto",),
        free=True,
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check_value(item, getattr(self, item.name), self._dashes)


# The limits of a `Rule`, with their words and what a value must be.
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}
_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def form_of(item: dataclasses.Field[Any]) -> str:
    """Returns the type and the range of an option, and since when it exists, in words.

    >>> form_of(dataclasses.fields(TrainingOptions)[0])
    'whole number, at least 0, below 4294967296; since 0.1.0'
    """
    rule = item.metadata
    kind = "file or folder" if rule["path"] else _TYPES[base_type(item)]
    limits = [
        f"{words} {rule[name]}" for name, (words, _) in _LIMITS.items() if rule[name] is not None
    ]
    return f"{', '.join([kind, *limits])}; since {rule['since']}"


def base_type(item: dataclasses.Field[Any]) -> type:
    """Returns the type of the values of a field, without `None`."""
    name = str(item.type).removesuffix(" | None")
    return {"str": str, "int": int, "float": float, "bool": bool}[name]


def check_value(item: dataclasses.Field[Any], value: Any, dashes: str) -> None:
    """Checks a value against the type and the rule of its field.

    Args:
        item: the field of an option.
        value: the value of the option.
        dashes: what stands before the name of the field in a message.

    Raises:
        ConfigError: the value has another type, or breaks the rule.
    """
    if value is None and "None" in str(item.type):
        return
    kind = base_type(item)
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(
            f"{dashes}{item.name} is {value!r}, but it must be of type {kind.__name__}."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{dashes}{item.name} is {value!r}, but it must be a finite number.")
    rule = item.metadata
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(
            f"no {item.name} {value!r} for {dashes}{item.name}; "
            + did_you_mean(str(value), rule["choices"])
        )
    for name, (words, holds) in _LIMITS.items():
        if rule[name] is not None and not holds(value, rule[name]):
            raise ConfigError(
                f"{dashes}{item.name} is {value!r}, but it must be {words} {rule[name]}."
            )


def changed(options: TrainingOptions, changes: Mapping[str, Any]) -> TrainingOptions:
    """Returns the options with some fields replaced.

    Args:
        options: the options.
        changes: the new values by field.

    Raises:
        ConfigError: `options` has another type, a name is not a field, or a value breaks its rule.
    """
    if not isinstance(options, TrainingOptions):
        raise ConfigError(
            f"the options are {options!r}, but they must be TrainingOptions, or values by name: "
            "prepare(model, microbatches=4)."
        )
    known = [item.name for item in dataclasses.fields(TrainingOptions)]
    for name in changes:
        if name not in known:
            raise ConfigError(f"no option {name!r} of training; {did_you_mean(name, known)}")
    return dataclasses.replace(options, **changes)
