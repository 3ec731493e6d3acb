"""Tests which values in Python are noticed if they change after a step was traced."""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.struct_pb2 import Struct  # type: ignore[import-untyped]

from tfmulti.training.state import model_search, names_from_data
from tfmulti.training.state.kept_values import KeptValues


def twice(x: Any) -> Any:
    return 2 * x


class Warmup:
    """An attribute of a schedule, with a number."""

    steps = 10


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("decay", "unused")

    def __init__(self) -> None:
        self.decay, self.unused = 0.9, 0


class Frame:
    """Gives its numbers as a table of pandas does."""

    def __init__(self) -> None:
        self.numbers = np.ones(2)

    def __len__(self) -> int:
        return 2

    def to_numpy(self) -> np.ndarray:
        return self.numbers


class Schedule:
    """Holds a number that a step reads by a global name."""

    rate = 0.1
    other = 0.1

    def __init__(self) -> None:
        self.warmup, self.slots, self._power, self._factor = Warmup(), Slots(), 1, 1

    @property
    def power(self) -> int:
        return self._power

    def scaled(self, x: Any) -> Any:
        return x * self._factor


RATE = 0.5
TABLE = {"of": {"pairs": [1.0, 2.0]}}
WEIGHTS: Any = np.ones(3)
CHOSEN = {1, 2}
LOSS = keras.losses.MeanSquaredError()
NOTES = "no step reads this"
schedule = Schedule()


class Settings:
    """Has no method, and a number that a layer reads."""

    def __init__(self) -> None:
        self.decay, self.unused = 0.9, 0


class Configured(keras.layers.Layer):
    """Reads values of all kinds in its `call`, and one only in another place."""

    names = {"of": "a class"}  # noqa: RUF012

    def __init__(self, outer: Any = 1.0) -> None:
        super().__init__()
        self.flag, self.scale, self.function = False, None, twice
        self.table, self.options, self.sizes = np.ones(3), {"power": 1}, [1, 2]
        self.nested, self.groups, self.large = [[1, 2], {"a": 3}], {1, 2}, np.zeros(1_000_000)
        self.notes: Any = None
        self.best, self.settings = 0.0, Settings()
        self.beta, self.by_text = np.float32(1.0), False
        self.long, self.words, self.frame = [0] * 3000, np.array(["a", 1], object), Frame()
        self.deep: Any = [[[[[[]]]]]]
        self.odd, self.helper, self.part = np.array([1.0, np.nan]), None, keras.layers.Dense(1)
        self.read: Callable[[], Any] = lambda: outer

        def set_outer(value: Any) -> None:
            nonlocal outer
            outer = value

        self.set_outer = set_outer

    def note(self) -> Any:
        return self.notes, NOTES

    def helped(self) -> Any:
        return self.helper

    def call(self, x: Any) -> Any:
        self.helped()
        of_others = [RATE, TABLE, WEIGHTS, CHOSEN, LOSS, schedule.rate, schedule.warmup.steps]
        of_others += [schedule.power, schedule.scaled(1), schedule.slots.decay]
        own = [self.odd, self.flag, self.scale, self.function, self.table, self.options, self.sizes]
        own += [self.settings.decay, self.beta, getattr(self, "by_text")]  # noqa: B009
        own += [self.deep, self.long, self.words, self.frame, getattr(self, "made_later", 0)]
        return [x, own, of_others, self.nested, self.groups, self.large, self.part, self.read()]


