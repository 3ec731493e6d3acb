"""Tests how many examples a pass may lose, wherever epochs and executions end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.support.reads import BAD, BATCH, EXAMPLES, Logged
from tfmulti import Checkpoint, prepare
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.errors import DataError
from tfmulti.run import validation
from tfmulti.run.setup import compile_model, make_model, set_up
from tfmulti.training.state.trainer_state import interrupt, state_of

pytestmark = pytest.mark.mirrored

STEPS = -(-EXAMPLES // BATCH)
SEED = 9


class Steps(keras.callbacks.Callback):
    """Notes the steps after each execution, and stops the program after some of them."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__()
        self.after, self.ends = after, list[int]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(state_of(self.model).run.steps)
        if self.after is not None and self.ends[-1] >= self.after:
            interrupt(self.model, "SIGTERM")


def model_that_skips(most: int, at_once: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    prepare(model, seed=SEED, reader_threads=0, skip_bad_records=most)
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=at_once)
    return model


def trained(model: keras.Model, epochs: int, steps: int | None, callbacks: Any = ()) -> keras.Model:
    model.fit(
        Logged(EXAMPLES, BAD),
        batch_size=BATCH,
        epochs=epochs,
        steps_per_epoch=steps,
        callbacks=list(callbacks),
        verbose=0,
    )
    return model


def lost_until(steps: int) -> list[int]:
    """Returns how many bad examples each pass has had after so many steps."""
    plan, counts = BatchPlan(EXAMPLES, BATCH, SEED), []
    for epoch in range(-(-steps // STEPS)):
        last = min((steps - epoch * STEPS) * BATCH, EXAMPLES)
        counts.append(sum(int(e) in BAD for e in plan.examples_at(epoch, 0, last)))
    return counts


# Epochs as long as a pass, longer and shorter ones, and executions over the end of a pass.
LENGTHS = pytest.mark.parametrize(
    ("epochs", "steps", "at_once"),
    [(3, None, 4), (1, 17, 1), (2, 12, 4), (9, 2, 1), (9, 2, 2), (2, 9, 9)],
)


@LENGTHS
def test_each_pass_may_lose_as_many_examples_as_the_limit(
    epochs: int, steps: int | None, at_once: int
) -> None:
    noted = Steps()
    model = trained(model_that_skips(len(BAD), at_once), epochs, steps, [noted])
    assert state_of(model).run.lost == sum(lost_until(epochs * (steps or STEPS)))
    assert set(range(STEPS, noted.ends[-1], STEPS)) <= set(noted.ends)


@LENGTHS
def test_one_more_lost_example_in_a_pass_is_an_error(
    epochs: int, steps: int | None, at_once: int
) -> None:
    with pytest.raises(
        DataError, match=r"^3 examples of this pass over the data could not be read,"
    ):
        trained(model_that_skips(len(BAD) - 1, at_once), epochs, steps)


def test_executions_are_not_shortened_without_skipping() -> None:
    noted = Steps()
    model = model_that_skips(0, at_once=4)
    model.fit(Logged(EXAMPLES), batch_size=BATCH, steps_per_epoch=12, callbacks=[noted], verbose=0)
    assert noted.ends == [4, 8, 12]


@pytest.mark.parametrize("after", [3, 4, 5, 7])
@pytest.mark.parametrize("steps", [2, 12])
def test_a_resumed_run_continues_the_count(tmp_path: Path, after: int, steps: int) -> None:
    epochs = 12 // steps

    def run(most: int, after: int | None = None) -> keras.Model:
        callbacks = [Checkpoint(tmp_path), Steps(after)]
        return trained(model_that_skips(most), epochs, steps, callbacks)

    with pytest.raises(SystemExit):
        run(len(BAD), after)
    model = run(len(BAD))
    assert state_of(model).run.steps == 12
    assert state_of(model).run.steps_before == after
    assert state_of(model).run.lost == sum(lost_until(12))


@pytest.mark.parametrize(("epochs", "steps"), [(2, 2), (1, STEPS)])
def test_a_resumed_run_counts_what_was_lost_before(tmp_path: Path, epochs: int, steps: int) -> None:
    """In the first pass: one example until the stop, and two after it."""
    assert [lost_until(step)[0] for step in (2, 3, 4)] == [1, 1, 3]
    with pytest.raises(SystemExit):
        trained(model_that_skips(2), epochs, steps, [Checkpoint(tmp_path), Steps(3)])
    with pytest.raises(DataError, match=r"^3 examples of this pass over the data could not be"):
        trained(model_that_skips(2), epochs, steps, [Checkpoint(tmp_path)])


@pytest.mark.parametrize("loaded", [1, 2])
def test_examples_lost_at_loading_count_in_each_pass(loaded: int) -> None:
    config = FitConfig(
        dataset="synthetic:shape=4,classes=3",
        model="linear",
        global_batch_size=BATCH,
        skip_bad_records=len(BAD) + 1,
        reader_threads=0,
        strategy="one_device",
    )
    setup = set_up(validation.check(config, env={}))
    lost = ("row 1 of a.csv: it has 1 column, but the header has 2.",) * loaded
    setup = replace(setup, data=replace(setup.data, train=Logged(EXAMPLES, BAD), lost=lost))
    with setup.strategy.scope():
        model = make_model(setup)
    compile_model(setup, model)
    if loaded == 1:
        trained(model, epochs=2, steps=None)
        assert state_of(model).run.lost == 2 * len(BAD)
        return
    message = (
        r"^3 examples of this pass .* not be read and 2 when it was loaded, more than .* 4 all"
    )
    with pytest.raises(DataError, match=message):
        trained(model, epochs=2, steps=None)
