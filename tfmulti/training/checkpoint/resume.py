"""Makes checkpoints while `fit` trains, and lets `fit` begin where the newest one ends.

The chief reads the newest record and broadcasts it, so all workers resume from the same one. To
make a checkpoint, every worker takes part in the collectives that capture the variables. Then the
chief writes the file.

A record's tree has these entries:

    progress    `Progress`: epoch, step and logs
    examples    the examples since the run began
    seed        the seed of the data order
    keras_seed  TensorFlow's global seed, if arrays have the order of plain Keras
    data        the sizes of the data, which must be the same when the run is resumed
    feeds       the states of the feeds, on the chief
    trained     weights and slots
    model       all other variables, metrics and random generators (`state.run_state`)
    callbacks   `callback_states`
    lost        how many examples could not be read

An evaluation changes `feeds`, `model`, `callbacks` and `lost`, but neither weights nor slots. If
training is stopped in a validation, the checkpoint has these entries from before the validation. So
the resumed run repeats the whole validation.

Every worker calls the functions of this module, unless their docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.agreement import broadcast, gather
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import EXIT_TERMINATED, ConfigError, ResumeError, RunDirError, UserError
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.launch.signals import SignalWatch, is_watched
from tfmulti.training.checkpoint import file_format
from tfmulti.training.checkpoint.callback import Checkpoint, callbacks_in, say
from tfmulti.training.checkpoint.callback_states import CallbackStates
from tfmulti.training.checkpoint.file_format import Record
from tfmulti.training.input.interface import Feed, State
from tfmulti.training.input.shuffle import Shuffle
from tfmulti.training.state import run_state
from tfmulti.training.state.trainer_state import RunCounts, interrupt, state_of
from tfmulti.training.step.step_logs import flattened

Tree = dict[str, Any]


@dataclass
class Progress:
    """The position of the training.

    Attributes:
        epoch: the number of whole epochs.
        step: the steps of the next epoch that have ended.
        logs: the logs of these steps.
        batches: the batches that the iterator in use has given in its pass.
        lost: the examples of this pass over the data that could not be read.
        is_over: whether a callback has ended the training.
    """

    epoch: int
    step: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    batches: int = 0
    lost: int = 0
    is_over: bool = False


@contextlib.contextmanager
def checkpoint_in(callbacks: Any) -> Iterator[Checkpoint | None]:
    """Gives the Checkpoint among the callbacks, or None, and releases it after the context.

    Raises:
        ConfigError: there are several Checkpoint callbacks.
    """
    checkpoints = [c for c in callbacks_in(callbacks) if isinstance(c, Checkpoint)]
    if len(checkpoints) > 1:
        raise ConfigError(f"fit was given {len(checkpoints)} Checkpoint callbacks. Give one.")
    if not checkpoints:
        yield None
        return
    try:
        yield checkpoints[0]
    finally:
        checkpoints[0].release()


@contextlib.contextmanager
def saving_at_signals(model: keras.Model, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Lets SIGINT and SIGTERM end the training with a checkpoint inside the context.

    This is for a user's own program. It changes nothing without a Checkpoint, or if tfmulti's
    command watches the signals already.

    Raises:
        KeyboardInterrupt: SIGINT stopped the training.
        SystemExit: SIGTERM stopped the training. The exit code 143 says that everything is saved
            and that the program may be started again.
    """
    if checkpoint is None or is_watched():
        yield
        return
    with SignalWatch() as watch:
        watch.stop = lambda reason: interrupt(model, reason)
        yield
        watch.finished()
    stopped_by = state_of(model).run.stopped_by
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if stopped_by == "SIGTERM":
        raise SystemExit(EXIT_TERMINATED)


def find_record(model: keras.Model, checkpoint: Checkpoint | None) -> Record | None:
    """Returns the chief's record to resume from on every worker, or None to begin anew.

    Every worker calls it: it broadcasts the record.

    Raises:
        ResumeError: the chief cannot take a record from the folder. All workers raise it.
        RunDirError: a worker does not see the chief's folder. All workers raise it.
    """
    if checkpoint is None:
        return None
    strategy = model.distribute_strategy
    record: Record | None = None
    error: Exception | None = None
    if placement_of(strategy).is_chief:
        try:
            record = checkpoint.newest()
        # The other workers wait in the broadcast, so the chief raises the error only after it.
        except Exception as raised:
            error = raised
    reason = None if error is None else str(error) or type(error).__name__
    message = broadcast(strategy, None if reason is None else reason.encode())
    if message is not None:
        raise ResumeError(message.decode()) from None
    if placement_of(strategy).workers == 1:
        return record
    _check_folder_is_seen(strategy, checkpoint)
    data = broadcast(strategy, file_format.to_bytes(record) if record else None)
    return None if data is None else file_format.from_bytes(data)


