"""Compiles what `fit`, `evaluate` and `predict` call for each execution.

An execution takes one or several steps from an iterator and returns what all replicas
found, with one collective for all metrics together. The iterator yields global batches, of
which a step keeps its `Shards`: this worker's part, one share a local replica.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmulti import collectives, keras_compat, local_steps, microbatches, replicas, run_state
from tfmulti.launched import teller
from tfmulti.pipeline import from_batch
from tfmulti.shards import Ahead, ArrayOutlet, Outlet, Shards, on_devices, with_any_rows
from tfmulti.share import Share, computing
from tfmulti.stopping import state_of
from tfmulti.strategies import Placement

Logs = dict[str, tf.Tensor]


class Outcome(NamedTuple):
    """What an execution returns, the same on every worker.

    `logs` are the last step's logs over the global data. `votes` counts, for each reason to
    stop, the replicas whose worker has it; `digest_spread` is above 0 where workers read
    different batches. `rows` are the examples of all steps of the execution, `lost` those that
    could not be read, and `waited_s` the seconds that a replica waited for data, on average.
    """

    logs: Logs
    votes: tf.Tensor
    digest_spread: tf.Tensor
    rows: tf.Tensor
    lost: tf.Tensor
    waited_s: tf.Tensor


class Taken(NamedTuple):
    """What the steps of an execution took from their source, on this worker.

    `rows` has, for each local replica, the rows that count, and then those of all replicas.
    `free_since` is when the last step ended: the next one waits from then on.
    """

    rows: tuple[tf.Tensor, ...]
    lost: tf.Tensor
    waited_s: tf.Tensor
    free_since: tf.Tensor

    @classmethod
    def nothing(cls, placement: Placement) -> Taken:
        rows = tuple(tf.constant(0, tf.int64) for _ in range(placement.local_replicas + 1))
        return cls(rows, tf.constant(0, tf.int64), tf.constant(0, tf.float64), _now())

    def counted(self, shards: Shards) -> Taken:
        """Returns the same with the rows of a step."""
        more = (*shards.own_rows, shards.rows)
        rows = tuple(a + b for a, b in zip(self.rows, more, strict=True))
        return self._replace(rows=rows, lost=self.lost + shards.lost)

    def waited_for(self, came: tf.Tensor) -> Taken:
        """Returns the same when the next step's data has come, at a time."""
        return self._replace(waited_s=self.waited_s + tf.maximum(came - self.free_since, 0))

    def after(self, logs: Any) -> Taken:
        """Returns the same when a step has ended, with these logs."""
        # TensorFlow may take the next step's data while this one runs: that is no waiting. On a
        # GPU a step has ended when what it computes can be brought to the host.
        with tf.device("CPU:0"):
            done = [tf.identity(t) for t in tf.nest.flatten(logs, expand_composites=True)]
        with tf.control_dependencies(done):
            return self._replace(free_since=_now())


def _now() -> tf.Tensor:
    """Returns the time in seconds; 0 under op determinism, where TensorFlow tells none."""
    with tf.init_scope():  # asked now, not when the step runs
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return tf.constant(0, tf.float64)
    return tf.timestamp()


def _time_of(shards: Shards) -> tf.Tensor:
    """Returns the time at which a batch has come."""
    leaves = tf.nest.flatten(shards.data[0], expand_composites=True)
    data = [leaf for leaf in leaves if leaf is not None][:1]
    with tf.control_dependencies([shards.rows, *data]):  # their number may be known beforehand
        return _now()


Execution = Callable[[Any, int, Sequence[float]], Outcome]


