"""Re-creates the variables of a model for another strategy, with their values.

    adopt(model, strategy)   re-creates inside a strategy's scope what was made outside it
    on_one_device(state)     replaces all variables by plain ones for a while, as in plain Keras

Both keep every Keras `Variable` object and give it another `tf.Variable`. So layers, optimizers and
metrics do not notice. A user may also hold `tf.Variable`s directly: as attributes, in lists and
dictionaries, or in the closures and globals of functions. These are replaced where they are held.
`find` searches the model for all of them.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.cluster.environments import described
from tfmulti.distribution import strategies
from tfmulti.distribution.python_attributes import set_value, slots_of
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import ClusterError, ModelError
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.tracing import eager_mode
from tfmulti.keras_patches.variables import (
    array_of,
    attributes_of,
    exchange_keys,
    new_tf_variable,
    restore_keys,
    set_strategy,
    set_tf_variable,
    strategy_of,
    tf_variable_of,
    variable_keys,
)
from tfmulti.training.state import trainer_state
from tfmulti.training.state.user_lines import is_module_of_user, is_of_library

SCOPE_ADVICE = (
    "Write 'strategy = tfmulti.make_strategy()' once, and 'with strategy.scope():' around the "
    "lines that build and compile the model."
)

# The search enters objects of these packages only if they are one of `_OF_KERAS`.
_LIBRARIES = ("keras", "tensorflow", "numpy", "tfmulti", "builtins")
_OF_KERAS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
# A longer list that begins with a number, a text or an array is taken for data without variables.
_SHORT_LIST = 1000


@dataclass
class VariableHolder:
    """A place that holds a `tf.Variable` directly, without a Keras variable around it.

    Attributes:
        name: a name of the place that a user understands.
        variable: the `tf.Variable` that the place held when it was found.
        put: puts another value into the place.
    """

    name: str
    variable: tf.Variable
    put: Callable[[Any], None]


@dataclass
class State:
    """All variables that were found from a model, and the objects that hold them.

    Attributes:
        places: the Keras variables, each with a name of its place that a user understands.
        holders: the places that hold a `tf.Variable` directly.
        objects: all objects that have attributes, such as models and optimizers.
        functions: the user's functions and methods.
    """

    places: list[tuple[str, Any]] = field(default_factory=list)
    holders: list[VariableHolder] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)

    @property
    def variables(self) -> list[Any]:
        """The Keras variables."""
        return [variable for _, variable in self.places]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers among the objects."""
        return [owner for owner in self.objects if isinstance(owner, keras.optimizers.Optimizer)]

    @property
    def own_objects(self) -> list[Any]:
        """The objects whose classes are not Keras', but the user's own, without schedules.

        A schedule of the learning rate runs once for the replicas of a process.
        """
        schedule = keras.optimizers.schedules.LearningRateSchedule
        own = (owner for owner in self.objects if not is_of_keras(type(owner)))
        return [owner for owner in own if not isinstance(owner, schedule)]

    @property
    def models_and_optimizers(self) -> list[Any]:
        """The objects to which Keras gives a strategy."""
        kinds = (keras.Model, keras.optimizers.Optimizer)
        return [owner for owner in self.objects if isinstance(owner, kinds)]

    def named(self) -> dict[str, Any]:
        """Returns every `tf.Variable` once, by a unique name that a user understands."""
        named: dict[str, Any] = {}
        ids: set[int] = set()
        pairs = [(v.path, tf_variable_of(v)) for v in self.variables]
        pairs += [(holder.name, holder.variable) for holder in self.holders]
        for name, variable in pairs:
            if variable is None or id(variable) in ids:
                continue
            ids.add(id(variable))
            unique, count = name, 1
            while unique in named:
                count += 1
                unique = f"{name} ({count})"
            named[unique] = variable
        return named


def find(*roots: Any) -> State:
    """Returns the variables in the given objects, and in everything that these hold."""
    return _Search().run(roots)