def _check_folder_is_seen(strategy: tf.distribute.Strategy, checkpoint: Checkpoint) -> None:
    """Raises RunDirError on all workers if one of them does not see the chief's folder.

    The next attempt may have another chief, which would find no checkpoint and begin anew.
    """
    placement = placement_of(strategy)
    token = broadcast(strategy, checkpoint.token().encode() if placement.is_chief else None)
    assert token is not None
    answers = gather(strategy, [placement.is_chief or checkpoint.sees(token.decode())])
    ranks = [str(rank) for rank, (sees,) in enumerate(answers) if not sees]
    if ranks:
        workers = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        raise RunDirError(
            f"{workers} cannot see worker 0's folder of checkpoints ({checkpoint.folder}). Give a "
            "folder that all machines share, such as on NFS. If worker 0 never moves to another "
            "machine, give --shared_run_dir=false, or Checkpoint(None) on the others."
        )


def shuffle_of(record: Record | None, drawn: Shuffle | None, fixed: bool) -> Shuffle | None:
    """Returns the seeds of the data order: those of the record if there is one.

    Args:
        record: the record to resume from, or None.
        drawn: the seeds of this run; None without a shuffle.
        fixed: whether `prepare` was given the seed.

    Raises:
        ResumeError: this run was given another seed, or only one of the two runs shuffles.
    """
    if record is None:
        return drawn
    with _of_known_form():
        saved: int | None = record.tree["seed"]
        if saved is not None:
            saved = index(saved)
        # Version 0.1 did not write this entry.
        keras_seed = record.tree.get("keras_seed")
        if keras_seed is not None:
            keras_seed = index(keras_seed)
    wanted = None if drawn is None else drawn.seed
    if (fixed and saved != wanted) or (saved is None) != (wanted is None):
        raise ResumeError(
            f"saved seed={saved}, this run seed={wanted}. Use the saved one, or begin a new run in "
            "a new folder."
        )
    if saved is None or drawn is None:
        return None
    return dataclasses.replace(drawn, seed=saved, keras_seed=keras_seed)


@contextlib.contextmanager
def _of_known_form() -> Iterator[None]:
    """Raises ResumeError if code inside the context finds that a record has another form.

    The record's checksums are right, but another program or version may have written it.

    Raises:
        ResumeError: an entry of the record is missing, or has another type.
    """
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ResumeError(
            "the newest checkpoint does not have the format of this version "
            f"({type(error).__name__}: {error}). Begin a new run in a new folder, or remove that "
            "checkpoint."
        ) from error


