"""What `fit` does with a Checkpoint: makes one where it is due, and begins where the newest ends.

Everything here runs on every worker; the chief's record is the one that counts, on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

import keras

from tfmulti.distribution.broadcast import broadcast
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import EXIT_TERMINATED, ConfigError, ResumeError
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.launch.signals import SignalWatch, is_watched
from tfmulti.training.checkpoint import file_format
from tfmulti.training.checkpoint.callback import Checkpoint, say
from tfmulti.training.checkpoint.callback_states import CallbackStates
from tfmulti.training.checkpoint.file_format import Record
from tfmulti.training.input.feed import Feed
from tfmulti.training.input.positions import State
from tfmulti.training.state import run_state
from tfmulti.training.state.trainer_state import interrupt, state_of
from tfmulti.training.step import local_steps

Tree = dict[str, Any]


@dataclass
class Progress:
    """Where training is.

    `epoch` epochs are whole; of the next one `step` steps are done, which left `logs`. If
    `goes_on`, the next step takes from the iterator in use, which has given `batches` batches;
    else it begins another. `lost` examples of this pass of the data could not be read.
    `is_over` says that a callback ended training.
    """

    epoch: int
    step: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    batches: int = 0
    lost: int = 0
    is_over: bool = False


@contextlib.contextmanager
def checkpoint_in(callbacks: Any) -> Iterator[Checkpoint | None]:
    """Inside, the Checkpoint among the callbacks that `fit` was given may own its folder.

    Raises:
        ConfigError: there are two.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    found = [callback for callback in given if isinstance(callback, Checkpoint)]
    if len(found) > 1:
        raise ConfigError(f"fit was given {len(found)} Checkpoint callbacks. Give one.")
    if not found:
        yield None
        return
    try:
        yield found[0]
    finally:
        found[0].release()


