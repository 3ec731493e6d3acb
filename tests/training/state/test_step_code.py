"""Tests how the code of a step is followed to the values that it reads."""

from __future__ import annotations

import argparse
import collections
import functools
import operator
import random
import random as another_name
import types
import weakref
from collections.abc import Callable
from random import shuffle
from typing import Any

import keras
import numpy as np
import pytest

from tfmulti.training.state import model_search
from tfmulti.training.state.kept_values import KeptValues
from tfmulti.training.state.step_code import StepCode


class Config:
    """Numbers that a step reads in many ways."""

    shared = 1.0

    def __init__(self) -> None:
        self.rate, self.hidden, self.indexed, self.called = 0.1, {"power": 1}, [1, 2], 1.0
        self.by_text = self.by_getter = self.never = self.mean = 0.0

    def __getattr__(self, name: str) -> Any:
        if name not in self.hidden:
            raise AttributeError(name)
        return self.hidden[name]

    def __getitem__(self, index: int) -> Any:
        return self.indexed[index]

    def __call__(self, x: Any) -> Any:
        return x * self.called

    @classmethod
    def of_class(cls) -> Any:
        return cls.shared

    def with_global(self) -> Any:
        return FACTOR

    def loss(self, y: Any, outputs: Any) -> Any:
        return (y - outputs) ** self.power


def scaled_by_a_global(x: Any) -> Any:
    return x * FACTOR


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(x: Any) -> Any:
        return function(x) * WRAPPER

    return call


class Installed:
    """Settings of an installed package, which have the methods of a dict."""

    __module__ = "pytest"

    def __init__(self) -> None:
        self.rate, self.hidden = 0.1, {"power": 1}

    def keys(self) -> Any:
        return self.hidden.keys()

    def items(self) -> Any:
        return self.hidden.items()

    def __getitem__(self, name: str) -> Any:
        return self.hidden[name]

    def __len__(self) -> int:
        return 1


class Attribute:
    """An object of an installed package that is no dict."""

    __module__ = "pytest"
    rate = 0.1
    never = 0.1


