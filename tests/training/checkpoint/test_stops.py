"""A fit that is stopped goes on as if nothing had happened, on every kind of data."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multiworker

Behaviours = Callable[..., list[dict[str, Any]]]

ALONE = [("one_device",)]
AT_WORKERS = [*ALONE, ("multi_worker_mirrored", 2)]
EVERYWHERE = [*AT_WORKERS, ("mirrored", 2)]
STOPS = {
    "stopped: arrays": EVERYWHERE,
    "stopped: Dataset": ALONE,
    "stopped: Dataset of unknown length": AT_WORKERS,
    "stopped: repeated Dataset": ALONE,
    "stopped: PyDataset": ALONE,
    "stopped: PyDataset across epochs": ALONE,
    "stopped: PyDataset by its steps": ALONE,
    "stopped: generator": ALONE,
    "stopped_in_the_evaluation": AT_WORKERS,
    "signalled_in_the_evaluation": AT_WORKERS,
    "signalled_in_the_evaluation_of_a_pydataset": ALONE,
    "stopped_between_executions": EVERYWHERE,
    "stopped_and_built_again_in_the_same_process": ALONE,
    "stopped_after_an_evaluation_drew": AT_WORKERS,
    "stopped_with_layers_that_are_built_late": ALONE,
    "stopped_with_bfloat16_variables": ALONE,
}


@pytest.mark.parametrize("name", STOPS)
def test_it_ends_as_the_run_that_was_not_stopped(behaviours: Behaviours, name: str) -> None:
    """To the bit: history, logs of every step, weights, slots, what callbacks know."""
    for place in STOPS[name]:
        for worker in behaviours(*place):
            assert worker[name] is True


MATRIX = "float32 of shape (8, 8)"
DIFFERENCES = [  # variable, in the checkpoint, now
    ("Sequential/2 Dense/kernel", MATRIX, "float32 of shape (8, 7)"),
    ("Sequential/2 Other/kernel", "not there", MATRIX),
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


def test_another_model_is_refused_by_what_differs(behaviours: Behaviours) -> None:
    words = [
        f"the model has changed: its variable {name!r} is {there} in the checkpoint and {here} now."
        for name, there, here in DIFFERENCES
    ]
    assert behaviours("one_device")[0]["resumed_with_another_model"] == words


def test_another_run_does_not_go_on(behaviours: Behaviours) -> None:
    for place in AT_WORKERS:
        for worker in behaviours(*place):
            model, seed, rows, never, must, lost = worker["resumed_otherwise"]
            assert "ResumeError: the model has changed: its variable" in model
            assert "ResumeError: saved seed=4, this run seed=5" in seed
            assert "saved examples=61 of the training data, this run examples=60" in rows
            assert "holds checkpoints of a run, and resume is 'never'" in never
            assert "there is no whole checkpoint in" in must
            assert re.search(
                "a checkpoint at step 4 in .*of another machine, which .* does not", lost
            )