def make_execution(model: keras.Model, placement: Placement, *, training: bool) -> Execution:
    """Returns `execute(source, steps, votes)` for training or for evaluation.

    `execute` runs `steps` steps from an outlet or an iterator of global batches, or one step on
    `Shards` or an Optional of a batch, and returns their `Outcome`; `votes` are this worker's.
    An iterator must have that many batches: a step that finds none would still do what needs
    no data, draw seeds and count itself.
    """
    strategy = model.distribute_strategy
    keras_compat.install()
    seeds = keras_compat.seeds_of_step(model, "training" if training else "evaluation")
    one_step = _make_step(model, placement, seeds, training=training)
    states = _Statistics(model, placement) if training else None
    outer = state_of(model).outer if training else None

    def taken_of(source: Any) -> Shards:
        return _taken(source, placement)

    take = _agreed(model, placement, taken_of)

    def outcome(shards: Shards, local: Any, votes: tf.Tensor, before: Any, taken: Taken) -> Outcome:
        def on_replica(local: Any, before: Any, weights: Any) -> Outcome:
            with collectives.serving("outcome", placement):
                logs, metrics = local
                return summed_up(logs, metrics, before, weights)

        def summed_up(logs: Any, metrics: list[tf.Tensor], before: Any, weights: Any) -> Outcome:
            local = replicas.local_index(placement.local_replicas)
            weight = tf.math.divide_no_nan(
                tf.cast(taken.rows[local], tf.float64), tf.cast(taken.rows[-1], tf.float64)
            )
            moved = states.moved(before, weight) if states else []
            found, moved = _outcome(model, logs, metrics, shards, local, votes, taken, moved)
            if states:
                states.set(before, moved)
            if outer:
                outer.step(weights, tf.cast(weight, tf.float32))
            return found

        args = (local, *before)
        found: Outcome = _first_local(strategy, strategy.run(on_replica, args=args))
        return found

    def now() -> Any:
        """Returns moving statistics and weights as they are before the steps."""
        return (states.now() if states else (), outer.now() if outer else ())

    def one(source: Any, votes: tf.Tensor) -> Outcome:
        before = now()
        taken = Taken.nothing(placement)
        shards = take(source)
        taken = taken.counted(shards).waited_for(_time_of(shards))
        return outcome(shards, one_step(shards), votes, before, taken)

    def one_and_next(source: Any, shards: Shards, votes: tf.Tensor) -> tuple[Outcome, Shards]:
        """Runs a step on a batch that is on the GPUs, and brings the next one there meanwhile."""
        before = now()
        taken = Taken.nothing(placement).counted(shards)
        following = on_devices(taken_of(source), placement.gpus)
        logs = one_step(shards)
        taken = taken.after(logs).waited_for(_time_of(following))
        return outcome(shards, logs, votes, before, taken), following

    def several(iterator: Any, steps: tf.Tensor, votes: tf.Tensor) -> Outcome:
        before = now()
        taken = Taken.nothing(placement)
        for _ in tf.range(steps - 1):
            shards = take(iterator)
            taken = taken.counted(shards).waited_for(_time_of(shards))
            taken = taken.after(one_step(shards))
        shards = take(iterator)
        taken = taken.counted(shards).waited_for(_time_of(shards))
        return outcome(shards, one_step(shards), votes, before, taken)

    if model.run_eagerly:
        one_compiled: Callable[..., Outcome] = one
        several_compiled: Any = several
    else:
        one_compiled = tf.function(one, reduce_retracing=True)
        several_compiled = tf.function(several, reduce_retracing=True)

    next_compiled = tf.function(one_and_next, reduce_retracing=True)
    first_compiled = tf.function(lambda outlet: on_devices(taken_of(outlet), placement.gpus))

    state = state_of(model)
    # A collective before the step (`_agreed`) may not run beside those of another one.
    one_step_each = local_steps.steps_at_once(model) == 1
    goes_ahead = take is taken_of and one_step_each and not model.run_eagerly
    may_gather = placement.replicas > 1 and outer is None and not model.run_eagerly

    def one_by_one(source: Any, steps: int, vote: tf.Tensor) -> Outcome:
        found = [one_compiled(source, vote) for _ in range(steps)]
        summed = ("rows", "lost", "waited_s")
        sums = {name: tf.add_n([getattr(each, name) for each in found]) for name in summed}
        return found[-1]._replace(**sums)

    def one_ahead(ahead: Ahead, vote: tf.Tensor) -> Outcome:
        held = first_compiled(ahead.outlet) if ahead.held is None else ahead.held
        if next_compiled.experimental_get_tracing_count() == 0:
            # Once for any number of rows, and not again for the last batch.
            next_compiled.get_concrete_function(ahead.outlet, with_any_rows(held), vote)
            run_state.restore_late(model)
        found: Outcome
        found, ahead.held = next_compiled(ahead.outlet, held, vote)
        return found

    def execute(source: Any, steps: int, votes: Sequence[float]) -> Outcome:
        vote = tf.constant(votes, tf.float32)
        if isinstance(source, Ahead):
            if goes_ahead:
                return one_ahead(source, vote)
            source = source.outlet
        if state.saved_variables and not model.run_eagerly:
            if steps == 1:
                _build_by(one_compiled, model, source, vote)
            else:
                _build_by(several_compiled, model, source, tf.constant(steps), vote)
        if steps == 1:
            return one_compiled(source, vote)
        count = tf.constant(steps)
        if may_gather and several_compiled.experimental_get_tracing_count() == 0:
            # Tells whether steps gather rows: a collective of one function takes one shape a
            # call, so batches of several sizes need calls of their own.
            several_compiled.get_concrete_function(source, count, vote)
        if may_gather and state.gathers:
            return one_by_one(source, steps, vote)
        found: Outcome = several_compiled(source, count, vote)
        return found

    return execute


