"""One step on all local replicas: how it gets a batch, and how each replica computes its slice.

Of a global batch with n rows, replica r gets n_r rows, and runs the model's own `train_step` on
them as one device would. Its gradient is that of the mean over its rows. When the step calls the
optimizer, the gradients are summed over the replicas, weighted by rows
(`distribution.replica_context.reduce_gradients`):

    gradient = Σ_r (n_r / n) · gradient_r

This is the gradient of the mean over the global batch. A replica without rows computes one row that
does not count, because layers need at least one. Its weight is 0, and its parts of metrics
stay as they were.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import (
    collectives,
    python_attributes,
    replica_context,
    row_labels,
)
from tfmulti.distribution.custom_gradients import operations_in
from tfmulti.distribution.python_attributes import Attributes
from tfmulti.distribution.replica_slice import ReplicaSlice, computing, current
from tfmulti.distribution.strategies import Placement, placement_of, run_on_replicas
from tfmulti.errors import ModelError
from tfmulti.keras_patches import layers
from tfmulti.keras_patches.model_structure import all_metric_variables, has_own_step
from tfmulti.keras_patches.random_numbers import share_generator
from tfmulti.keras_patches.tracing import by_autograph
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.input.worker_batch import (
    BatchQueue,
    IndexQueue,
    WorkerBatch,
    unknown_rows_explained,
)
from tfmulti.training.state import model_search, relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step import microbatches, whole_batch, xla
from tfmulti.training.step.python_effects import PythonEffects
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.step.step_result import first_local

# The operations of `tf.print`, `tf.summary`, `tf.io.write_file`, `tf.lookup` and `tf.queue`.
_WRITES = re.compile(
    r"Print(V2)?|Write\w*Summary|WriteFile|LookupTable(Insert|Remove)V2|QueueEnqueue(Many)?V2"
)


def without_autograph(function: Callable[..., Any]) -> Any:
    """Returns a function of tfmulti as a `tf.function` without AutoGraph.

    tfmulti's functions need no AutoGraph, which would take about a second to read those that the
    first step calls.
    """
    function = tf.autograph.experimental.do_not_convert(function)
    return tf.function(function, reduce_retracing=True)


def step_of(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """Returns a model's step function: `train_step`, `test_step` or `predict_step`.

    A `@tf.function` around the step is removed, because replicas cannot reduce inside it. AutoGraph
    then converts the step, as that `@tf.function` would. Keras converts no other step.
    """
    step: Callable[[Any], Any] = getattr(model, name)
    inside = getattr(step, "python_function", None)
    if inside is None:
        return step
    return inside if model.run_eagerly else by_autograph(inside)


def next_batch(source: Any, placement: Placement) -> WorkerBatch:
    """Returns the next `WorkerBatch` of a source.

    A source of global batches gives this worker's rows of the next one, which stay on the host.

    Args:
        source: a queue, an iterator of global batches, a `WorkerBatch`, or an Optional of a batch.
        placement: this process' place among the workers.
    """
    if isinstance(source, WorkerBatch):
        return source
    if isinstance(source, (BatchQueue, IndexQueue)):
        return source.take()
    element: Any = source if isinstance(source, tf.experimental.Optional) else next(source)
    is_optional = isinstance(element, tf.experimental.Optional)
    with tf.device("CPU:0"):
        batch: WorkerBatch = from_batch(element.get_value() if is_optional else element, placement)
    return batch


def taking_agreed_rows(model: keras.Model) -> Callable[[Any], WorkerBatch] | None:
    """Returns a function that takes a batch with corrected row numbers, or None if not needed.

    With `skip_bad_records` each worker leaves out the examples that it cannot read. So no worker
    knows how many rows the others have. The workers exchange these numbers in one small collective
    for each step.
    """
    strategy = model.distribute_strategy
    placement = placement_of(strategy)
    if not state_of(model).reading.skips_bad or placement.workers == 1:
        return None
    local = range(placement.first_replica, placement.first_replica + placement.local_replicas)

    def next_agreed_batch(source: Any) -> WorkerBatch:
        batch = next_batch(source, placement)

        def rows_of_all() -> tf.Tensor:
            replica = placement.first_replica + replica_context.local_index(
                placement.local_replicas
            )
            rows = tf.cast(batch.own_rows[replica - placement.first_replica], tf.int32)
            own_counts = tf.one_hot(replica, placement.replicas, rows, 0, dtype=tf.int32)
            return replica_context.sum_by_dtype([own_counts])[0]

        counts = tf.cast(first_local(strategy, strategy.run(rows_of_all)), tf.int64)
        ends, rows = tf.cumsum(counts), tf.reduce_sum(counts)
        first_rows = tf.minimum(ends - counts, tf.maximum(rows - 1, 0))
        local_first_rows = tuple(first_rows[replica] for replica in local)
        return batch._replace(first_rows=local_first_rows, rows=rows)

    return next_agreed_batch


def slice_in_step(
    batch: WorkerBatch, local: int, model: keras.Model, seeds: Any, name: str
) -> ReplicaSlice:
    """Returns a local replica's slice in a step such as `train_step`.

    Its `note_unknown` stores in the state of the model why values may differ.
    """
    state = state_of(model)

    def note_unknown(reason: str) -> None:
        needs_rows = name == "train_step" or state.options.verify is False
        if needs_rows and row_labels.is_of_condition(reason):
            # A comparison of the first steps is not enough, since the condition may take another
            # branch in a later one.
            raise ModelError(
                f"the {name} uses a value of {reason}, a condition on tensors that reads "
                "variables. Its predicate or a branch depends on the rows of all replicas. Compute "
                "both values outside of tf.cond, and choose one by tf.where."
            )
        note(reason)

    def note(reason: str) -> None:
        state.traced.unknown.setdefault(name, {}).setdefault(reason)

    def note_trusted(reason: str) -> None:
        if has_own_step(model, name) or layers.has_own_layers(model):
            (note if name == "train_step" else note_unknown)(reason)

    def note_assigned(variable: Any, is_equal: bool) -> None:
        if not model.run_eagerly:
            known = state.traced.equal_on_replicas
            known[id(variable)] = is_equal and known.get(id(variable), True)

    is_alone = placement_of(model.distribute_strategy).replicas == 1

    def note_addend(rows: set[int]) -> None:
        # Plain Keras, too, traces `fit` and `evaluate` without a number of rows that may vary.
        if not is_alone or name == "predict_step":
            state.traced.addends.setdefault(name, set()).update(rows)

    replica_slice = batch.slice_of(
        local,
        alone=is_alone,
        sync_batch_norm=state.options.sync_batch_norm,
    )
    return replica_slice._replace(
        seeds=seeds,
        note_unknown=note_unknown,
        note_trusted=note_trusted,
        note_assigned=note_assigned,
        note_addend=note_addend,
        note_gather=lambda: state.traced.gathers.add(name),
    )


def make_step(
    model: keras.Model, seeds: Any, logs: StepLogs | None, *, training: bool
) -> Callable[[WorkerBatch], Any]:
    """Returns a function that runs one step of a `WorkerBatch` on all local replicas.

    Args:
        model: the prepared model.
        seeds: the generator for draws without a seed, or None for Keras' own.
        logs: takes the logs that the model's step returns; None leaves them as they are.
        training: whether the step is `train_step` or `test_step`.

    Returns:
        A function whose result has, for each local replica, the step's logs and the values of the
        metrics' variables.
    """
    strategy = model.distribute_strategy
    placement, state = placement_of(strategy), state_of(model)
    passes = state.options.microbatches if training else 1
    has_labels = (placement.replicas > 1 or passes > 1) and not model.run_eagerly
    name = "train_step" if training else "test_step"
    step = step_of(model, name)

    def results_of(data: Any) -> Any:
        """Returns what the step returns for the rows of the current slice, as `logs` takes it."""
        replica_slice = current()
        assert replica_slice is not None
        python_attributes.restore(replica_slice.attributes)
        if not replica_slice.is_whole:
            row_labels.begin(data, all_metric_variables(model))
        if logs is None:
            return step(data)
        with logs.recorded():
            with unknown_rows_explained(are_unknown=has_labels):
                found = step(data)
            if not replica_slice.is_whole and not model.run_eagerly:
                _note_python_functions(replica_slice)
            return logs.taken(found, replica_slice)

    compiled = xla.xla_compiled(model, results_of, name)
    traces: list[Attributes] = []

    def compute(data: Any, replica_slice: ReplicaSlice) -> Any:
        # Where the number of rows is known when the step is traced, every replica has rows. Where
        # labels are used, `keras_patches.metrics` keeps the old part at each assignment.
        has_rows = replica_slice.read_rows is not None and not model.run_eagerly
        may_be_empty = not replica_slice.is_whole or state.reading.skips_bad
        must_restore = may_be_empty and not (has_labels or has_rows)
        variables = replica_context.metric_variables(model) if must_restore else []
        before = [tf.identity(v.value) for v in variables]
        with computing(replica_slice):
            results = compiled(data)
        for variable, value in zip(variables, before, strict=True):
            counts = replica_slice.own_rows > 0
            variable.assign(tf.where(counts, tf.convert_to_tensor(variable.value), value))
        return results

    def replica_step(batch: WorkerBatch, states: dict[int, str], attributes: Attributes) -> Any:
        batch = batch.of_any_rows() if has_labels else batch
        local = replica_context.local_index(placement.local_replicas)
        replica_slice = slice_in_step(batch, local, model, seeds, name)._replace(
            model=model, states=states, attributes=attributes
        )
        with collectives.serving("step", placement):
            if whole_batch.is_used(model, name):
                results = whole_batch.computed(model, compiled, batch.data[local], replica_slice)
            elif passes == 1:
                results = compute(batch.data[local], replica_slice)
            else:
                results = microbatches.run(model, compute, batch.data[local], replica_slice, passes)
            # The metrics' values are read here, so they wait for no update of the weights. Their
            # sums travel between workers meanwhile.
            metrics = [tf.identity(v.value) for v in replica_context.metric_variables(model)]
            return collectives.begun((results, metrics))

    def one_step(batch: WorkerBatch) -> Any:
        if logs is not None:
            logs.begin()
        found = found_in(model)
        states = states_in(model, found) if has_labels else {}
        effects = PythonEffects(model, name, found)

        def with_same_draws() -> Any:
            effects.begin_replica()
            return replica_step(batch, states, effects.attributes)

        with effects.explained():
            if training:
                results = run_on_replicas(strategy, with_same_draws)
            else:
                results = whole_batch.traced(
                    model, name, lambda: run_on_replicas(strategy, with_same_draws)
                )
        if logs is not None:
            effects.end(traces)
            warn_of_outputs(model, name)
        share_generator(seeds, is_traced_again=effects.has_any)
        return results

    return one_step if model.run_eagerly else without_autograph(one_step)


def found_in(model: keras.Model) -> model_search.State:
    """Returns the variables and objects of a model, for a step that is to run or to be traced.

    The search takes 50 ms for 300 layers. An eager step needs no result if it runs once.
    """
    is_alone = placement_of(model.distribute_strategy).local_replicas == 1
    runs_once = is_alone and state_of(model).options.microbatches == 1
    return model_search.State() if model.run_eagerly and runs_once else model_search.find(model)


def states_in(model: keras.Model, found: model_search.State) -> dict[int, str]:
    """Returns the kind of each variable that the user's own code may change, by its id."""
    # The user may also hold variables that are plain `tf.Variable`s.
    held = [holder.variable for holder in found.holders]
    copies = [copy for variable in held for copy in relocation.components(variable)]
    losses = (owner for owner in found.objects if isinstance(owner, keras.losses.Loss))
    of_losses = [v for loss in losses for v in vars(loss).values() if isinstance(v, keras.Variable)]
    others = {id(variable): "other" for variable in found.variables}
    states = {id(variable): "layer" for variable in (*held, *copies, *of_losses)}
    return others | layers.states_of_its_own(model) | states