def change_of(layer: Any, change: Any) -> str | None:
    """Returns which value of a layer has changed, in words."""
    before = KeptValues(model_search.find(layer), "train_step")
    assert before.first_new([]) is None
    change(layer)
    return before.first_new([])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: setattr(layer, "flag", True), "flag"),
        (lambda layer: setattr(layer, "scale", 2.0), "scale"),
        (lambda layer: setattr(layer, "function", np.abs), "function"),
        (lambda layer: layer.table.fill(0.0), "table"),
        (lambda layer: layer.large.fill(1.0), "large"),
        (lambda layer: layer.options.update({"power": 2}), "options"),
        (lambda layer: layer.sizes.__setitem__(0, 3), "sizes"),
        (lambda layer: layer.nested[0].__setitem__(0, 3), "nested"),
        (lambda layer: layer.nested[1].__setitem__("a", 4), "nested"),
        (lambda layer: setattr(layer, "groups", {1, 3}), "groups"),
        (lambda layer: setattr(layer, "part", keras.layers.Dense(1)), "part"),
        (lambda layer: setattr(layer, "helper", twice), "helper"),
        (lambda layer: setattr(layer, "sizes", [1, 2, 3]), "sizes"),
        (lambda layer: setattr(layer, "scale", [1, 2]), "scale"),
        (lambda layer: setattr(layer, "beta", np.float32(0.5)), "beta"),
        (lambda layer: setattr(layer, "beta", None), "beta"),
        (lambda layer: setattr(layer, "flag", np.bool_(True)), "flag"),
        (lambda layer: setattr(layer, "by_text", True), "by_text"),
        (lambda layer: delattr(layer, "beta"), "beta"),
        (lambda layer: setattr(layer, "groups", {1}), "groups"),
        (lambda layer: setattr(layer, "scale", [tf.ones(2)]), "scale"),
        (lambda layer: layer.long.append(3), "long"),
        (lambda layer: layer.long.__setitem__(0, 3), "long"),
        (lambda layer: layer.long.__setitem__(1, 3), "long"),
        (lambda layer: layer.large.__setitem__(1, 3), "large"),
        (lambda layer: setattr(layer, "groups", {(1, 2)}), "groups"),
        (lambda layer: layer.deep[0][0][0][0][0].append(1), "deep"),
        (lambda layer: layer.words.__setitem__(0, "b"), "words"),
        (lambda layer: setattr(layer.frame, "numbers", np.zeros(2)), "frame"),
        (lambda layer: setattr(layer, "made_later", 1), "made_later"),
        (lambda layer: setattr(layer, "not_read", 1), None),
        (lambda layer: layer.sizes.append(3), "sizes"),
        (lambda layer: layer.groups.add(3), "groups"),
        (lambda layer: layer.options.update({"a": layer.options}), "options"),
        (lambda layer: setattr(layer, "odd", np.array([1.0, np.nan])), None),
        (lambda layer: setattr(layer, "best", 0.5), None),
        (lambda layer: setattr(layer, "notes", "read by a method that no step calls"), None),
        (lambda layer: setattr(layer, "table", np.ones(3)), None),
        (lambda layer: layer(np.ones(2)), None),
    ],
)
def test_a_changed_value_that_a_step_may_read_is_found(change: Any, name: str | None) -> None:
    layer = Configured()
    assert change_of(layer, change) == (name and f"Configured.{name} of {layer.name!r}")


@pytest.mark.parametrize("kind", [Settings, Slots])
@pytest.mark.parametrize("name", ["decay", "unused"])
def test_a_changed_number_of_an_object_without_methods_is_found(kind: Any, name: str) -> None:
    layer = Configured()
    layer.settings = kind()
    found = change_of(layer, lambda layer: setattr(layer.settings, name, 0.5))
    assert found == (f"{kind.__name__}.decay" if name == "decay" else None)


@pytest.mark.parametrize(
    ("name", "value", "is_told_elsewhere"),
    [
        ("scale", 3.0, False),
        ("scale", "a", False),
        ("scale", np.ones(2), False),
        ("scale", twice, False),
        ("scale", (1, 3), False),
        ("table", np.zeros(3), False),
        ("flag", True, False),
        ("best", 1.0, True),
    ],
)
def test_a_change_by_a_trace_that_is_told_nowhere_else_is_found(
    name: str, value: Any, is_told_elsewhere: bool
) -> None:
    """`python_attributes.first_change` tells numbers that become other numbers."""
    layer = Configured()
    setattr(layer, "helper", lambda: layer.best)  # noqa: B010
    before = KeptValues(model_search.find(layer), "test_step")
    setattr(layer, name, value)
    words = f"Configured.{name} of {layer.name!r}"
    assert before.changed() == ([words], None if is_told_elsewhere else words)