def _build_by(function: Any, model: keras.Model, *inputs: Any) -> None:
    """Builds the layers that a step calls first, and gives them what was saved of them."""
    if function.experimental_get_tracing_count() == 0:
        function.get_concrete_function(*inputs)  # traces, and runs nothing
        run_state.restore_late(model)


def _taken(source: Any, placement: Placement) -> Shards:
    """Returns what a step takes; of a global batch it keeps this worker's rows, on the host."""
    if isinstance(source, Shards):
        return source
    if isinstance(source, (Outlet, ArrayOutlet)):
        return source.take()
    taken: Any = source if isinstance(source, tf.experimental.Optional) else next(source)
    batch = taken.get_value() if isinstance(taken, tf.experimental.Optional) else taken
    with tf.device("CPU:0"):
        shards: Shards = from_batch(batch, placement)
    return shards


def _agreed(
    model: keras.Model, placement: Placement, taken_of: Callable[[Any], Shards]
) -> Callable[[Any], Shards]:
    """Returns what takes `Shards` that say of all workers' rows how many there are.

    Where examples that cannot be read are left out, no worker knows how many rows the others
    have: they tell each other, by one small collective a step.
    """
    if not state_of(model).reading.skip_bad_records or placement.workers == 1:
        return taken_of
    strategy = model.distribute_strategy
    local = range(placement.first_replica, placement.first_replica + placement.local_replicas)

    def take(source: Any) -> Shards:
        shards = taken_of(source)

        def rows_of_all() -> tf.Tensor:
            replica = placement.first_replica + replicas.local_index(placement.local_replicas)
            own = shards.own_rows[replica - placement.first_replica]
            mine = tf.one_hot(
                replica, placement.replicas, tf.cast(own, tf.int32), 0, dtype=tf.int32
            )
            return replicas.sum_together([mine])[0]

        counts = tf.cast(_first_local(strategy, strategy.run(rows_of_all)), tf.int64)
        ends, rows = tf.cumsum(counts), tf.reduce_sum(counts)
        first_rows = tf.minimum(ends - counts, tf.maximum(rows - 1, 0))
        own = tuple(first_rows[replica] for replica in local)
        return shards._replace(first_rows=own, rows=rows)

    return take


