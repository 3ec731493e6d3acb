"""Tests what the Python code of a step is told to read from outside of the program."""

from __future__ import annotations

import datetime
import functools
import os
import pickle
import subprocess
import time
import zipfile
from pathlib import Path
from time import monotonic
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.training.state import model_search
from tfmulti.training.state.step_code import StepCode

FOLDER = Path("folder")
PACKED: Any = None
WEIGHTS: Any = np.ones(3)
NOW = datetime.datetime.now
CLOCKS = {"wall": functools.partial(time.time)}


class Stamp(datetime.datetime):
    """A time of the user's own, such as the Timestamp of pandas."""


def doubled(x: Any) -> Any:
    return 2 * x


class Reads(keras.layers.Layer):
    """Calls the function that it holds."""

    read: Any = None

    def call(self, x: Any) -> Any:
        return self.read()


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda: open("file").read(), "a file or a folder"),  # noqa: SIM115
        (lambda: np.load("file"), "a file or a folder"),
        (lambda: zipfile.ZipFile("file"), "a file or a folder"),
        (lambda: pickle.load(PACKED), "a file or a folder"),
        (lambda: keras.utils.load_img("file"), "a file or a folder"),
        (lambda: tf.io.read_file("file"), None),
        (lambda: doubled("loaded"), None),
        (lambda: isinstance(FOLDER, Path), None),
        (lambda: FOLDER.joinpath("file").read_text(), "a file or a folder"),
        (lambda: os.path.getmtime("file"), "a file or a folder"),
        (lambda: time.time(), "the time"),
        (lambda: monotonic(), "the time"),
        (lambda: CLOCKS["wall"](), "the time"),
        (time.time, "the time"),
        (lambda: datetime.datetime.now(), "the time"),
        (lambda: NOW(), "the time"),
        (datetime.date.today, "the time"),
        (lambda: Stamp.now(), "the time"),
        (lambda: WEIGHTS.now, None),
        (lambda: subprocess.run("date", check=True), "the output of another program"),
        (lambda: subprocess.list2cmdline([]), None),
        (lambda: os.environ["RATE"], "the environment"),
        (lambda: globals()["RATE"], "values by their names"),
        (lambda: time.sleep(0), None),
        (lambda: os.path.join("a", "b"), None),
        (lambda: {"open": 1}.get("open"), None),
    ],
)
def test_what_a_step_reads_from_outside_of_the_program_is_found(
    read: Any, what: str | None
) -> None:
    layer = Reads()
    layer.read = read
    found = StepCode(model_search.find(layer), "train_step").reads_elsewhere()
    assert (found and found[0]) == what


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        Path(str(epoch)).read_text()


class Exported(keras.Model):
    """Reads files in methods that no step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.monitor = Monitor()

    def export(self, path: Any) -> Any:
        return Path(path).read_text()

    def load_data(self, path: Any) -> Any:
        return np.load(path)

    def train_step(self, data: Any) -> Any:
        return {"loss": self.compute_loss(data, data)}


def test_files_that_other_methods_read_are_not_told() -> None:
    assert StepCode(model_search.find(Exported()), "train_step").reads_elsewhere() is None
