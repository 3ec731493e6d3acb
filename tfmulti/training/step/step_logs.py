"""The logs that a step returns: which of them are results of metrics, and what the others are.

A step may return any nest of dicts, as in Keras: tensors, Python numbers, results of metrics under
any name. Each replica holds its own part of a metric's state, so a log that is a metric's result is
computed anew from the summed states, once for all steps of a call. Any other log is made the value
of the global batch by `global_values`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti.distribution import global_values
from tfmulti.distribution.replica_slice import ReplicaSlice

Logs = dict[str, tf.Tensor]


class _Result(NamedTuple):
    """A metric's result in a step: the metric's place in `model.metrics`, and a key of its dict."""

    metric: int
    key: str | None


class StepLogs:
    """The logs of the train or test step of a model.

    Attributes:
        results: for each log that is a metric's result, whose.
        overrides: whether an epoch's logs are the metrics' results, as Keras has it where a step
            returns logs with just their names.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._seen: list[tuple[Any, _Result, int]] = []  # a value, whose, after how many updates
        # Each replica is traced in a thread of its own.
        self._updates: dict[tuple[int, int], int] = {}
        self._tracing = 0
        self.results: dict[str, _Result] = {}
        self.overrides = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, results of the model's metrics are noted. The replicas' threads may overlap."""
        metrics = list(self._model.metrics)
        if not self._tracing:
            self._seen = []
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
        def noting() -> Any:
            found = result()
            count = self._count(number)
            parts = found.items() if isinstance(found, Mapping) else [(None, found)]
            self._seen += [(value, _Result(number, key), count) for key, value in parts]
            return found

        return noting

    def _counting(self, number: int, update: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._updates[threading.get_ident(), number] = self._count(number) + 1
            return update(*args, **kwargs)

        return counting

    def _count(self, number: int) -> int:
        """Returns how often this thread has updated a metric."""
        return self._updates.get((threading.get_ident(), number), 0)

    def taken(self, logs: Any, share: ReplicaSlice) -> Logs:
        """Returns a step's logs by name; inside `recorded`, before the metrics change again.

        Those that are no metric's result are such that their mean over the replicas, by rows, is
        the value of one device.
        """
        self.overrides = isinstance(logs, Mapping) and set(logs) == set(
            self._model.get_metrics_result()
        )
        found = {}
        for name, value in flattened(logs).items():
            result = self._result_of(value)
            if result is None:
                self.results.pop(name, None)
                found[name] = global_values.averaged(share, tf.convert_to_tensor(value))
            else:
                self.results[name] = result
                found[name] = tf.zeros([])
        return found

    def _result_of(self, value: Any) -> _Result | None:
        for seen, result, count in reversed(self._seen):
            if seen is value and (tf.is_tensor(value) or isinstance(value, keras.Variable)):
                return result if self._count(result.metric) == count else None
        return None

    def final(self, means: Logs) -> tuple[Logs, Logs]:
        """Returns the logs of a step and those of an epoch that ends with it.

        The model's metrics must hold the states of all replicas.

        Args:
            means: for each name in the logs the mean over the replicas; not used for results.
        """
        metrics = list(self._model.metrics)
        computed = {number: metrics[number].result() for number in self._metrics_in_use()}

        def value(name: str) -> Any:
            result = self.results.get(name)
            if result is None:
                return means[name]
            found = computed[result.metric]
            # A metric may return its variable, which has the summed state here alone.
            return tf.convert_to_tensor(found if result.key is None else found[result.key])

        logs = {name: value(name) for name in means}
        if self.overrides and set(self.results) != set(logs):
            results = flattened(self._model.get_metrics_result())
            return logs, {name: tf.convert_to_tensor(v) for name, v in results.items()}
        return logs, logs

    def _metrics_in_use(self) -> list[int]:
        return sorted({result.metric for result in self.results.values()})


def flattened(logs: Any) -> dict[str, Any]:
    """Returns the values of nested dicts by their innermost names, as Keras' callbacks get them.

    >>> flattened({"loss": 2.0, "of_parts": {"a": 1, "b": 3}})
    {'loss': 2.0, 'a': 1, 'b': 3}
    """
    found: dict[str, Any] = {}
    for name, value in (logs or {}).items() if isinstance(logs, Mapping) else ():
        found.update(flattened(value) if isinstance(value, Mapping) else {name: value})
    return found
