"""What a program is, and the table of all programs.

A program is written for one device: it makes a model and data and says how to compile and
train. The runner alone decides where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

# Two replicas in one process show nothing that three, or two workers, do not; they are left to
# release checks, by EXACTNESS_EVERYWHERE=1, so that the programs take minutes.
EVERYWHERE = os.environ.get("EXACTNESS_EVERYWHERE") == "1"
PLACES = ("mirrored-2", "mirrored-3", "workers-2") if EVERYWHERE else ("mirrored-3", "workers-2")
EQUAL = "equal"
# What the message of a refusal must say. A step that replicas cannot take as one device does is
# found by comparison with one device.
TF_RANDOM = r"(?i)tf\.random|\bdiffers?\b"


@dataclass
class Made:
    """A program's model, and what it does with it.

    Attributes:
        compile: the arguments of `compile`.
        fit: the arguments of `fit`; without `verbose`.
        evaluate: the arguments of `evaluate`, where the program evaluates after training.
        predict: the arguments of `predict`, where it predicts after training.
        use: what it does instead of `fit`; returns numbers by name.
        after: what else it looks at after training; returns numbers by name.
        optimizers: those that the model does not hold as attributes.
    """

    model: keras.Model
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] | None = None
    predict: dict[str, Any] | None = None
    use: Callable[[keras.Model], dict[str, Any]] | None = None
    after: Callable[[keras.Model], dict[str, Any]] | None = None
    optimizers: dict[str, keras.optimizers.Optimizer] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        make: makes the model and the data, inside the strategy's scope.
        kind: what it stands for.
        like: titles of public programs of this kind.
        expects: `equal` to one device, or a pattern that the message of an error must match.
        tolerance: the least difference that is an error, relative, for float32.
        floatx: Keras' default float type while the program runs.
        apart: beginnings of names of arrays that plain Keras alone gets wrong.
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
