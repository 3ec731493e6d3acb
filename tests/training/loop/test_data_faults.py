"""Tests that an error of TensorFlow which the data has caused is raised as a DataError."""

from __future__ import annotations

from typing import cast

import pytest
import tensorflow as tf

from tfmulti.data.formats.record_stream import SCOPE
from tfmulti.errors import DataError
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.pipeline import DIFFERENT_ROWS
from tfmulti.training.loop.data_faults import data_faults_explained

LOSS = "{{function_node x}} Error in user-defined function: Iterator::Root::Map corrupted record."


class Faults:
    """Stands for a feed, its reader and its data. It counts how often the files are read again."""

    def __init__(self, known: str | None = None, in_files: str | None = None) -> None:
        self.error = None if known is None else DataError(known)
        self.in_files, self.reads = in_files, 0
        self.reader = self.data = self

    def fault_in_files(self) -> str | None:
        self.reads += 1
        return self.in_files


def raised(faults: Faults, error: Exception) -> str:
    with pytest.raises(DataError) as caught, data_faults_explained(cast("Feed", faults)):
        raise error
    return str(caught.value)


def loss(message: str = LOSS) -> tf.errors.DataLossError:
    return tf.errors.DataLossError(None, None, message)


def invalid(message: str) -> tf.errors.InvalidArgumentError:
    return tf.errors.InvalidArgumentError(None, None, message)


def test_the_reason_that_the_feed_knows_comes_first() -> None:
    faults = Faults(known="record 7")
    assert raised(faults, tf.errors.OutOfRangeError(None, None, "closed")) == "record 7"
    assert faults.reads == 0


@pytest.mark.parametrize("error", [loss(), invalid(f"in {SCOPE}/decode")])
def test_the_files_are_searched_for_the_bad_record(error: Exception) -> None:
    message = raised(Faults(in_files="a.gz, record 3"), error)
    assert message.startswith("a.gz, record 3. Repair or remove it.")


def test_a_text_that_is_not_utf_8_points_at_the_files() -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    message = raised(Faults(in_files="a.gz, record 3"), error)
    assert message.startswith("a.gz, record 3. Repair or remove it.")


@pytest.mark.parametrize("text", [LOSS, "{{function_node x}} corrupted record.\n[[x]] [Op:y]"])
def test_a_damaged_file_of_a_dataset_of_the_users_own_has_tensorflows_reason(text: str) -> None:
    message = raised(Faults(), loss(text))
    assert message == "a file of the data is damaged: corrupted record. Find it, and copy it again."


def test_different_rows_read_no_file() -> None:
    faults = Faults()
    assert raised(faults, invalid(DIFFERENT_ROWS)).startswith(DIFFERENT_ROWS)
    assert faults.reads == 0


@pytest.mark.parametrize(
    "error",
    [invalid("a matrix is not square"), tf.errors.InternalError(None, None, "a bug"), OSError()],
)
def test_an_error_with_another_cause_is_raised_as_it_is(error: Exception) -> None:
    faults = Faults(in_files="record 3")
    with pytest.raises(type(error)) as caught, data_faults_explained(cast("Feed", faults)):
        raise error
    assert caught.value is error
    assert faults.reads == 0