class CheckpointManager:
    """The checkpoints of one call of `fit`. Every worker has one, and calls it alike.

    Args:
        model: the prepared, compiled and built model.
        checkpoint: the Checkpoint callback.
        record: the record to resume from, or None.
        callbacks: all callbacks, after `on_train_begin`.
        feeds: the feeds by name: `training`, and `validation` if there is one.
        shuffle: the seeds of the data order.

    Raises:
        ResumeError: the sizes of the data differ from those of the record.
    """

    def __init__(
        self,
        model: keras.Model,
        checkpoint: Checkpoint,
        record: Record | None,
        callbacks: keras.callbacks.CallbackList,
        feeds: Mapping[str, Feed],
        shuffle: Shuffle | None,
    ) -> None:
        self._model, self._checkpoint, self._record = model, checkpoint, record
        self._callbacks = CallbackStates(callbacks.callbacks)
        self._feeds, self._shuffle = feeds, shuffle
        self._said: set[str] = set()
        self._before: Tree | None = None
        self._data = {name: feed.data.sizes for name, feed in feeds.items()}
        if record is not None:
            with _of_known_form():
                _check_data(record.tree["data"], self._data)

    def start(self) -> Progress | None:
        """Returns the position to resume from, or None to begin anew."""
        if self._record is None:
            return None
        with _of_known_form():
            saved = dict(self._record.tree["progress"])
            # Version 0.1 wrote this entry, which `_older_state` reads.
            saved.pop("goes_on", None)
            progress = Progress(**saved)
            for name in ("epoch", "step", "batches", "lost"):
                _check_count(f"progress.{name}", getattr(progress, name))
            _check_count("progress.batches", progress.batches, self._record.step)
            for name, kind in (("logs", dict), ("is_over", bool)):
                if type(getattr(progress, name)) is not kind:
                    raise ValueError(f"progress.{name} is not a {kind.__name__}")
            return progress

    @_of_known_form()
    def restore(self, *, has_ended: bool = False) -> None:
        """Restores the model, the callbacks and the feeds from the record.

        Args:
            has_ended: whether no epoch is left, so that nothing will be taken from the feeds.

        Raises:
            ResumeError: the record does not fit the model, or has another form.
        """
        assert self._record is not None
        tree, progress = self._record.tree, self._record.tree["progress"]
        # An older version could average the weights of workers that trained alone.
        sync_every = (tree.get("apart") or {}).get("sync_every")
        if sync_every is not None:
            raise ResumeError(
                f"saved sync_every={sync_every}, which this version does not have. Begin a new run "
                "in a new folder."
            )
        for name, feed in () if has_ended else self._feeds.items():
            state = tree["feeds"][name] if "feeds" in tree else _older_state(tree, name)
            _check_feed(name, state, epoch=progress["epoch"], step=self._record.step)
            feed.set_state(state, progress["batches"] if name == "training" else 0)
        run_state.restore(self._model, tree["model"], tree["trained"])
        self._callbacks.restore(tree["callbacks"])
        if placement_of(self._model.distribute_strategy).is_chief:
            self._say_once(self._callbacks.left_out)
        state = state_of(self._model)
        steps, examples = self._record.step, index(tree["examples"])
        state.run = RunCounts(steps, examples, steps, examples, index(tree.get("lost", 0)))

    def wants(self, count: int) -> bool:
        """Returns whether this worker votes for a checkpoint; only the chief ever does.

        Args:
            count: the steps of the next execution, after which the checkpoint would be made.
        """
        chief = placement_of(self._model.distribute_strategy).is_chief
        return chief and self._checkpoint.wants(state_of(self._model).run.steps, count)

    def save(self, progress: Progress, *, wait: bool = False) -> None:
        """Makes a checkpoint of the current position, which the chief writes.

        Every worker calls it: capturing the variables is a collective.

        Args:
            progress: the current position.
            wait: whether to return only when the chief has written the file.
        """
        state = state_of(self._model)
        # All workers take part here, so the launcher must know that they may wait for each other.
        with heartbeat().working(self):
            changed = self._before or self._changed_by_evaluation(progress.batches)
            trained = run_state.capture_trained(self._model)
        record = Record(
            state.run.steps,
            {
                "progress": vars(progress).copy(),
                "examples": state.run.examples,
                "seed": self._shuffle and self._shuffle.seed,
                "keras_seed": self._shuffle and self._shuffle.keras_seed,
                "data": self._data,
                "trained": trained,
                **changed,
            },
        )
        if placement_of(self._model.distribute_strategy).is_chief:
            self._say_once(self._callbacks.left_out)
            self._checkpoint.write(record, wait=wait)
        self._checkpoint.kept(progress.epoch, progress.step, flattened(progress.logs))

    def end_epoch(self, progress: Progress) -> None:
        """Makes a checkpoint after an epoch, if the callback asks for one after each.

        Every worker calls it.
        """
        if self._checkpoint.every_epoch:
            self.save(progress)

    def _changed_by_evaluation(self, batches: int) -> Tree:
        """Returns the entries that an evaluation changes; see the module. It is a collective."""
        # The chief's states serve all workers, because all read the same batches.
        chief = placement_of(self._model.distribute_strategy).is_chief
        feeds = self._feeds if chief else {}
        taken = {"training": batches}
        return {
            "feeds": {name: feed.get_state(taken.get(name, 0)) for name, feed in feeds.items()},
            "model": run_state.capture(self._model),
            "callbacks": self._callbacks.capture(),
            "lost": state_of(self._model).run.lost,
        }

    @contextlib.contextmanager
    def repeated_if_stopped(self, batches: int) -> Iterator[None]:
        """Makes a resumed run repeat the validation inside the context, if training stops there.

        The next checkpoint then holds the state from before the validation.

        Args:
            batches: the batches that the steps have taken in the pass over the training data.
        """
        with heartbeat().working(self):
            self._before = self._changed_by_evaluation(batches)
        yield
        if state_of(self._model).run.stopped_by is None:
            self._before = None

    def _say_once(self, lines: list[str]) -> None:
        """Prints the lines that were not printed before."""
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                say(line)


def _older_state(tree: Tree, name: str) -> State:
    """Returns the state of a feed from a record that has it in several entries."""
    # The older versions also counted the pass that continues.
    passes = tree["passes"][name] - (name == "training" and tree["progress"]["goes_on"])
    counts = {"passes": passes, "unread": tree.get("unread", {}).get(name, 0)}
    return counts | (tree.get("positions", {}).get(name) or {})


def _check_feed(name: str, state: State, *, epoch: int, step: int) -> None:
    """Raises ValueError if a feed's state has counts that a run cannot have at this position.

    A feed makes an iterator for each pass of the stopped run. So a number that is far too large
    would keep a resumed run busy without end.
    """
    # Each epoch ends at most one pass of the training data, and has at most one validation. The
    # last one may have ended in the epoch that goes on.
    passes = state.get("passes", 0)
    _check_count(f"feeds.{name}.passes", passes, epoch + 1)
    _check_count(f"feeds.{name}.unread", state.get("unread", 0), passes)
    _check_count(f"feeds.{name}.batches", state.get("batches", 0), step)


def _check_count(name: str, value: Any, maximum: int | None = None) -> None:
    """Raises ValueError if a value is not a whole number from 0, or is above the maximum."""
    if type(value) is not int or value < 0 or (maximum is not None and value > maximum):
        limit = "" if maximum is None else f" to {maximum}"
        raise ValueError(f"{name} is {value!r:.40}, but it must be a whole number from 0{limit}")


def _check_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises ResumeError if the sizes of the data differ from the saved ones."""
    for part, form in current.items():
        for name, value in form.items():
            before = saved.get(part, {}).get(name)
            if before != value:
                raise ResumeError(
                    f"saved {name}={before} of the {part} data, this run {name}={value}. Give the "
                    "same data and batch, or begin a new run in a new folder."
                )