@pytest.mark.parametrize("change", [lambda n: n.append(1), lambda n: n.__setitem__(0, 5)])
def test_a_collection_that_a_trace_changes_is_not_told(change: Any) -> None:
    layer = Configured()
    before = KeptValues(model_search.find(layer), "train_step")
    change(layer.sizes)
    after = KeptValues(model_search.find(layer), "train_step")
    name = f"Configured.sizes of {layer.name!r}"
    assert before.changed() == ([name], name)
    change(layer.sizes)
    layer.sizes[0] += 1
    assert after.first_new([name]) is None
    assert after.first_new([]) == name


def _by_a_changed_text(o: Any) -> Any:
    name = "rate"
    name += o.kind
    return getattr(o, name)


class Deep(keras.layers.Layer):
    """Reads an object in a long dict, and attributes whose names it takes from data."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.rate, self.other = names, 1.0, 1.0

    def call(self, x: Any) -> Any:
        return x * OBJECTS["of"][1999].decay * getattr(self, self.names[0])


OBJECTS = {"of": {number: Settings() for number in range(2000)}}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: setattr(OBJECTS["of"][1999], "decay", 0.1), "OBJECTS['of'][1999].decay"),
        (lambda layer: setattr(layer, "rate", 0.1), "Deep.rate"),
        # It is not known which of the attributes it reads.
        (lambda layer: setattr(layer, "other", 0.1), "Deep.other"),
    ],
)
def test_a_value_with_a_name_from_data_is_found(
    change: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTS["of"], 1999, Settings())
    found = change_of(Deep(["rate"]), change)
    assert found is not None
    assert found.startswith(name)


@pytest.mark.parametrize(
    ("names", "is_from_data"),
    [
        (lambda o: getattr(o, "rate"), False),  # noqa: B009
        (lambda o: getattr(o, "rate", None), False),
        (lambda o: getattr(o.inner, f"rate_{o.kind}"), False),
        (lambda o: (vars(o)["rate"], o.__dict__["rate"]), False),
        (lambda o: getattr(o, o.kind), True),
        (lambda o: getattr(o, f"rate{o.kind}"), True),
        (lambda o, kind="rate": getattr(o, kind), True),
        (_by_a_changed_text, True),
        (lambda o: o.__getattribute__(o.kind), True),
        (lambda o: (getattr(o, o.kinds[0]), {"loss": 1}), True),
        (lambda o: vars(o)[o.kind], True),
        (lambda o: [getattr(o, kind) for kind in o.kinds], True),
    ],
)
def test_names_from_data_are_told_from_constants(names: Any, is_from_data: bool) -> None:
    layer = Configured()
    layer.helper = names
    code = KeptValues(model_search.find(layer), "train_step").code
    assert code.may_read("any_attribute", 1.0) is is_from_data
    assert not code.may_read("any_function", twice)


def test_names_are_from_data_if_the_file_of_the_program_was_changed(tmp_path: Path) -> None:
    file = tmp_path / "changed_while_it_runs.py"
    file.write_text("def rate(o):\n    return getattr(o, 'rate')\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    layer = Configured()
    layer.helper = namespace["rate"]
    for text, is_from_data in (
        (file.read_text(), False),
        ("def other(a):\n    return getattr(a, 'rate')\n", True),
        ("x = (", True),
        ("", True),
    ):
        file.write_text(text)
        names_from_data.takes_names_from_data.cache_clear()
        code = KeptValues(model_search.find(layer), "train_step").code
        assert code.may_read("any_attribute", 1.0) is is_from_data


def test_an_attribute_that_loading_weights_sets_in_keras_is_not_told(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save_weights(tmp_path / "model.weights.h5")
    kept = KeptValues(model_search.find(model), "train_step")
    model.load_weights(tmp_path / "model.weights.h5")
    assert kept.first_new([]) is None


def _set(owner: str, name: str, value: Any) -> Any:
    """Returns a function that changes a rule of a part of Keras in a model."""

    def change(model: keras.Model) -> None:
        layer = model.layers[0]
        owners = {
            "layer": layer,
            "regularizer": layer.kernel.regularizer,
            "constraint": layer.kernel.constraint,
            "activity": layer.activity_regularizer,
            "schedule": model.optimizer._learning_rate,
        }
        setattr(owners[owner], name, value)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("regularizer", "l2", 1.0), "L2.l2"),
        (_set("constraint", "max_value", 0.1), "MaxNorm.max_value"),
        (_set("activity", "l1", 0.5), "L1.l1"),
        (_set("layer", "activity_regularizer", None), "Dense.activity_regularizer of 'hidden'"),
        (_set("schedule", "initial_learning_rate", 0.01), "CosineDecay.initial_learning_rate"),
        (_set("schedule", "name", "other"), None),
        (_set("layer", "name", "other"), None),
    ],
)
def test_a_changed_rule_of_keras_is_told(change: Any, words: str | None) -> None:
    hidden = keras.layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L2(0.01),
        kernel_constraint=keras.constraints.MaxNorm(2.0),
        activity_regularizer=keras.regularizers.L1(0.01),
        name="hidden",
    )
    model = keras.Sequential([keras.Input((2,)), hidden])
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20)), "mse")
    kept = KeptValues(model_search.find(model), "train_step")
    assert kept.first_new([]) is None
    change(model)
    assert kept.first_new([]) == words


def _ended(iterator: Any) -> Any:
    """Returns an iterator that has given all values, or the first ones of endless ones."""
    list(itertools.islice(iterator, 3))
    return iterator


@pytest.mark.parametrize(
    "value",
    [
        _ended(itertools.cycle([1, 2])),
        _ended(itertools.islice([1, 2], 2)),
        _ended(zip([1], [2], strict=True)),
        _ended(number for number in [1]),
        # It is written only, so a step reads nothing of it.
        open(os.devnull, "w"),  # noqa: SIM115
    ],
)
def test_an_iterator_that_has_not_moved_is_not_told(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", [value])
    kept = KeptValues(model_search.find(Holds()), "train_step")
    if hasattr(value, "write"):
        value.write("a line")
    assert kept.first_new([]) is None


class Gate:
    """May get a variable later."""

    def __init__(self) -> None:
        self.variable: Any = None


class Gated(keras.layers.Layer):
    """Reads a gate that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Gate()

    def call(self, x: Any) -> Any:
        return x if self.helper.variable is None else self.helper.variable * x