class _Search:
    """A depth-first search for variables, with a stack of its own instead of recursion."""

    def __init__(self) -> None:
        self.state = State()
        # The dict keeps the objects alive, so that Python uses no id again.
        self._seen: dict[int, Any] = {}
        self._stack: list[tuple[Any, str, Callable[[Any], None]]] = []

    def run(self, roots: Sequence[Any]) -> State:
        """Searches from the given objects, and returns what was found."""
        self._add([(root, type(root).__name__, _not_replaceable) for root in roots])
        while self._stack:
            self._look(*self._stack.pop())
        return self.state

    def _look(self, value: Any, name: str, put: Callable[[Any], None]) -> None:
        """Looks at one object, which is in a place with a name and a `put`."""
        if type(value) in weakref.ProxyTypes:
            return
        if isinstance(value, keras.Variable):
            if not self._is_known(value):
                self.state.places.append((name, value))
        elif isinstance(value, tf.Variable):
            # Every place of a variable is noted, because all places must get the new variable.
            self.state.holders.append(VariableHolder(name, value, put))
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            if not self._is_known(value):
                self._look_into(value, name, put)
        elif isinstance(value, types.FunctionType):
            if not _is_of_library(value.__module__) and not self._is_known(value):
                self._look_at_function(value)
        elif isinstance(value, types.MethodType):
            self._add([(value.__self__, name, put), (value.__func__, name, put)])
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            self._add([(part, name, _not_replaceable) for part in parts])
        # A `tf.function` holds the user's function in this attribute.
        elif hasattr(type(value), "python_function") and not self._is_known(value):
            self._add([(value.python_function, name, put)])
        elif _has_state(value) and not self._is_known(value):
            self._look_at_object(value)

    def _is_known(self, value: Any) -> bool:
        """Returns whether the search has seen an object before, and marks it as seen."""
        is_known = id(value) in self._seen
        self._seen[id(value)] = value
        return is_known

    def _add(self, places: Sequence[tuple[Any, str, Callable[[Any], None]]]) -> None:
        """Adds objects with their places to the stack, so that the first of them comes next."""
        self._stack += places[::-1]

    def _look_into(self, container: Any, name: str, put: Callable[[Any], None]) -> None:
        """Adds the items of a container to the stack."""
        first = next(iter(container), None)
        # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
        is_data = issubclass(type(first), (int, float, str, bytes, np.ndarray, np.generic))
        if isinstance(container, Mapping):
            pairs = list(container.items())
            places = [(v, f"{name}[{key_in_words(k)}]", _putter(container, k)) for k, v in pairs]
        elif len(container) > _SHORT_LIST and is_data:
            return
        elif isinstance(container, tuple):
            putters = enumerate(_tuple_putters(container, put))
            places = [(container[i], f"{name}[{i}]", put_item) for i, put_item in putters]
        elif isinstance(container, list):
            places = [(v, f"{name}[{i}]", _putter(container, i)) for i, v in enumerate(container)]
        else:
            places = [(v, name, _not_replaceable) for v in list(container)]
        self._add(places)

    def _look_at_function(self, function: types.FunctionType) -> None:
        """Adds what a function of the user's own takes from its closure and its globals."""
        self.state.functions.append(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places: list[Any] = []
        for name, cell in cells:
            # An empty cell raises ValueError.
            with contextlib.suppress(ValueError):
                places.append((cell.cell_contents, name, _cell_putter(cell)))
        for name, value, namespace in _globals_of(function):
            if _may_be_used_by_a_step(value):
                places.append((value, name, _putter(namespace, name)))
        self._add(places)

    def _look_at_object(self, owner: Any) -> None:
        """Notes an object, and adds its attributes and the user's methods."""
        self.state.objects.append(owner)
        places: list[tuple[Any, str, Callable[[Any], None]]] = [
            (value, f"{name} of {type(owner).__name__}", functools.partial(set_value, owner, name))
            for name, value in attributes_of(owner)
            if name != trainer_state.ATTRIBUTE
        ]
        places += [(method, name, _not_replaceable) for name, method in methods_of_user(owner)]
        self._add(places)


def key_in_words(key: Any) -> str:
    """Returns a key of a dict for a name. The `repr` of a user's object may read its variables."""
    return repr(key) if isinstance(key, (str, int, float, bool)) else type(key).__name__


def methods_of_user(owner: Any) -> list[tuple[str, Any]]:
    """Returns the names and functions of the methods that no class of a library defines.

    The function of a property, and of a method of the class, counts, too.
    """
    return methods_of_class(type(owner))


def methods_of_class(cls: type) -> list[tuple[str, Any]]:
    """Returns what `methods_of_user` returns for an object of a class."""
    classes = [part for part in cls.__mro__ if not _is_of_library(part.__module__)]
    members = [(n, function_behind(v)) for part in classes for n, v in vars(part).items()]
    return [(name, function) for name, function in members if callable(function)]


def function_behind(member: Any) -> Any:
    """Returns the function of a property, or of a method of the class; else the member itself."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@functools.cache
def globals_in(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that a function and the functions inside it read."""
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    return [*dict.fromkeys([*names, *(name for part in inside for name in globals_in(part))])]


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the globals and attributes that a function, and the functions in it, name.

    A function that calls `getattr` or `vars` may give the name as a text.
    """
    inside = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inside)) | texts_in(code)


def texts_in(code: types.CodeType) -> frozenset[str]:
    """Returns the texts in a code, and in the functions inside it, if it calls `getattr` or `vars`.

    They are names of attributes, or parts of names: `getattr(self, f"rate_{kind}")` has `rate_`.
    """
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    names = frozenset(code.co_names).union(*(part.co_names for part in inside))
    texts = frozenset[str]().union(*map(texts_in, inside))
    if names & {"getattr", "hasattr", "vars", "__dict__", "attrgetter"}:
        constants = [c if isinstance(c, (tuple, frozenset)) else (c,) for c in code.co_consts]
        texts |= {text for some in constants for text in some if isinstance(text, str)}
    return texts


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the globals that a function names: each one's name, value and namespace.

    Of a module of the user's own these are the values that the function names.
    """
    for name in globals_in(function.__code__):
        value = function.__globals__.get(name)
        yield name, value, function.__globals__
        if is_module_of_user(value):
            of_module = vars(value)
            for part in names_in(function.__code__) & of_module.keys():
                yield part, of_module[part], of_module


def _may_be_used_by_a_step(value: Any) -> bool:
    """Returns whether to look at a global value: a variable, a part of Keras, or a user's function.

    A short list, tuple or dict may hold variables and parts of Keras.
    """
    kinds = (keras.Variable, tf.Variable, *_OF_KERAS)
    # A `tf.function` holds the user's function in this attribute.
    is_compiled = hasattr(type(value), "python_function")
    function = value.python_function if is_compiled else value
    if isinstance(function, types.FunctionType):
        return not is_of_library(function.__code__.co_filename)
    if isinstance(value, (list, tuple, dict)) and len(value) <= _SHORT_LIST:
        items = value.values() if isinstance(value, dict) else value
        return any(issubclass(type(item), kinds) for item in items)
    return issubclass(type(value), kinds)


def _is_of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def has_attributes(value: Any) -> bool:
    """Returns whether an object has a `__dict__` or `__slots__`, without running its code."""
    return type(value).__dictoffset__ != 0 or bool(slots_of(value))


def _has_state(value: Any) -> bool:
    """Returns whether an object may hold variables: one of Keras, or one of a user's class."""
    if isinstance(value, (type, types.ModuleType)) or not has_attributes(value):
        return False
    return isinstance(value, _OF_KERAS) or not _is_of_library(type(value).__module__)


def _not_replaceable(value: Any) -> None:
    """Raises ModelError, as the `put` of a place whose value cannot be replaced."""
    raise ModelError(
        "a tf.Variable is kept where it cannot be replaced (in a set, or as an argument that a "
        "functools.partial holds). Keep it as an attribute of the model."
    )


def _putter(container: Any, key: Any) -> Callable[[Any], None]:
    """Returns a `put` for an item, which bypasses Keras' and TensorFlow's tracking containers."""

    def put(value: Any) -> None:
        if isinstance(container, list):
            list.__setitem__(container, key, value)
        elif isinstance(container, dict):
            dict.__setitem__(container, key, value)
        else:
            container[key] = value

    return put


def _tuple_putters(container: Any, put: Callable[[Any], None]) -> list[Callable[[Any], None]]:
    """Returns a `put` for each item of a tuple, which puts a new tuple into the tuple's place."""
    items = list(container)

    def put_item(index: int, value: Any) -> None:
        items[index] = value
        kind = type(container)
        put(kind(*items) if hasattr(container, "_fields") else kind(items))

    return [functools.partial(put_item, index) for index in range(len(items))]


def _cell_putter(cell: types.CellType) -> Callable[[Any], None]:
    """Returns a `put` for a variable in the closure of a function."""

    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def components(variable: tf.Variable) -> list[tf.Variable]:
    """Returns one plain variable for each local replica of a variable."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def values_of(state: State) -> dict[str, list[np.ndarray]]:
    """Returns the value of every variable on each local replica, by name, in arrays to read.

    On CPUs an array shares its memory with the variable until the variable gets a new value. This
    is not a collective.
    """
    return {
        name: [value_of(part) for part in components(variable)]
        for name, variable in state.named().items()
    }


def value_of(variable: tf.Variable) -> np.ndarray:
    """Returns the present value of a variable, in an array to read."""
    # Reading the variable itself would copy it.
    return array_of(variable.read_value())


def set_values(state: State, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Sets every variable to the values that `values_of` returned, to the bit.

    This is not a collective.
    """
    for name, variable in state.named().items():
        for part, value in zip(components(variable), values.get(name, ()), strict=False):
            part.assign(value)


@contextlib.contextmanager
def without_strategy(device: str | None) -> Iterator[None]:
    """Leaves every strategy's scope inside the context, and runs operations at once.

    A strategy's scope belongs to the default graph, so it does not reach another graph. TensorFlow
    does not allow entering the scope of the default strategy within another scope. The operations
    run on `device`; None leaves it to TensorFlow.
    """
    with tf.Graph().as_default(), eager_mode(), tf.device(device):
        yield


@contextlib.contextmanager
def on_one_device(state: State, device: str | None = None) -> Iterator[Mapping[int, tf.Variable]]:
    """Replaces all variables inside the context by plain ones on one device.

    The plain variables begin with the values of this process' first replica. Models and optimizers
    belong to no strategy inside. Afterwards the model has its original variables again, with their
    values. A `device` of None leaves it to TensorFlow.

    Yields:
        Each plain variable, by the id of the `tf.Variable` that it replaces.
    """
    original = [(v, tf_variable_of(v)) for v in state.variables]
    original = [(v, tf_variable) for v, tf_variable in original if tf_variable is not None]
    strategies = [(owner, strategy_of(owner)) for owner in state.models_and_optimizers]
    with without_strategy(device):
        plain: dict[int, tf.Variable] = {}
        keys = variable_keys(state.optimizers, state.variables)
        exchanged: list[Any] = []
        try:
            for variable, tf_variable in original:
                if id(tf_variable) not in plain:
                    plain[id(tf_variable)] = _plain(tf_variable, variable)
                set_tf_variable(variable, plain[id(tf_variable)])
            for holder in state.holders:
                if id(holder.variable) not in plain:
                    plain[id(holder.variable)] = _plain(holder.variable, holder.variable)
                holder.put(plain[id(holder.variable)])
            for owner, _ in strategies:
                set_strategy(owner, None)
            exchanged = exchange_keys(state.optimizers, keys)
            yield plain
        finally:
            for variable, tf_variable in original:
                set_tf_variable(variable, tf_variable)
            for holder in state.holders:
                holder.put(holder.variable)
            for owner, strategy in strategies:
                set_strategy(owner, strategy)
            restore_keys(exchanged)


def _plain(variable: tf.Variable, like: Any) -> tf.Variable:
    """Returns a plain variable with the name and the value of the first local replica's.

    `like` tells `trainable`. An optimizer of the user's own may look for "bias" in the name.
    """
    value = value_of(components(variable)[0])
    trainable = bool(getattr(like, "trainable", False))
    name = variable.name.partition(":")[0]
    return tf.Variable(value, dtype=variable.dtype, trainable=trainable, name=name)


def enter(model: keras.Model) -> None:
    """Moves a model into the strategy of this process, if it was made outside every scope.

    That strategy is the one whose scope is entered, or the one that `make_strategy` has made. A
    model that has a strategy keeps it. Variables that were made outside the scope of the model's
    strategy are re-created inside it. Every worker calls this function.

    Raises:
        ClusterError: the environment names several workers, but this process has made no strategy.
        ModelError: a variable was made in the scope of another strategy.
    """
    strategy = strategy_of(model)
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None:
        strategy = strategies.made()
    if strategy is not None:
        adopt(model, strategy)
    elif not strategies.is_alone():
        environment = described(os.environ)
        is_evaluator = environment and getattr(environment.job, "is_evaluator", False)
        if environment is not None and environment.job.size > 1 and not is_evaluator:
            name = "TF_CONFIG" if environment.name == "tf_config" else environment.name
            raise ClusterError(
                f"{name} names {environment.job.size} workers, but this process has made no "
                "strategy, so each worker would train alone. Call 'strategy = "
                "tfmulti.make_strategy()' first, before any other TensorFlow operation."
            )
        _warn_of_unused_devices()


@functools.cache
def _warn_of_unused_devices() -> None:
    """Warns once if a model without a strategy trains on one of several devices.

    The user may have made a strategy by tf.distribute, and nothing in its scope.
    """
    devices = tf.config.get_visible_devices("GPU") or tf.config.get_visible_devices("CPU")
    count = sum(len(tf.config.get_logical_device_configuration(d) or [d]) for d in devices)
    if count > 1:
        warnings.warn(
            f"the model trains on one of {count} devices, because it is in the scope of no "
            f"strategy. {SCOPE_ADVICE} make_strategy('one_device') says that one is enough.",
            stacklevel=4,
        )


def adopt(model: keras.Model, strategy: tf.distribute.Strategy) -> int:
    """Moves a model into a strategy, and returns how many variables were re-created there.

    Variables of the model, its optimizers and its metrics that were made outside the strategy's
    scope are re-created inside it, with their values. Every worker calls this function: with
    several workers a new variable gets the chief's value. If all variables are in the scope, no
    variable changes.

    Raises:
        ModelError: a variable was made in the scope of another strategy.
    """
    state = find(model)
    for owner in state.models_and_optimizers:
        if strategy_of(owner) is not strategy:
            set_strategy(owner, strategy)
    created = strategy.extended.variable_created_in_scope
    outside = [
        v for v in state.variables if (old := tf_variable_of(v)) is not None and not created(old)
    ]
    holders = [holder for holder in state.holders if not created(holder.variable)]
    if not outside and not holders:
        return 0
    _check_plain([*map(tf_variable_of, outside), *(holder.variable for holder in holders)])
    placement = placement_of(strategy)
    keys = variable_keys(state.optimizers, state.variables)
    with strategy.scope():
        new: dict[int, tf.Variable] = {}
        for variable in outside:
            old = tf_variable_of(variable)
            if id(old) not in new:
                new[id(old)] = _in_scope(variable, array_of(old), placement)
            set_tf_variable(variable, new[id(old)])
        for holder in holders:
            old = holder.variable
            if id(old) not in new:
                new[id(old)] = tf.Variable(
                    array_of(old),
                    dtype=old.dtype,
                    trainable=old.trainable,
                    synchronization=old.synchronization,
                    aggregation=old.aggregation,
                )
            holder.put(new[id(old)])
    exchange_keys(state.optimizers, keys)
    return len(new)


def _in_scope(variable: Any, value: np.ndarray, placement: Placement) -> tf.Variable:
    """Returns a new `tf.Variable` for a Keras variable, in the current scope."""
    new = new_tf_variable(variable, value)
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        # The replicas' parts are added up, so only the first replica may hold the value.
        for local, part in enumerate(components(new)):
            if placement.first_replica + local:
                part.assign(np.zeros_like(value))
    return new


def _check_plain(variables: Sequence[Any]) -> None:
    """Raises ModelError if a variable was made in the scope of a strategy."""
    for variable in variables:
        if isinstance(variable, tf.distribute.DistributedValues):
            raise ModelError(
                f"the variable {variable.name!r} was made in the scope of another strategy than "
                f"the model's. {SCOPE_ADVICE}"
            )