def _note_python_functions(replica_slice: ReplicaSlice) -> None:
    """Notes a Python function of the user's own in the step that is being traced.

    Each replica calls it with its own rows, and so does each pass of a step. It may keep values of
    its own, such as a list of labels, that no tensor depends on.
    """
    for op in _operations():
        is_own = not any(name in op.name for name in (collectives.SEND, collectives.RECEIVE))
        if op.type in row_labels.PYTHON_FUNCTIONS and is_own:
            replica_slice.note_unknown(f"the Python function {op.name!r} ({op.type})")
            return


def _operations() -> Iterator[tf.Operation]:
    """Yields the operations of the step that is being traced, with its conditions and loops."""
    for op in tf.compat.v1.get_default_graph().get_operations():
        yield from operations_in(op)


def warn_of_outputs(model: keras.Model, step: str) -> None:
    """Warns once on the chief if a step that was just traced prints or writes on each replica.

    Args:
        model: the prepared model.
        step: such as `train_step`.
    """
    placement, state = placement_of(model.distribute_strategy), state_of(model)
    is_told = model.run_eagerly or f"{step} writes" in state.told
    if placement.replicas == 1 or not placement.is_chief or is_told:
        return
    for op in _operations():
        if _WRITES.fullmatch(op.type):
            state.told.add(f"{step} writes")
            warnings.warn(
                f"the {step} prints, or writes to a file, a table or a queue ({op.type}): each of "
                f"{placement.replicas} replicas does so with its own rows, and so does a "
                "comparison with one device. Return the value as a log, or keep it in a variable.",
                stacklevel=2,
            )
            return