@contextlib.contextmanager
def saving_at_signals(model: keras.Model, keeper: Checkpoint | None) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM to a program of the user's own end training with a checkpoint.

    At its end KeyboardInterrupt follows, or SystemExit(143): saved, start me again. Without a
    Checkpoint, or where the command watches already, nothing is different.
    """
    if keeper is None or is_watched():
        yield
        return
    with SignalWatch() as watch:
        watch.stop = lambda reason: interrupt(model, reason)
        yield
        watch.finished()
    stopped_by = state_of(model).stopped_by
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if stopped_by == "SIGTERM":
        raise SystemExit(EXIT_TERMINATED)


def find_record(model: keras.Model, keeper: Checkpoint | None) -> Record | None:
    """Returns the chief's record to resume from, on every worker; None to begin anew.

    Raises:
        ResumeError: on all workers, where the chief finds that it cannot be.
    """
    if keeper is None:
        return None
    strategy = model.distribute_strategy
    found: Record | None = None
    error: Exception | None = None
    if placement_of(strategy).is_chief:
        try:
            found = keeper.newest()
        except Exception as wrong:  # the other workers wait for word
            error = wrong
    words = broadcast(strategy, str(error).encode() if error else None)
    if words is not None:
        raise ResumeError(words.decode()) from None
    if placement_of(strategy).workers == 1:
        return found
    data = broadcast(strategy, file_format.to_bytes(found) if found else None)
    return None if data is None else file_format.from_bytes(data)


def seed_of(record: Record | None, drawn: int | None, fixed: bool) -> int | None:
    """Returns the seed of the data order: the record's, where there is one.

    Raises:
        ResumeError: this run was given another.
    """
    if record is None:
        return drawn
    with _of_known_form():
        saved: int | None = record.tree["seed"]
        if saved is not None:
            saved = index(saved)
    if (fixed and saved != drawn) or (saved is None) != (drawn is None):
        raise ResumeError(
            f"saved seed={saved}, this run seed={drawn}. Use the saved one, or begin a new run in "
            "a new folder."
        )
    return saved


@contextlib.contextmanager
def _of_known_form() -> Iterator[None]:
    """Inside, a record is read that has all its checksums, but may be of another program.

    Raises:
        ResumeError: something is not there, or is of another type.
    """
    try:
        yield
    except ResumeError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ResumeError(
            f"the newest checkpoint is not as this version writes it ({type(error).__name__}: "
            f"{error})."
            " Begin a new run in a new folder, or remove that checkpoint."
        ) from error


class CheckpointManager:
    """The checkpoints of one `fit`: `record` is where it resumes, or None."""

    def __init__(
        self,
        model: keras.Model,
        settings: Checkpoint,
        record: Record | None,
        callbacks: keras.callbacks.CallbackList,
        feeds: Mapping[str, Feed],
        seed: int | None,
    ) -> None:
        self._model, self._checkpoint, self._record = model, settings, record
        self._callbacks = CallbackStates(callbacks.callbacks)
        self._feeds, self._seed = feeds, seed
        self._said: set[str] = set()
        self._before: Tree | None = None
        self._data = {name: feed.form for name, feed in feeds.items()}
        for feed in feeds.values():
            feed.keep_position()
        if record is not None:
            with _of_known_form():
                _check_data(record.tree["data"], self._data)

    def start(self) -> Progress | None:
        """Returns where to begin, or None at the beginning."""
        if self._record is None:
            return None
        with _of_known_form():
            return Progress(**self._record.tree["progress"])

    @_of_known_form()
    def restore(self) -> None:
        """Gives model, callbacks and feeds the state of the record."""
        assert self._record is not None
        tree = self._record.tree
        for name, feed in self._feeds.items():
            in_use = name == "training" and tree["progress"]["goes_on"]
            position = tree.get("positions", {}).get(name)
            unread = tree.get("unread", {}).get(name, 0)
            feed.begin_after(tree["passes"][name] - in_use, position, unread)
        run_state.restore(self._model, tree["model"], tree["trained"])
        local_steps.restore(self._model, tree.get("apart"))
        self._callbacks.restore(tree["callbacks"])
        if placement_of(self._model.distribute_strategy).is_chief:
            self._say_once(self._callbacks.left_out)
        state = state_of(self._model)
        state.steps = state.steps_before = self._record.step
        state.examples = state.examples_before = index(tree["examples"])
        state.lost = index(tree.get("lost", 0))

    @_of_known_form()
    def restore_random_states(self) -> None:
        """Gives Python's and NumPy's generators the states of the record."""
        assert self._record is not None
        run_state.set_random_states(self._record.tree["model"]["random"])

    def wants(self, count: int) -> bool:
        """Whether this worker wants a checkpoint after `count` more steps; only the chief does."""
        chief = placement_of(self._model.distribute_strategy).is_chief
        return chief and self._checkpoint.wants(state_of(self._model).steps, count)

    def keep(self, progress: Progress, *, wait: bool = False) -> None:
        """Makes a checkpoint of here; the chief writes it, in the background unless `wait`."""
        state = state_of(self._model)
        with heartbeat().working(self):  # all workers take part
            moving = self._before or self._moving()
            trained = run_state.capture_trained(self._model)
            apart = local_steps.capture(self._model)
        record = Record(
            state.steps,
            {
                "progress": vars(progress).copy(),
                "examples": state.examples,
                "seed": self._seed,
                "data": self._data,
                "positions": self._positions(progress.batches),
                "settings": self._checkpoint.settings,
                "trained": trained,
                "apart": apart,
                **moving,
            },
        )
        if placement_of(self._model.distribute_strategy).is_chief:
            self._say_once(self._callbacks.left_out)
            self._checkpoint.keep(record, wait=wait)

    def _positions(self, batches: int) -> dict[str, State | None]:
        """Returns where the data is, the training data after so many batches of its pass.

        The chief's say, since all read the same batches. Of validation data that is not known in
        the midst of its pass, which will be done again.
        """
        if not placement_of(self._model.distribute_strategy).is_chief:
            return {}
        known = ["training"] if self._before else list(self._feeds)
        given = {"training": batches}
        return {name: self._feeds[name].position(given.get(name, 0)) for name in known}

    def _moving(self) -> Tree:
        """Returns what an evaluation changes, too: all but the weights; a collective."""
        return {
            "passes": {name: feed.passes for name, feed in self._feeds.items()},
            "unread": {name: feed.unread for name, feed in self._feeds.items()},
            "model": run_state.capture(self._model),
            "callbacks": self._callbacks.capture(),
            "lost": state_of(self._model).lost,
        }

    @contextlib.contextmanager
    def again_if_stopped(self) -> Iterator[None]:
        """If training stops inside, the checkpoint is from before it, so resuming repeats it."""
        with heartbeat().working(self):
            self._before = self._moving()
        yield
        if state_of(self._model).stopped_by is None:
            self._before = None

    def _say_once(self, lines: list[str]) -> None:
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                say(line)

    def finish(self) -> None:
        """Waits until the last checkpoint is written."""
        self._checkpoint.finish()


def _check_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for part, form in now.items():
        for name, value in form.items():
            before = saved.get(part, {}).get(name)
            if before != value:
                raise ResumeError(
                    f"saved {name}={before} of the {part} data, this run {name}={value}. Give the "
                    "same data and batch, or begin a new run in a new folder."
                )