def test_a_variable_that_an_object_gets_later_is_told() -> None:
    layer = Gated()
    kept = KeptValues(model_search.find(layer), "train_step")
    layer.helper.variable = keras.Variable(1.0)
    assert kept.first_new([]) == "Gate.variable"


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        (keras.losses.Huber(0.5), "delta", "Huber.fn_kwargs"),
        (keras.metrics.BinaryAccuracy(threshold=0.3), "threshold", "BinaryAccuracy.fn_kwargs"),
    ],
)
def test_a_changed_argument_of_a_function_of_keras_is_told(
    part: Any, name: str, words: str
) -> None:
    kept = KeptValues(model_search.find(part), "train_step")
    assert kept.first_new([]) is None
    part._fn_kwargs[name] = 0.1
    assert kept.first_new([]) == words


def test_a_changed_list_of_a_schedule_is_told() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01])
    kept = KeptValues(model_search.find(keras.optimizers.SGD(schedule)), "train_step")
    schedule.values[1] = 0.05
    assert kept.first_new([]) == "PiecewiseConstantDecay.values"


def test_a_variable_that_keras_builds_is_no_change() -> None:
    layer = keras.layers.Dense(3)
    kept = KeptValues(model_search.find(layer), "train_step")
    layer.build((None, 2))
    assert kept.changed() == ([], None)


