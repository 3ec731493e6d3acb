"""The logs that a step returns, made those of one device.

A step may return nested dicts, as in Keras, with tensors, Python numbers, or results of metrics
under any name. Each replica has only its own part of a metric's state. So a log that is the result
of a metric is computed again from the summed states, once for all steps of a call. For any other
log, `global_values` computes the value of the global batch.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution import global_values
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.patching import is_of_keras

# The logs of a step by name. A log may be a dict of more logs.
Logs = dict[str, Any]
# One entry: the number of the trace (`StepLogs.begin`), and by name the logs that are averaged over
# the replicas.
Means = dict[int, dict[str, tf.Tensor]]


class _Result(NamedTuple):
    """A metric's result in a step.

    Attributes:
        metric: the metric's index in `model.metrics`.
        key: the key in the dict that the metric returns, or None if it returns no dict.
    """

    metric: int
    key: str | None


class _Returned(NamedTuple):
    """What the trace of a step has shown about the logs that the step returns.

    Attributes:
        names: the dict that the step returns, with its innermost names in place of the values.
        results: for each log that is the result of a metric, that result, by the log's name.
        constants: for each log that is None or a text, that value, by the log's name.
    """

    names: dict[str, Any]
    results: dict[str, _Result]
    constants: dict[str, Any]


class StepLogs:
    """The logs of the train or test step of a model."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # Each value that a metric returned, the metric, and the number of its updates before.
        self._noted: list[tuple[Any, _Result, int]] = []
        # The updates by thread and metric, because each replica is traced in a thread of its own.
        self._updates: dict[tuple[int, int], int] = {}
        self._tracing = 0
        # By the number of the trace. A step may return other logs for data of another structure,
        # and the trace of an execution may call a step that was traced for an earlier structure.
        self._returned: list[_Returned | None] = []

    def begin(self) -> None:
        """Notes that a new trace of the step begins, or an eager step, on all local replicas."""
        self._noted, self._updates = [], {}
        if tf.executing_eagerly():
            # Nothing reads the logs of an earlier eager step.
            self._returned = []
        self._returned.append(None)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Notes the results of the model's metrics inside the context.

        The contexts of several replicas, each in a thread of its own, may overlap.
        """
        metrics = list(self._model.metrics)
        if not self._tracing:
            for number, metric in enumerate(metrics):
                vars(metric)["result"] = self._noting_result(number, metric.result)
                vars(metric)["update_state"] = self._counting(number, metric.update_state)
        self._tracing += 1
        try:
            yield
        finally:
            self._tracing -= 1
            if not self._tracing:
                for metric in metrics:
                    vars(metric).pop("result", None)
                    vars(metric).pop("update_state", None)

    def _noting_result(self, number: int, result: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a metric's `result` that notes what it returns."""

        def noting() -> Any:
            returned = result()
            count = self._count(number)
            parts = returned.items() if isinstance(returned, Mapping) else [(None, returned)]
            self._noted += [(value, _Result(number, key), count) for key, value in parts]
            return returned

        return noting

    def _counting(self, number: int, update: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a metric's `update_state` that counts its calls."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            self._updates[threading.get_ident(), number] = self._count(number) + 1
            return update(*args, **kwargs)

        return counting

    def _count(self, number: int) -> int:
        """Returns how often this thread has updated a metric."""
        return self._updates.get((threading.get_ident(), number), 0)

    def taken(self, logs: Any, replica_slice: ReplicaSlice) -> Means:
        """Returns a replica's logs of a step that are to be averaged over the replicas by rows.

        Call it inside `recorded`, before the metrics change again. `final` adds the other logs,
        which are results of metrics, texts or None.

        Raises:
            ModelError: a log is a text that the step computes from its inputs, or the step returns
                other logs on each replica.
        """
        flat = flattened(logs)
        results: dict[str, _Result] = {}
        constants: dict[str, Any] = {}
        means: dict[str, tf.Tensor] = {}
        for name, value in flat.items():
            result = self._result_of(value)
            if value is None or tf.convert_to_tensor(value).dtype == tf.string:
                constants[name] = _constant(name, value)
            elif result is None:
                means[name] = global_values.averaged(replica_slice, tf.convert_to_tensor(value))
                shape, is_first = means[name].shape, self._returned[-1] is None
                if is_first and shape.rank and not shape.is_fully_defined():
                    self._warn_of_rows(name)
            else:
                results[name] = result
        returned = _Returned(_with_values(logs, {name: name for name in flat}), results, constants)
        if self._returned[-1] not in (None, returned):
            self._refuse(returned)
        self._returned[-1] = returned
        return {len(self._returned) - 1: means}

    def _warn_of_rows(self, log: str) -> None:
        """Warns on the chief of a log of unknown size, of which `Summary` takes the mean."""
        if placement_of(self._model.distribute_strategy).is_chief:
            warnings.warn(
                f"the log {log!r} is no number, but has an unknown size, as a value for each row. "
                "Its mean is logged. Return the mean itself.",
                stacklevel=2,
            )

    def _refuse(self, returned: _Returned) -> NoReturn:
        """Raises the error that a replica has returned other logs than the one before."""

        def kind(log: str, of: _Returned | None) -> str:
            if of is None or log not in flattened(of.names):
                return "missing"
            if log in of.results:
                metric, key = of.results[log]
                part = "" if key is None else f" {key!r}"
                return f"the result{part} of {self._model.metrics[metric].name!r}"
            return repr(of.constants[log]) if log in of.constants else "a number"

        before = self._returned[-1]
        names = [name for each in (returned, before) if each for name in flattened(each.names)]
        kinds = ((log, kind(log, before), kind(log, returned)) for log in names)
        log, one, other = next(
            (each for each in kinds if each[1] != each[2]),
            (names[0], "in one dict", "in another dict"),
        )
        raise ModelError(
            f"the log {log!r} is {one} on one replica and {other} on another. Names and texts of "
            "logs must be the same on all replicas. Derive them from a number that is an attribute "
            "of the model."
        )

    def _result_of(self, value: Any) -> _Result | None:
        """Returns the metric's result that a value is, if the metric has not been updated since."""
        for noted, result, count in reversed(self._noted):
            if noted is value and (tf.is_tensor(value) or isinstance(value, keras.Variable)):
                return result if self._count(result.metric) == count else None
        return None

    def final(self, means: Means) -> tuple[Logs, Logs]:
        """Returns the logs of a step, and the logs of an epoch that ends with it.

        Both are nested as the step returned them, because Keras' callbacks take the order of the
        names from that. If a step returns logs with exactly the metrics' names, the logs of an
        epoch are the metrics' results, as in Keras. The variables of the model's metrics must hold
        the states of all replicas.

        Args:
            means: what `taken` returned, with the means over the replicas.
        """
        ((number, averaged),) = means.items()
        returned = self._returned[number]
        assert returned is not None
        metrics = list(self._model.metrics)
        in_use = sorted({result.metric for result in returned.results.values()})
        computed = {metric: metrics[metric].result() for metric in in_use}

        def value(result: _Result) -> Any:
            values = computed[result.metric]
            # A metric may return its variable, which has the summed state only inside this call.
            return tf.convert_to_tensor(values if result.key is None else values[result.key])

        results = {name: value(result) for name, result in returned.results.items()}
        constants = {
            name: None if value is None else tf.constant(value)
            for name, value in returned.constants.items()
        }
        by_name = averaged | results | constants
        logs = _with_values(returned.names, by_name)
        # One of the user's own is called at the end of an epoch, as in plain Keras.
        is_of_keras_alone = is_of_keras(type(self._model).get_metrics_result)
        if is_of_keras_alone and set(results) != set(by_name):
            of_metrics = self._model.get_metrics_result()
            if set(of_metrics) == set(returned.names):
                tensors = {n: tf.convert_to_tensor(v) for n, v in flattened(of_metrics).items()}
                return logs, _with_values(of_metrics, tensors)
        return logs, logs


def _constant(name: str, value: Any) -> Any:
    """Returns a log that is None or a text, which must be the same in each step."""
    if value is None:
        return None
    constant = tf.get_static_value(tf.convert_to_tensor(value))
    if constant is None:
        raise ModelError(
            f"the log {name!r} is a text that the step computes. Replicas can only return numbers "
            "and constant texts, so return a number."
        )
    # Lists can be compared, and arrays only element by element.
    return np.asarray(constant).tolist()


def _with_values(logs: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested logs, each with the value that `values` has for its innermost name."""
    return {
        name: _with_values(value, values) if isinstance(value, Mapping) else values[name]
        for name, value in (logs.items() if isinstance(logs, Mapping) else ())
    }


def flattened(logs: Any) -> dict[str, Any]:
    """Returns the values of nested dicts by their innermost names, as Keras' callbacks get them.

    Keras goes through the names of each dict in their order. So of two values with one innermost
    name the last one counts.

    >>> flattened({"parts": {"b": 3, "loss": 1}, "loss": 2.0})
    {'loss': 1, 'b': 3}
    """
    flat: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()) if isinstance(logs, Mapping) else ():
        flat.update(flattened(value) if isinstance(value, Mapping) else {name: value})
    return flat
