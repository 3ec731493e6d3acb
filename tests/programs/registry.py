"""Defines what a program is, and holds the table of all programs.

A program is written for one device. It makes a model and data, and gives the arguments of `compile`
and `fit`. The runner decides where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

# One device, and two replicas in one process, find no error that three replicas or two workers do
# not find. In CI programs run alternately at one of the last two places, so that they take minutes.
# A machine with a GPU takes other places: CONTRIBUTING.md.
GIVEN_PLACES = tuple(filter(None, os.environ.get("PLACES", "").split(",")))
PLACES = GIVEN_PLACES or ("one_device", "mirrored-2", "mirrored-3", "workers-2")
EQUAL = "equal"
# A pattern of the messages of refusals. If replicas cannot take a step as one device does, the
# comparison with one device finds it.
TF_RANDOM = r"(?i)tf\.random|\bdiffers?\b"


@dataclass
class Made:
    """A program's model, and the calls that it makes.

    Attributes:
        compile: the arguments of `compile`.
        fit: the arguments of `fit`, without `verbose`.
        evaluate: the arguments of `evaluate`, if the program evaluates after training.
        predict: the arguments of `predict`, if the program predicts after training.
        use: a function that is called instead of `fit`. It returns numbers by name.
        after: a function that is called after training. It returns numbers by name.
        optimizers: the optimizers that are no attributes of the model.
        prepare: options of `prepare`.
    """

    model: keras.Model
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] | None = None
    predict: dict[str, Any] | None = None
    use: Callable[[keras.Model], dict[str, Any]] | None = None
    after: Callable[[keras.Model], dict[str, Any]] | None = None
    optimizers: dict[str, keras.optimizers.Optimizer] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        make: makes the model and the data, inside the strategy's scope.
        kind: a description of the program.
        like: titles of public programs of this kind.
        expects: `equal` to one device, or a pattern that the message of an error must match.
        tolerance: the smallest relative difference that is an error, for float32.
        floatx: Keras' default float type while the program runs.
        apart: the prefixes of the names of arrays that are wrong in plain Keras.
    """

    make: Callable[[], Made]
    kind: str
    like: tuple[str, ...]
    expects: str
    tolerance: float
    floatx: str
    apart: tuple[str, ...]


PROGRAMS: dict[str, Program] = {}


def program(
    *like: str,
    expects: str = EQUAL,
    tolerance: float = 1e-6,
    floatx: str = "float32",
    apart: tuple[str, ...] = (),
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Registers a program under its function's name; the first docstring line is its kind."""

    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__
        assert name not in PROGRAMS, name
        assert make.__doc__, name
        kind = make.__doc__.splitlines()[0]
        PROGRAMS[name] = Program(make, kind, like, expects, tolerance, floatx, apart)
        return make

    return register