def _make_step(
    model: keras.Model, placement: Placement, seeds: Any, *, training: bool
) -> Callable[[Shards], Any]:
    """Returns a function that runs one step on all local replicas and returns their logs."""
    strategy = model.distribute_strategy
    state = state_of(model)
    passes = state.microbatches if training else 1

    def compute(data: Any, share: Share) -> Any:
        step = model.train_step if training else model.test_step
        step = getattr(step, "python_function", step)  # of a @tf.function, which could not reduce
        fixed = share.read_rows is not None and not model.run_eagerly
        variables = [] if fixed or share.is_whole else replicas.metric_variables(model)
        before = [tf.identity(v.value) for v in variables]
        with computing(share):
            logs = step(data)
        for variable, value in zip(variables, before, strict=True):
            counts = share.own_rows > 0
            variable.assign(tf.where(counts, tf.convert_to_tensor(variable.value), value))
        return logs

    def replica_step(shards: Shards) -> Any:
        local = replicas.local_index(placement.local_replicas)
        alone, sync = placement.replicas == 1, state.sync_batch_norm
        apart = training and state.outer is not None
        share = shards.share(local, alone=alone, sync_batch_norm=sync, is_local=apart)
        share = share._replace(seeds=seeds, note_gather=lambda: setattr(state, "gathers", True))
        with collectives.serving("step", placement):
            if passes == 1:
                logs = compute(shards.data[local], share)
            else:
                logs = microbatches.run(model, compute, shards.data[local], share, passes)
        # Told here, the metrics wait for nothing else in the step: their sums are on the way
        # while the weights are updated.
        return logs, [tf.identity(v.value) for v in replicas.metric_variables(model)]

    def one_step(shards: Shards) -> Any:
        python = random.getstate()

        def alike(shards: Shards = shards) -> Any:
            random.setstate(python)  # AugMix draws by it, once, when a replica is traced
            return replica_step(shards)

        return strategy.run(alike)

    return one_step if model.run_eagerly else tf.function(one_step, reduce_retracing=True)


class _Statistics:
    """The moving statistics of a model's layers, averaged over the replicas by their rows.

    Each replica updates its own from its own rows. An execution ends with the same ones
    everywhere: those before it, moved by the mean of the replicas' moves. So what is
    evaluated or saved at any time is the average.
    """

    def __init__(self, model: keras.Model, placement: Placement) -> None:
        sync = state_of(model).sync_batch_norm
        several = placement.replicas > 1
        self._variables = (
            keras_compat.moving_statistics(
                model, sync_batch_norm=sync, is_local=local_steps.is_on(model)
            )
            if several
            else []
        )
        self._strategy = model.distribute_strategy

    def now(self) -> Any:
        """Returns the values on all replicas."""
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._variables])

    def moved(self, before: list[tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
        """Returns by how much this replica's have moved, times its weight."""
        return [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v.value) - old, tf.cast(weight, old.dtype))
            for v, old in zip(self._variables, before, strict=True)
        ]

    def set(self, before: list[tf.Tensor], moved: list[tf.Tensor]) -> None:
        """Sets the values on this replica."""
        for variable, old, move in zip(self._variables, before, moved, strict=True):
            variable.assign(old + move)


def _outcome(
    model: keras.Model,
    logs: Any,
    metrics: list[tf.Tensor],
    shards: Shards,
    local: int,
    votes: tf.Tensor,
    taken: Taken,
    moved: list[tf.Tensor],
) -> tuple[Outcome, list[tf.Tensor]]:
    """Returns what all replicas found, and `moved` summed over them, from one collective."""
    logs = logs if isinstance(logs, dict) else {}
    weight = shards.weight(local)
    digest = tf.cast(shards.digest, tf.float32)
    waited_s = tf.cast(taken.waited_s, tf.float32)
    lost = tf.cast(taken.lost if local == 0 else 0, tf.float32)
    means = [tf.math.multiply_no_nan(_mean(value), weight) for value in logs.values()]
    differing = _differing(logs, model.get_metrics_result(), weight)
    results, sums = replicas.global_metrics(
        replicas.metric_variables(model),
        metrics,
        model.get_metrics_result,
        [*means, *differing.values(), votes, digest, digest * digest, lost, waited_s, *moved],
    )
    sums, moved = sums[: len(sums) - len(moved)], sums[len(sums) - len(moved) :]
    means, rest = sums[: len(means)], sums[len(means) :]
    counts = dict(zip(differing, rest, strict=False))
    counted, digests, squares, lost, waited_s = rest[len(differing) :]
    if set(logs) != set(results):  # a step of the user's own returned something else, too
        found = {}
        for name, mean in zip(logs, means, strict=True):
            if name in counts and results[name].shape.rank == 0:
                found[name] = tf.where(counts[name] > 0, mean, tf.cast(results[name], mean.dtype))
            else:
                found[name] = results.get(name, mean)
        results = found
    replicas_count = tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32)
    spread = squares / replicas_count - tf.square(digests / replicas_count)
    waited_s /= replicas_count
    return Outcome(results, counted, spread, taken.rows[-1], lost, waited_s), moved