cached = functools.cache(scaled_by_a_global)
decorated = doubled(scaled_by_a_global)
WRAPPER: Any = None
# `fresh` makes all of them anew for each test.
FACTOR: Any = None
config: Any = None
by_name: Any = None
table: Any = None
scaled: Any = None
settings: Any = None
arguments: Any = None
installed: Any = None
attribute: Any = None


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the objects that the steps read, and puts the attributes of classes back afterwards."""
    model = types.SimpleNamespace(encoder=types.SimpleNamespace(rate=0.1))
    made: dict[str, Any] = {
        "FACTOR": 2.0,
        "WRAPPER": 2.0,
        "config": Config(),
        "by_name": {"test": [Config()]},
        "table": collections.UserDict(rate=1.0),
        "scaled": functools.partial(operator.mul, [1.0]),
        "settings": types.SimpleNamespace(model=model),
        "arguments": argparse.Namespace(rate=0.1),
        "installed": Installed(),
        "attribute": Attribute(),
    }
    for name, value in made.items():
        monkeypatch.setitem(globals(), name, value)
    made["config"].mask_value = 0.0
    monkeypatch.setattr(Config, "shared", 1.0)
    monkeypatch.setattr(Step, "sizes", (1, 2))
    monkeypatch.setattr(total, "rate", 0.1, raising=False)
    monkeypatch.setattr(total, "never", 0.1, raising=False)


def total(values: Any, settings: Any) -> Any:
    return values * settings.rate * getattr(total, "rate", 1.0)


UNREAD = 1.0


def makes_a_part() -> Any:
    return UNREAD


class Step(keras.Model):
    """A step that reads all of them."""

    sizes = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        makes_a_part()
        self.drop, self.held, self.weight_a, self.a_rate = Drop(0.5), Attribute(), 1, 1
        self.weights_of_a = 1

    def train_step(self, data: Any) -> Any:
        values = [getattr(config, name) for name in ("by_text", "power")]
        values += [config[0], config(1), config.of_class(), config.with_global(), self.sizes]
        values += [by_name["test"][0].rate, table["rate"], scaled]
        values += [settings.model.encoder.rate, arguments.rate, cached(1), decorated(1)]
        values += [operator.attrgetter("by_getter")(config), keras.ops.mean(data)]
        values += [installed["power"], attribute.rate, self.held.rate]
        values += [
            getattr(self, kind) for name in "a" for kind in ("weight_" + name, f"{name}_rate")
        ]
        return values, total(data, config)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return config.mask_value


class Drop(keras.layers.Dropout):
    """Calls Keras' own code, which reads `rate`."""

    def call(self, x: Any, training: bool = False) -> Any:
        return super().call(x, training=True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: vars(config).update(rate=1.0), "config.rate, which Step.train_step reads,"),
        (lambda m: config.hidden.update(power=9), "config.hidden, which Step.train_step reads,"),
        (
            lambda m: vars(config).update(by_text=9.0),
            "config.by_text, which Step.train_step reads,",
        ),
        (lambda m: vars(config).update(by_getter=9.0), "config.by_getter, which"),
        (lambda m: config.indexed.append(9), "config.indexed, which"),
        (lambda m: vars(config).update(called=9.0), "config.called, which"),
        (lambda m: vars(config).update(mask_value=9.0), "config.mask_value, which"),
        (lambda m: setattr(Config, "shared", 9.0), "config.shared, which"),
        (lambda m: globals().update(FACTOR=9.0), "FACTOR, which "),
        (lambda m: vars(by_name["test"][0]).update(rate=9.0), "by_name['test'][0].rate, which"),
        (lambda m: table.update(rate=9.0), "table, which Step.train_step reads,"),
        (lambda m: scaled.args[0].append(9.0), "scaled, which Step.train_step reads,"),
        (lambda m: setattr(Step, "sizes", (9,)), "Step.sizes of"),
        (lambda m: setattr(m.drop, "rate", 0.9), "Drop.rate of"),
        (lambda m: vars(settings.model.encoder).update(rate=9.0), "settings.model.encoder.rate,"),
        (lambda m: globals().update(WRAPPER=9.0), "WRAPPER, which "),
        (lambda m: vars(arguments).update(rate=9.0), "arguments.rate, which"),
        (lambda m: installed.hidden.update(power=9), "installed, which Step.train_step reads,"),
        (lambda m: setattr(attribute, "rate", 9.0), "attribute.rate, which Step.train_step reads,"),
        (lambda m: setattr(m.held, "rate", 9.0), "Attribute.rate"),
        (lambda m: setattr(total, "rate", 9.0), "total.rate, which"),
        (lambda m: setattr(m, "weight_a", 9.0), "Step.weight_a of"),
        (lambda m: setattr(m, "a_rate", 9.0), "Step.a_rate of"),
        (lambda m: setattr(m, "weights_of_a", 9.0), None),
        (lambda m: setattr(attribute, "never", 9.0), None),
        (lambda m: setattr(m.held, "never", 9.0), None),
        (lambda m: setattr(total, "never", 9.0), None),
        (lambda m: vars(config).update(never=9.0), None),
        (lambda m: globals().update(UNREAD=9.0), None),
        (lambda m: vars(config).update(mean=9.0), None),
    ],
)
def test_a_value_that_a_step_reads_in_some_way_is_found(
    change: Callable[[Any], Any], name: str | None
) -> None:
    model = Step()
    kept = KeptValues(model_search.find(model), "train_step")
    assert kept.first_new([]) is None
    change(model)
    found = kept.first_new([])
    assert found is None if name is None else found is not None and found.startswith(name)


