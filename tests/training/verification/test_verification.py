"""Models made outside the scope, and the comparison of the first steps with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.multiworker

KINDS = pytest.mark.parametrize("kind", ["mirrored", "multi_worker_mirrored"])
Behaviours = Callable[..., list[dict[str, Any]]]

OUTSIDE = [
    "all_of_it_outside_the_scope",
    "prepared_and_then_compiled_outside_the_scope",
    "trained_and_then_prepared_outside_the_scope",
    "compiled_outside_the_scope",
    "variables_of_its_own_outside_the_scope",
    "trained_inside_the_scope",
]


def flat(value: Any) -> list[float]:
    assert not isinstance(value, dict), value  # an error
    if isinstance(value, list):
        return [x for item in value for x in flat(item)]
    return [float(value)]


@KINDS
@pytest.mark.parametrize("name", OUTSIDE)
def test_wherever_it_is_made_it_is_one_device(behaviours: Behaviours, kind: str, name: str) -> None:
    one = np.asarray(flat(behaviours("one_device")[0][name]))
    for worker in behaviours(kind, 2):
        assert np.asarray(flat(worker[name])) == pytest.approx(one, abs=2e-6, rel=1e-5)


@KINDS
def test_another_strategys_model_is_refused(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        error, message = worker["made_in_the_scope_of_another_strategy"]["error"]
        assert error == "ModelError"
        assert "'strategy = tfmulti.make_strategy()' once, and 'with strategy.scope():'" in message


@pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])
def test_what_is_right_passes_and_nothing_is_changed(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind) if kind == "one_device" else behaviours(kind, 2):
        found = worker["verified_and_then_as_if_not"]
        assert found == ["same", 2, True, "same", [True] * 4]


WORDS = {
    "loss": ["gradient of 'own/dense/kernel'", "tape.gradient(loss, weights)", "1/2 of one"],
    "rows are mixed": ["the output of the layer 'mixing'", "tf.tensordot", "all_gather"],
    "metric": ["the metric's variable 'largest/found'", "must be a sum over rows"],
    "chance": ["tf.random.normal", "Draw by keras.random"],
    "weights": ["the update of 'own/dense/kernel'", "the train_step itself changes"],
    "queue": ["the variable 'queue of Own'", "its own rows only"],
}


@KINDS
@pytest.mark.parametrize("wrong", WORDS)
def test_what_is_wrong_is_told_on_all_workers(
    behaviours: Behaviours, kind: str, wrong: str
) -> None:
    found = [worker[f"verify finds: {wrong}"]["error"] for worker in behaviours(kind, 2)]
    for error, message in found:
        assert error == "VerificationError"
        assert "\n" not in message
        for words in [*WORDS[wrong], "prepare(model, verify=False)"]:
            assert words.replace("own/", "") in message.replace("_own/", "").replace("own/", "")
    assert len({message for _, message in found}) == 1


WITHOUT_MEND = {
    "losses left by other replicas": "the gradient of",
    "rows of a table that all replicas look up": "the update of",
    "logits of gathered rows": "differs from one device",
    "a result under another name": "the log 'score'",
    "no scope": "trains on one device",
}


@KINDS
@pytest.mark.parametrize("name", WITHOUT_MEND)
def test_a_mend_that_is_taken_away_is_found(behaviours: Behaviours, kind: str, name: str) -> None:
    if (kind, name) == ("multi_worker_mirrored", "losses left by other replicas"):
        pytest.skip("a process with one replica has no others that trace its layers")
    for worker in behaviours(kind, 2):
        mended, without = worker[f"verify finds without the mend: {name}"]
        assert mended == "same"
        assert WITHOUT_MEND[name] in without


@KINDS
def test_rounding_of_sums_that_cancel_out_is_no_difference(
    behaviours: Behaviours, kind: str
) -> None:
    for worker in behaviours(kind, 2):
        assert worker["verified_biases_before_normalizations"] == ["same", True]


@KINDS
def test_what_rounding_decides_once_is_no_difference(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        assert worker["verified_again_from_other_weights"] == ["same", 2, True]


@KINDS
def test_nothing_is_trained_where_it_fails(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        assert worker["verify_leaves_the_state_when_it_fails"] == ["VerificationError", True, 0]


@KINDS
def test_a_learning_rate_of_nothing_hides_nothing(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        error, message = worker["verify_with_a_learning_rate_of_nothing"]["error"]
        assert (error, "the gradient of" in message) == ("VerificationError", True)


@KINDS
def test_what_is_not_comparable_is_said(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        own, passes, plain = worker["verify_of_what_is_not_comparable"]
        assert "sync_batch_norm=False" in own
        assert "microbatches" in passes
        assert plain is None


@pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])
def test_the_data_is_not_taken(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind) if kind == "one_device" else behaviours(kind, 2):
        found = worker["verified_data_is_not_taken"]
        assert len(found) == 4
        assert all(each == ["same", True] for each in found.values()), found