def _mean(value: Any) -> tf.Tensor:
    return tf.cast(tf.reduce_mean(value), tf.float32)


def _differing(logs: Logs, metrics: Logs, weight: tf.Tensor) -> Logs:
    """Returns, for each log with a metric's name, whether it is not that metric's result.

    As float32, 1 where this replica's value differs; a replica without rows has no say.
    """
    if set(logs) == set(metrics):
        return {}
    found = {}
    for name in set(logs) & set(metrics):
        mine, metric = _mean(logs[name]), _mean(metrics[name])
        same = (mine == metric) | (tf.math.is_nan(mine) & tf.math.is_nan(metric))
        found[name] = tf.cast(~same & (weight > 0), tf.float32)
    return dict(sorted(found.items()))


def _first_local(strategy: tf.distribute.Strategy, values: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)


def make_prediction(model: keras.Model, placement: Placement) -> Callable[[Any], Any]:
    """Returns `predict(source)`: the outputs of a global batch, rows in order.

    The source is an outlet, an iterator of global batches, `Shards`, or an Optional of a batch.
    Every worker gets all rows.
    """
    strategy = model.distribute_strategy
    keras_compat.install()
    seeds = keras_compat.seeds_of_step(model, "prediction")
    sync = state_of(model).sync_batch_norm

    def predict(source: Any) -> Any:
        shards = _taken(source, placement)

        def replica_step() -> Any:
            index = replicas.local_index(placement.local_replicas)
            alone = placement.replicas == 1
            share = shards.share(index, alone=alone, sync_batch_norm=sync)
            with computing(share._replace(seeds=seeds)):
                outputs = model.predict_step(shards.data[index])
            if placement.replicas > 1:
                rows = shards.own_rows[index]
                outputs = tf.nest.map_structure(lambda v: v[:rows], outputs)
            if placement.workers == 1:
                return outputs
            return tf.nest.map_structure(replicas.gather_rows, outputs)

        outputs = strategy.run(replica_step)
        if placement.workers > 1:
            return _first_local(strategy, outputs)
        return tf.nest.map_structure(
            lambda v: tf.concat(strategy.experimental_local_results(v), axis=0), outputs
        )

    compiled = predict if model.run_eagerly else tf.function(predict, reduce_retracing=True)
    return lambda source: compiled(source.outlet if isinstance(source, Ahead) else source)


@functools.lru_cache(maxsize=4)  # strategies: a process has one, seldom two
def make_vote(strategy: tf.distribute.Strategy) -> Callable[[Sequence[float]], list[float]]:
    """Returns `vote(values)`: each value summed over the replicas of all workers.

    Every worker must call it: it is a collective.
    """

    def total(values: tf.Tensor) -> tf.Tensor:
        return _first_local(strategy, strategy.run(lambda: replicas.sum_together([values])[0]))

    compiled = tf.function(total, autograph=False)

    def vote(values: Sequence[float]) -> list[float]:
        with teller().working(id(compiled)):
            counted: list[float] = compiled(tf.constant(values, tf.float32)).numpy().tolist()
        return counted

    return vote