def test_a_class_without_the_name_of_a_module_is_taken_for_the_users() -> None:
    """A class of an extension in C may have one, such as that of an open file of h5py."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.held = type("Held", (), {"__module__": property(str)})()
    assert KeptValues(model_search.find(model), "train_step").first_new([]) is None


def test_methods_and_partial_functions_that_a_model_holds_are_followed() -> None:
    held = Config()
    for loss in (held.loss, functools.partial(Config.loss, held)):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
        kept = KeptValues(model_search.find(model), "train_step")
        held.hidden["power"] += 1
        assert kept.first_new([]) == "Config.hidden"


class Raises:
    """An object of which nothing can be read or compared."""

    __slots__ = ("unset",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __eq__(self, other: object) -> bool:
        raise ValueError(other)

    def __len__(self) -> int:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]

    def to_numpy(self, kind: str) -> Any:
        raise TypeError(kind)


@pytest.mark.parametrize(
    "make",
    [
        Raises,
        lambda: [Raises()],
        random.SystemRandom,
        lambda: weakref.proxy(Config()),
        lambda: [weakref.proxy(Config())],
        lambda: np.zeros(2, [("a", "f4")]),
        lambda: types.MappingProxyType({"a": Raises()}),
    ],
)
def test_an_object_that_cannot_be_compared_is_left_alone(make: Callable[[], Any]) -> None:
    value, holder = make(), Config()
    vars(holder)["rate"] = value

    class Reads(keras.Model):
        def train_step(self, data: Any) -> Any:
            return holder.rate, value

    model = Reads()
    kept = KeptValues(model_search.find(model), "train_step")
    assert kept.first_new([]) is None
    assert kept.changed() == ([], None)


def test_a_table_of_pandas_is_compared_without_its_own_code() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is no dependency of tfmulti")

    class Reads(keras.Model):
        def train_step(self, data: Any) -> Any:
            return len(self.table), self.table.mean(), self.dates

    model = Reads()
    model.table = pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
    model.dates = pandas.Series(pandas.to_datetime(["2020", "2021"]))
    kept = KeptValues(model_search.find(model), "train_step")
    assert not any("pandas" in f.__module__ for f in kept.code.functions)
    assert kept.first_new([]) is None
    model.table.loc[0, "b"] = "z"
    assert kept.first_new([]) == f"Reads.table of {model.name!r}"
    model.table = pandas.DataFrame({"a": np.arange(3000.0), "b": ["x"] * 3000})
    kept = KeptValues(model_search.find(model), "train_step")
    assert kept.first_new([]) is None
    model.table["a"] += 1.0
    assert kept.first_new([]) == f"Reads.table of {model.name!r}"


def _by_module(data: Any) -> Any:
    return random.random()


def _by_another_name(data: Any) -> Any:
    return another_name.random()


def _by_function(data: Any) -> Any:
    return shuffle(data)


def _by_own_import(data: Any) -> Any:
    import random as inner

    return inner.random()


def _by_keras(data: Any) -> Any:
    return np.sqrt(2.0) * keras.random.normal((2,))


def _in_a_comprehension(data: Any) -> Any:
    return [np.random.rand() for _ in range(2)]


def _by_attributes(data: Any) -> Any:
    return [layer for layer in data.layers], data.random


def _by_numpy(data: Any) -> Any:
    return np.random.random()


@pytest.mark.parametrize(
    ("function", "python", "numpy"),
    [
        (_by_module, True, False),
        (_by_another_name, True, False),
        (_by_function, True, False),
        (_by_own_import, True, False),
        (_by_numpy, False, True),
        (_in_a_comprehension, False, True),
        (_by_keras, False, False),
        (_by_attributes, False, False),
    ],
)
def test_a_step_that_draws_in_python_is_known(function: Any, python: bool, numpy: bool) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(function)])
    code = StepCode(model_search.find(model), "train_step")
    assert code.uses(random, random.Random) is python
    assert code.uses(np.random, np.random.RandomState) is numpy
    assert not code.makes_parts_of_keras()


def _makes_a_layer(data: Any) -> Any:
    return keras.layers.Dropout(0.5)(data)


def test_a_step_that_makes_a_layer_is_known() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(_makes_a_layer)])
    assert StepCode(model_search.find(model), "train_step").makes_parts_of_keras()


def test_slots_of_a_subclass_and_single_entries_of_collections_are_compared() -> None:
    class Base:
        __slots__ = ("value",)

    class Again(Base):
        __slots__ = ("value",)

    class Reads(keras.Model):
        def train_step(self, data: Any) -> Any:
            return self.held.value, self.entries

    model = Reads()
    model.held, model.entries = Again(), [0] * 1000
    model.held.value = 1
    kept = KeptValues(model_search.find(model), "train_step")
    model.held.value = 2
    assert kept.first_new([]) == "Again.value"
    model.held.value, model.entries[1] = 1, 5
    assert kept.first_new([]) == f"Reads.entries of {model.name!r}"