HELD: Any = None


class Holds(keras.layers.Layer):
    """Reads one global value."""

    def call(self, x: Any) -> Any:
        return x, HELD


def _shared(leaf: Any) -> Any:
    """Returns a list that holds the same list twice, which does so, too, and so on."""
    for _ in range(60):
        leaf = [leaf, leaf]
    return leaf


def _frames(*numbers: int) -> list[Frame]:
    """Returns tables, each of which makes a list of its texts whenever it is asked."""
    frames = [Frame() for _ in numbers]
    for frame, number in zip(frames, numbers, strict=True):
        frame.numbers = np.array([str(number)], object)
    return frames


def _cyclic(number: int) -> Any:
    found: dict[str, Any] = {"number": number}
    found["near"] = [found]
    return found


def _structured(number: int) -> np.ndarray:
    return np.array([(1, [number])], [("a", "i4"), ("b", "O")])


class RaisesIfCompared:
    def __eq__(self, other: object) -> bool:
        raise ValueError(other)

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda n: _shared([n]), 1),
        (_cyclic, 1),
        (lambda n: _frames(0, 0, n), 1),
        (lambda n: [np.ma.array(["a", "b"]), np.ma.array(["a", str(n)])], 1),
        (lambda n: [True, n], True),
        (lambda n: {"a": n}, True),
        (lambda n: [(n, 2)] * 3, 1),
        (lambda n: [0.5, float("nan"), n], 1),
        (lambda n: (1.0, (float("nan"), n)), 1),
        (lambda n: np.ma.array([1, 2], mask=[False, bool(n)]), 1),
        (_structured, 1),
        (lambda n: np.array([n], "datetime64[s]"), 1),
        (lambda n: slice(0, n), 1),
        (lambda n: bytearray([n]), 1),
        (lambda n: bytes([n]), 1),
        (lambda n: Path(str(n)), 1),
        (lambda n: {Path(str(n))}, 1),
        (lambda n: {(n, "a")}, 1),
        (lambda n: datetime.timedelta(n), 1),
        (lambda n: tf.TensorShape([n]), 1),
        (lambda n: collections.UserList([n]), 1),
        (lambda n: {(n, 1): 1}, 1),
    ],
)
def test_an_equal_copy_is_not_told_and_another_value_is(
    make: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", make(0))
    kept = KeptValues(model_search.find(Holds()), "train_step")
    monkeypatch.setitem(globals(), "HELD", make(0))
    assert kept.first_new([]) is None
    monkeypatch.setitem(globals(), "HELD", make(other))
    assert kept.first_new([]) == "HELD, which Holds.call reads,"


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (itertools.count(), next),
        (itertools.cycle([1, 2]), next),
        (iter([1, 1]), next),
        (iter({1: 1, 2: 2}.items()), next),
        (zip([1, 2], [3, 4], strict=True), next),
        (map(lambda number: number, [1, 2]), next),
        ((number for number in [1, 1]), next),
        ((number for number in [1]), list),
        (open(__file__), lambda file: file.read(1)),  # noqa: SIM115
        (Struct(), lambda message: message.update({"rate": 1})),
    ],
)
def test_a_change_of_what_an_object_holds_in_c_is_told(
    value: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", [value])
    kept = KeptValues(model_search.find(Holds()), "train_step")
    assert kept.first_new([]) is None
    change(value)
    assert kept.first_new([]) == "HELD, which Holds.call reads,"


def test_equal_tuples_may_be_one_tuple_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    number = float("0.5")
    monkeypatch.setitem(globals(), "HELD", [(number, True)] * 3)
    kept = KeptValues(model_search.find(Holds()), "train_step")
    monkeypatch.setitem(globals(), "HELD", [(float("0.5"), True) for _ in range(3)])
    assert kept.first_new([]) is None


@pytest.mark.parametrize(
    "value", [{(RaisesIfCompared(), 1): 1}, {RaisesIfCompared()}, [RaisesIfCompared()]]
)
def test_values_that_cannot_be_compared_are_left_alone(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", value)
    kept = KeptValues(model_search.find(Holds()), "train_step")
    monkeypatch.setitem(globals(), "HELD", type(value)(value))
    assert kept.first_new([]) is None


def test_a_value_of_another_step_is_not_told() -> None:
    class Steps(keras.Model):
        trained = tested = 0

        def train_step(self, data: Any) -> Any:
            return self.trained

        def test_step(self, data: Any) -> Any:
            return self.tested

    model = Steps()
    before = KeptValues(model_search.find(model), "train_step")
    model.tested = 1
    assert before.first_new([]) is None
    model.trained = 1
    assert before.first_new([]) == f"Steps.trained of {model.name!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RATE", 0.25),
        ("TABLE", {"of": {"pairs": [1.0, 3.0]}}),
        ("WEIGHTS", np.zeros(3)),
        ("CHOSEN", {1, 3}),
        ("LOSS", keras.losses.MeanAbsoluteError()),
        ("NOTES", "still not read"),
    ],
)
def test_a_changed_global_that_a_step_reads_is_found(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = change_of(Configured(), lambda layer: monkeypatch.setitem(globals(), name, value))
    assert found == (None if name == "NOTES" else f"{name}, which Configured.call reads,")


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (schedule, "rate", "schedule.rate"),
        (Schedule, "rate", "schedule.rate"),
        (Schedule, "other", None),
        (schedule.warmup, "steps", "schedule.warmup.steps"),
        (schedule.slots, "decay", "schedule.slots.decay"),
        (schedule.slots, "unused", None),
        (schedule, "_power", "schedule._power"),
        (schedule, "_factor", "schedule._factor"),
    ],
)
def test_a_changed_attribute_of_a_global_is_found(
    owner: Any, name: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = change_of(Configured(), lambda layer: monkeypatch.setattr(owner, name, 9.0))
    assert found == (words and f"{words}, which Configured.call reads,")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rate", "schedule.rate, which Configured.call reads,"),
        ("power", "power, which scaled reads,"),
        ("unused", None),
    ],
)
def test_a_changed_value_of_a_module_of_the_user_is_found(
    name: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = types.ModuleType("settings")
    settings.__file__, settings.unused = "settings.py", 0
    code = "rate, power = 0.5, 1\ndef scaled(x):\n    return x * power"
    exec(code, vars(settings))
    settings.warmup = settings.scaled
    monkeypatch.setitem(globals(), "schedule", settings)
    assert change_of(Configured(), lambda layer: setattr(settings, name, 3)) == words


def test_a_changed_value_of_a_closure_is_found() -> None:
    found = change_of(Configured(), lambda layer: layer.set_outer(2.0))
    assert found == "outer, which <lambda> reads,"


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: keras.layers.Dense(1, "relu"), "activation", keras.activations.tanh),
        (lambda: keras.optimizers.SGD(), "clipnorm", 0.1),
        (lambda: keras.layers.Normalization(), "mean", tf.zeros(2)),
        (lambda: keras.layers.Dropout(0.1), "trainable", False),
        (
            lambda: keras.optimizers.SGD(),
            "learning_rate",
            keras.optimizers.schedules.CosineDecay(1.0, 9),
        ),
    ],
)
def test_a_changed_setting_of_keras_is_found(make: Any, name: str, value: Any) -> None:
    owner = make()
    found = change_of(owner, lambda owner: setattr(owner, name, value))
    assert found is not None
    assert found.startswith(f"{type(owner).__name__}.{name}")


def test_a_changed_regularizer_of_a_variable_is_found() -> None:
    layer = keras.layers.Dense(1)
    layer.build([None, 2])
    regularizer = keras.regularizers.L2(0.1)
    found = change_of(layer, lambda layer: setattr(layer.kernel, "regularizer", regularizer))
    assert found == "Variable.regularizer of 'kernel'"