def warn_of_unknown(model: keras.Model, step: str) -> None:
    """Warns on the chief if some values of a step may differ from those of one device.

    There is no warning while the first steps are compared with one device. A comparison does not
    settle a value for ever, because its code may have no effect in the first steps, or may do
    something else in a later one. The warning names the first reason that was noted while the step
    was traced, or the first one that was not compared. All noted reasons are then forgotten, so
    that they give one warning only.
    """
    traced = state_of(model).traced
    if not traced.unknown.get(step) or traced.is_compared_now:
        return
    compared = traced.compared if step == "train_step" else set()
    unknown = traced.unknown.pop(step)
    if not placement_of(model.distribute_strategy).is_chief:
        return
    reason = next((reason for reason in unknown if reason not in compared), next(iter(unknown)))
    advice = "Compare the first step with one device: prepare(model, verify=True)."
    if reason in compared:
        advice = (
            "verify has compared the first steps only, which have the same numbers. Compare more "
            "of them: prepare(model, verify_steps=10)."
        )
    elif step != "train_step":
        advice = "Leave verify=False out, so that each replica computes the whole batch."
    warnings.warn(
        f"it is not known whether values of the {step} are those of one device: they depend on "
        f"{reason}. {advice}",
        stacklevel=4,
    )


def warn_of_addends(model: keras.Model, step: str, rows: Any, steps: int = 1) -> None:
    """Warns once on the chief if plain Keras takes a number for each row for a bias.

    Args:
        model: the prepared model.
        step: such as `train_step`.
        rows: the rows of the global batches that were computed.
        steps: the number of these batches.
    """
    state = state_of(model)
    addends = state.traced.addends.get(step)
    if not addends or "addends" in state.told:
        return
    rows_of_batch = int(rows) // steps
    if rows_of_batch not in addends:
        return
    state.told.add("addends")
    if placement_of(model.distribute_strategy).is_chief:
        warnings.warn(
            f"the {step} adds a number to each row by keras.ops.add or a layer. The batch has "
            f"{rows_of_batch} rows, and the other addend as many entries on an axis. Plain "
            "Keras may take the numbers for a bias of this axis, which is wrong. Take another "
            "batch size.",
            stacklevel=4,
        )
