"""Tests evaluations in which each replica computes the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.behaviours import behaviour, whole_batches
from tests.support.places import SEVERAL, TWO_REPLICAS, TWO_WORKERS, few

pytestmark = pytest.mark.multiworker

THREE_REPLICAS = "mirrored-3"
PLACES = few(THREE_REPLICAS, TWO_WORKERS, of=(THREE_REPLICAS, *SEVERAL))


def flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [float(value)]


@pytest.mark.parametrize(
    ("behaviour", "case"),
    [
        *((whole_batches.evaluated_by_whole_batches, case) for case in whole_batches.CASES),
        *((whole_batches.evaluated_parts, kind) for kind in ("ragged", "ragged twice", "sparse")),
        *((whole_batches.computed_from_batches_of_any_size, case) for case in ("ratio", "python")),
        (whole_batches.evaluated_with_a_layer, None),
        *((whole_batches.evaluated_along_rows, case) for case in whole_batches.ALONG_ROWS),
        (whole_batches.remembered_in_predictions, None),
        (whole_batches.evaluated_without_bad_examples, None),
        (whole_batches.evaluated_in_eager_mode, None),
        (whole_batches.predicted_in_eager_mode, None),
        (whole_batches.evaluated_by_several_steps_at_once, None),
        (whole_batches.validated_while_it_trains, None),
        (whole_batches.drawn_after_an_evaluation, None),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_values_that_are_not_understood_are_those_of_one_device(
    results: list[Any], one_device: Any
) -> None:
    for worker in results:
        assert flat(worker) == pytest.approx(flat(one_device), abs=1e-6, rel=1e-6)


@behaviour(whole_batches.evaluated_texts, at=[THREE_REPLICAS])
def test_texts_have_as_many_tokens_as_on_one_device(results: list[Any], one_device: Any) -> None:
    assert flat(results[0]) == pytest.approx(flat(one_device), abs=1e-6, rel=1e-6)


@behaviour(whole_batches.evaluated_with_a_layer_of_one_worker, at=[TWO_WORKERS])
@pytest.mark.parametrize("case", ["graph", "eager"])
def test_the_workers_agree_on_whole_batches(results: list[Any], one_device: Any) -> None:
    for worker in results:
        assert flat(worker) == pytest.approx(flat(one_device), abs=1e-6, rel=1e-6)


@behaviour(whole_batches.predicted_for_two_types, at=[THREE_REPLICAS])
def test_a_later_trace_may_show_that_a_step_needs_whole_batches(
    results: list[Any], one_device: Any
) -> None:
    assert flat(results[0]) == pytest.approx(flat(one_device), abs=1e-6, rel=1e-6)


@behaviour(whole_batches.predicted_for_two_types, at=[TWO_WORKERS])
def test_several_workers_cannot_agree_on_whole_batches_later(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert error == "ModelError"
        assert "the first batch of the predict_step was computed by rows, but" in message


@behaviour(whole_batches.evaluated_parts, at=[THREE_REPLICAS])
@pytest.mark.parametrize("case", ["texts"])
def test_texts_are_gathered_in_one_process(results: list[Any], one_device: Any) -> None:
    assert results == [one_device]


@behaviour(whole_batches.evaluated_parts, at=[TWO_WORKERS])
@pytest.mark.parametrize("case", ["texts"])
def test_texts_of_several_workers_are_refused(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "strings cannot be gathered" in message) == ("ModelError", True)


@behaviour(whole_batches.warnings_of_whole_batches, at=few(TWO_REPLICAS, of=SEVERAL))
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("", "each replica computes the whole batch in the {}, because it is not known how"),
        ("off", "values of the {} are those of one device: they depend on the"),
    ],
)
def test_a_warning_names_the_value_once(results: list[Any], expected: str) -> None:
    [(of_test, of_predict)] = results
    for step, message in (("test_step", of_test), ("predict_step", of_predict)):
        assert expected.format(step) in message
        assert "PyFunc" in message
        assert "verify=False" in message
