"""A stopped fit resumes from its checkpoint, and ends like a fit that was not stopped."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.behaviours import behaviour, stops
from tests.support.places import (
    BEFORE_RELEASE,
    EVERYWHERE,
    ONE_DEVICE,
    TWO_REPLICAS,
    TWO_WORKERS,
    few,
)

pytestmark = pytest.mark.multiworker

AT_WORKERS = few(TWO_WORKERS, of=(ONE_DEVICE, TWO_WORKERS))
# To save time, most kinds of data run only on one device: replicas change nothing for them.
PLACES_OF_DATA = {
    "arrays": few(ONE_DEVICE, TWO_WORKERS, of=EVERYWHERE),
    "Dataset of unknown length": AT_WORKERS,
}
# In CI these kinds of data stop after an epoch, too.
FEEDS_OF_EPOCHS = {"arrays", "Dataset of unknown length", "PyDataset across epochs", "generator"}


@pytest.mark.parametrize("behaviour", [stops.stopped_within_epochs])
@pytest.mark.parametrize(
    ("case", "place"),
    [(case, place) for case in stops.FEEDS for place in PLACES_OF_DATA.get(case, [ONE_DEVICE])],
)
def test_a_fit_resumes_on_each_kind_of_data(results: list[Any]) -> None:
    """Bit for bit: history, losses of each step, weights, slots, and states of callbacks."""
    assert all(worker is True for worker in results)


@pytest.mark.parametrize("behaviour", [stops.stopped_after_an_epoch])
@pytest.mark.parametrize(
    ("case", "place"),
    [
        *((case, ONE_DEVICE) for case in stops.FEEDS if BEFORE_RELEASE or case in FEEDS_OF_EPOCHS),
        ("arrays", TWO_WORKERS),
    ],
)
def test_a_fit_resumes_from_between_two_epochs(results: list[Any]) -> None:
    for resumes, places in results:
        assert resumes is True
        assert list(map(list, places)) == [[2, 0], [3, 0]]


@pytest.mark.parametrize(
    ("behaviour", "place"),
    [
        (function, place)
        for function, places in {
            stops.stopped_with_two_steps_per_execution: few(TWO_REPLICAS, of=EVERYWHERE),
            stops.stopped_in_evaluation: AT_WORKERS,
            stops.sigterm_in_evaluation: AT_WORKERS,
            stops.stopped_after_evaluation_drew_random_numbers: AT_WORKERS,
            stops.sigterm_in_evaluation_on_a_pydataset: [ONE_DEVICE],
            stops.stopped_and_built_again_in_the_same_process: [ONE_DEVICE],
            stops.stopped_with_layers_built_late: [ONE_DEVICE],
            stops.stopped_with_variables_outside_of_the_model: few(
                ONE_DEVICE, TWO_REPLICAS, of=EVERYWHERE
            ),
            stops.stopped_with_a_metric_of_the_validation: few(
                ONE_DEVICE, TWO_REPLICAS, of=EVERYWHERE
            ),
            stops.fits_of_the_same_model: few(ONE_DEVICE, TWO_REPLICAS, of=EVERYWHERE),
            stops.stopped_with_bfloat16_variables: [ONE_DEVICE],
        }.items()
        for place in places
    ],
)
def test_a_fit_resumes_after_a_stop(results: list[Any]) -> None:
    assert all(worker is True for worker in results)


MATRIX = "float32 of shape (8, 8)"
# The variable, what it is in the checkpoint, and what it is now.
DIFFERENCES = [
    ("Sequential/2 Dense/kernel", MATRIX, "float32 of shape (8, 7)"),
    ("Sequential/2 OtherDense/kernel", "not there", MATRIX),
    ("Sequential/3 Dense/kernel", "float32 of shape (8, 3)", MATRIX),
    ("Sequential/2 Dense/kernel", MATRIX, "float32 of shape (8, 3)"),
    ("Sequential/3 Dropout/seed_generator_state", "not there", "int64 of shape (2,)"),
    ("Sequential/2 Dense/kernel", MATRIX, "float16 of shape (8, 8)"),
    ("optimizer RMSprop/0 iteration", "not there", "int64 of shape ()"),
    (
        "optimizer SGD/2 momentum of Sequential/1 Dense/kernel",
        "float32 of shape (6, 8)",
        "not there",
    ),
]


@behaviour(stops.resumed_with_another_model, at=[ONE_DEVICE])
def test_another_model_is_refused_with_the_variable_that_differs(results: list[Any]) -> None:
    assert results[0] == [
        f"the model has changed: its variable {name!r} is {saved} in the checkpoint and {now} now."
        for name, saved, now in DIFFERENCES
    ]


@behaviour(stops.resumed_with_other_settings, at=AT_WORKERS)
def test_a_run_with_other_settings_is_refused(results: list[Any]) -> None:
    for model, seed, rows, never, must, lost in results:
        assert "ResumeError: the model has changed: its variable" in model
        assert "ResumeError: saved seed=4, this run seed=5" in seed
        assert "saved examples=61 of the training data, this run examples=60" in rows
        assert "holds checkpoints of a run, and resume is 'never'" in never
        assert "there is no whole checkpoint in" in must
        assert re.search("a checkpoint at step 4 in .*of another machine, which .* does not", lost)
