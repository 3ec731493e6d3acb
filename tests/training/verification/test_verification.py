"""Tests models made outside the scope, and the comparison of first steps with one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, verification
from tests.support.places import EVERYWHERE, ONE_DEVICE, SEVERAL, TWO_REPLICAS, TWO_WORKERS, few
from tfmulti.training.verification import plain_run

pytestmark = pytest.mark.multiworker


def flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [x for item in value for x in flat(item)]
    return [float(value)]


@behaviour(
    verification.built_and_compiled_outside_the_scope,
    verification.prepared_then_compiled_outside_the_scope,
    verification.trained_then_prepared_outside_the_scope,
    verification.compiled_outside_the_scope,
    verification.custom_variables_outside_the_scope,
    verification.trained_inside_the_scope,
    at=few(TWO_REPLICAS, of=SEVERAL),
)
def test_a_model_made_anywhere_trains_as_on_one_device(results: list[Any], one_device: Any) -> None:
    expected = np.asarray(flat(one_device))
    for worker in results:
        assert np.asarray(flat(worker)) == pytest.approx(expected, abs=2e-6, rel=1e-5)


@behaviour(verification.built_in_the_scope_of_another_strategy, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_model_of_another_strategy_is_refused(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert error == "ModelError"
        assert "'strategy = tfmulti.make_strategy()' once, and 'with strategy.scope():'" in message


@behaviour(verification.training_with_and_without_verification, at=EVERYWHERE)
def test_a_correct_model_passes_and_nothing_is_changed(results: list[Any]) -> None:
    assert all(worker == ["same", 2, True, "same", [True] * 4] for worker in results)


MISTAKES = {
    "loss": ["gradient of 'own/dense/kernel'", "tape.gradient(loss, weights)", "1/2 of one"],
    "rows are mixed": ["the output of the layer 'mixing'", "tf.tensordot", "loss function"],
    "metric": ["the metric's variable 'largest/found'", "must be a sum over rows"],
    "random numbers": ["tf.random.normal", "Draw by keras.random"],
    "weights": ["the update of 'own/dense/kernel'", "the train_step itself changes"],
    "queue": ["the variable 'queue of Own'", "its own rows only"],
}


@behaviour(verification.fit_with_a_mistake, at=few(TWO_WORKERS, of=SEVERAL))
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_described_on_all_workers(errors: list[list[str]], case: str) -> None:
    for error, message in errors:
        assert error == "VerificationError"
        assert "\n" not in message
        for words in [*MISTAKES[case], "prepare(model, verify=False)"]:
            assert words.replace("own/", "") in message.replace("_own/", "").replace("own/", "")
    assert len({message for _, message in errors}) == 1


WITHOUT_PATCH = {
    "losses left by other replicas": "the gradient of",
    "rows of a table that all replicas look up": "the update of",
    "logits of gathered rows": "differs from one device",
    "a result under another name": "the log 'score'",
    "a vector loss of rank 1": "the gradient of",
    "a vector loss of rank 2": "the gradient of",
    "a spread over the rows": "differs from one device",
    "no scope": "trains on one device",
}
# The same with fewer digits. In bfloat16 rounding explains most of these differences.
WITHOUT_PATCH |= {
    f"{case}:{digits}": WITHOUT_PATCH[case]
    for case, digits in [
        ("losses left by other replicas", "TensorFloat-32"),
        ("rows of a table that all replicas look up", "bfloat16"),
        ("a result under another name", "TensorFloat-32"),
        ("a vector loss of rank 1", "TensorFloat-32"),
        ("a vector loss of rank 2", "TensorFloat-32"),
        ("a spread over the rows", "TensorFloat-32"),
    ]
}


@pytest.mark.parametrize("behaviour", [verification.verified_with_and_without_a_patch])
@pytest.mark.parametrize(
    ("case", "place"),
    [
        (case, place)
        for case in WITHOUT_PATCH
        for place in few(TWO_REPLICAS, of=SEVERAL)
        # In a process with one replica, no other replica leaves losses in its layers.
        if not case.startswith("losses left by other replicas") or place == TWO_REPLICAS
    ],
)
def test_verification_finds_what_a_missing_patch_changes(results: list[Any], case: str) -> None:
    for with_patch, without_patch in results:
        assert with_patch == "same"
        assert WITHOUT_PATCH[case] in without_patch


# The words of the warning, for a step with a value that is not understood. A condition is
# understood if both branches give means.
WARNINGS = {
    "train_step": ["the custom gradient 'IdentityN'", "has compared the first steps only"],
    "train_step:not compared": ["the custom gradient 'IdentityN'", "Compare the first step"],
    "train_step:condition": [],
    "train_step:python": ["the Python function 'PyFunc'", "the first steps only"],
    "test_step": ["the whole batch in the test_step", "the custom gradient 'IdentityN'"],
    "test_step:python": ["the whole batch in the test_step", "the Python function 'PyFunc'"],
    "predict_step": ["the whole batch in the predict_step", "the custom gradient 'IdentityN'"],
}


@behaviour(verification.warnings_of_values_that_are_not_understood, at=[TWO_REPLICAS])
@pytest.mark.parametrize("case", WARNINGS)
def test_values_that_are_not_understood_are_told_once(results: list[Any], case: str) -> None:
    [(told, verdict)] = results
    assert verdict == (None if case.endswith("not compared") else "same")
    assert len(told) == bool(WARNINGS[case])
    assert all(words in told[0] for words in WARNINGS[case])


@behaviour(verification.warnings_of_values_that_are_not_understood, at=[ONE_DEVICE])
@pytest.mark.parametrize("case", ["train_step:python", "train_step:python in passes"])
def test_a_python_function_that_each_pass_calls_is_told(results: list[Any], case: str) -> None:
    [(told, verdict)] = results
    assert (len(told), verdict) == ((1, "same") if "passes" in case else (0, None))


# How a step writes, and the operation that the warning names.
OUTPUTS = {
    "train_step:print": "PrintV2",
    "train_step:print in a condition": "PrintV2",
    "train_step:summary": "WriteSummary",
    "train_step:file": "WriteFile",
    "train_step:table": "LookupTableInsertV2",
    "train_step:queue": "QueueEnqueueV2",
    "test_step:print": "PrintV2",
    "predict_step:print": "PrintV2",
}


@behaviour(verification.warnings_of_outputs, at=[ONE_DEVICE, TWO_REPLICAS])
@pytest.mark.parametrize("case", OUTPUTS)
def test_a_step_that_prints_or_writes_is_told_once(
    results: list[Any], case: str, place: str
) -> None:
    [told] = results
    assert len(told) == (place == TWO_REPLICAS)
    for warned in told:
        assert warned.startswith(f"the {case.partition(':')[0]} prints, or writes")
        assert f"({OUTPUTS[case]}): each of 2 replicas" in warned


@pytest.mark.parametrize("operation", sorted({*OUTPUTS.values()}))
def test_a_step_that_prints_or_writes_is_not_run_for_one_row(operation: str) -> None:
    """Each run of the step writes a value, so one more run would write one value too many."""
    assert plain_run._NOT_FOR_ONE_ROW.search(operation)


@behaviour(verification.warnings_of_another_structure, at=[TWO_REPLICAS])
def test_a_comparison_does_not_settle_data_of_another_structure(results: list[Any]) -> None:
    [(of_first, of_second, verdict)] = results
    assert (of_first, len(of_second), verdict) == ([], 1, "same")
    assert "the custom gradient 'IdentityN'" in of_second[0]


# The words of the warning of a training, after a comparison that found no difference.
OF_LAYERS = {
    "loop until all rows are solved": "the operation 'functional_1/solved_1/while' (While)",
    "loop of an operation": "the operation 'functional_1/while' (While)",
    "custom gradient": "the custom gradient 'functional_1/lambda_1/IdentityN'",
    "custom gradient in a condition": "the custom gradient",
    "recomputed": None,
    "recomputed mixed rows": "the custom gradient 'functional_1/lambda_1/IdentityN'",
    "jacobian": None,
    "jacobian of a normalization": "of this replica alone, such as its number of rows",
    "recurrent cell": None,
    "scan": None,
    "lookups": None,
    "lookups by hand": "a gradient of lookups (tf.IndexedSlices) that the step has made",
}


@behaviour(verification.warnings_of_a_layer, at=[TWO_REPLICAS])
@pytest.mark.parametrize("case", OF_LAYERS)
def test_a_comparison_of_the_first_step_does_not_settle_a_layer_of_the_users_own(
    results: list[Any], case: str
) -> None:
    """Its code may have no effect there, such as a gate that opens later."""
    [(told, verdict)] = results
    assert verdict == "same"
    of_training = [message for message in told if "values of the train_step" in message]
    assert len(of_training) == bool(OF_LAYERS[case])
    assert all(OF_LAYERS[case] in message for message in of_training)
    in_evaluation = [message for message in told if "the whole batch in the test_step" in message]
    assert bool(in_evaluation) == (case.startswith("loop") or case.endswith("mixed rows"))


@behaviour(verification.warnings_of_an_evaluation, at=[TWO_REPLICAS])
@pytest.mark.parametrize("case", ["understood", "not understood"])
def test_an_evaluation_with_a_layer_that_is_not_understood_warns(
    results: list[Any], case: str
) -> None:
    [told] = results
    assert len(told) == (case == "not understood")
    assert all("the whole batch in the test_step" in message for message in told)


@behaviour(verification.warnings_of_a_metric, at=few(TWO_REPLICAS, of=SEVERAL))
@pytest.mark.parametrize("case", ["sets", "leaves", "zeros"])
def test_a_metric_that_begins_with_other_numbers_than_after_a_reset_warns(
    results: list[Any], case: str, one_device: Any
) -> None:
    told, value = results[0]
    assert len(told) == (case != "sets")
    assert all("begins with numbers that its reset_state does not set" in words for words in told)
    if case == "sets":
        assert value == pytest.approx(one_device[1], rel=1e-6)


@pytest.mark.parametrize("case", ["graph", "eager", "eager before fit"])
@behaviour(
    verification.verified_with_an_optimizer_that_is_not_built, at=few(TWO_REPLICAS, of=SEVERAL)
)
def test_an_optimizer_is_built_with_empty_slots(results: list[Any], one_device: Any) -> None:
    for verdict, losses in results:
        assert [verdict, losses] == ["same", pytest.approx(one_device[1], rel=1e-5)]


@pytest.mark.parametrize("case", ["graph", "eager", "eager functions"])
@behaviour(verification.steps_counted_in_python, at=few(TWO_REPLICAS, of=SEVERAL))
def test_all_replicas_count_as_one_device(results: list[Any], one_device: Any, case: str) -> None:
    is_told = [bool(told) for _, told in results]
    # The chief warns, once for each function that it traces.
    assert is_told == [case == "graph"] + [False] * (len(results) - 1)
    for history, _ in results:
        assert history["calls"] == one_device[0]["calls"]
        assert history["text"] == one_device[0]["text"]
        assert history["loss"] == pytest.approx(one_device[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("case", ["graph", "eager"])
@behaviour(verification.steps_counted_in_passes, at=[ONE_DEVICE, TWO_REPLICAS])
def test_all_passes_of_a_step_count_alike(results: list[Any], case: str) -> None:
    [(history, _)] = results
    assert history["calls"] == ([4, 8] if case == "eager" else [history["calls"][0]] * 2)
    assert history["text"][1] == f"b'call {history['calls'][1]:.0f}'"


@behaviour(verification.predictions_counted_in_python, at=[ONE_DEVICE, TWO_WORKERS])
def test_numbers_that_predictions_change_are_told(results: list[Any]) -> None:
    assert results == [1, 0][: len(results)]


@behaviour(verification.values_changed_between_calls, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_value_that_a_compiled_step_keeps_is_told_once(results: list[Any]) -> None:
    [found] = results
    assert found == [
        [],
        ["Dropout.rate of 'drop' has changed since the train_step"],
        [],
        [],
        ["Dense.trainable of 'dense' has changed since the train_step"],
        [],
        ["Scaled.scale of 'scaled' has changed since the test_step"],
    ]


@behaviour(verification.a_number_changed_between_predictions, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_number_that_was_changed_between_predictions_is_told(results: list[Any]) -> None:
    [(of_first, of_second, of_third)] = results
    assert (of_first, len(of_second), of_third) == ([], 1, [])
    assert "has changed since the predict_step was traced, which keeps the old" in of_second[0]


@pytest.mark.parametrize("case", ["python", "numpy", "own generator", "seeds"])
@behaviour(verification.numbers_drawn_in_python, at=[ONE_DEVICE, TWO_REPLICAS])
def test_numbers_that_a_trace_draws_in_python_are_told(results: list[Any], case: str) -> None:
    names = {
        "python": "Python's generator (random)",
        "numpy": "NumPy's generator (numpy.random)",
        "own generator": "DrawsInPython.rng of ",
    }
    [found] = results
    steps = ["predict_step", "test_step"] if case in names else []
    assert len(found) == len(steps)
    for step, message in zip(steps, found, strict=True):
        assert f"the {step} draws numbers from {names[case]}" in message


@behaviour(verification.values_read_from_outside, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_file_that_a_step_reads_in_python_is_told(results: list[Any]) -> None:
    [found] = results
    assert len(found) == 2
    for step, message in zip(("predict_step", "test_step"), found, strict=True):
        assert f"the {step} may read a file or a folder in Python, in " in message
        assert "ReadsFromOutside.length_of_a_file" in message


@pytest.mark.parametrize("case", ["by a test_step", "while it is built", "by a prediction"])
@behaviour(verification.a_switched_boolean, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_boolean_that_a_step_switches_is_told(results: list[Any], case: str, place: str) -> None:
    [[message]] = results
    words = {
        "by a test_step": "the test_step changes SwitchesInTests.first of ",
        "while it is built": "SetsItself.ready has changed in Python while the model was built, so",
        "by a prediction": "the predict_step changes SetsItself.ready of ",
    }
    if case == "by a prediction" and place != ONE_DEVICE:
        words[case] = "ModelError: the predict_step switches SetsItself.ready in Python, so the"
    assert message.startswith(words[case])


@pytest.mark.parametrize("case", ["by Keras", "in Python, too"])
@behaviour(verification.traces_of_a_step_with_draws, at=[TWO_REPLICAS])
def test_a_step_that_draws_by_keras_is_traced_once(results: list[Any], case: str) -> None:
    # Plain Keras traces it twice, which matters if the step draws in Python.
    assert results == [2 if case == "by Keras" else 4]


@pytest.mark.parametrize("case", ["own", "of Keras"])
@behaviour(verification.warnings_of_eager_code, at=[ONE_DEVICE, TWO_REPLICAS, TWO_WORKERS])
def test_eager_code_of_the_user_is_told_once_for_each_step(
    results: list[Any], place: str, case: str
) -> None:
    of_chief, *of_others = results
    is_told = case == "own" and place != ONE_DEVICE
    steps = ["train_step", "test_step", "predict_step"] if is_told else []
    assert len(of_chief) == len(steps)
    for step, message in zip(steps, of_chief, strict=True):
        assert f"runs the Python code of the {step} with its own rows. " in message
    assert not any(of_others)


@pytest.mark.parametrize("case", ["adam eager", "adam graph", "sgd eager"])
@behaviour(verification.warnings_of_unused_slots, at=[ONE_DEVICE, TWO_REPLICAS, TWO_WORKERS])
def test_slots_that_plain_keras_does_not_make_are_told(results: list[Any], case: str) -> None:
    """The last of two layers is updated. Adam has two slots for each of its weights."""
    of_chief, *of_others = [told for told, _ in results]
    slots = {"adam eager": 2 * 4, "adam graph": 2 * 2, "sgd eager": 0}
    assert [count - 2 for _, count in results] == [slots[case]] * len(results)
    assert len(of_chief) == (case == "adam eager")
    assert not any(of_others)


@behaviour(verification.wrong_steps_counted_in_python, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_number_that_counts_is_not_taken_for_rounding(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "differs from one device" in message) == ("VerificationError", True)


@pytest.mark.parametrize("case", ["", "rows", "printed", "looped"])
@behaviour(verification.rows_of_one_device, at=few(TWO_REPLICAS, of=SEVERAL))
def test_one_device_first_computes_one_row(results: list[Any], case: str) -> None:
    """This optimizes its graph. A step that fails for one row is still compared.

    A step that prints, or that loops, does not compute one row by itself.
    """
    first = [] if case in ("printed", "looped") else [[1, 1]]
    assert all(worker == ["same", [*first, [15, 1], [15, 1]]] for worker in results)


@behaviour(
    verification.verified_biases_before_batch_normalization, at=few(TWO_REPLICAS, of=SEVERAL)
)
def test_rounding_of_sums_that_cancel_out_is_no_difference(results: list[Any]) -> None:
    assert all(worker == ["same", True] for worker in results)


@behaviour(verification.verified_again_from_other_weights, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_difference_that_disappears_with_other_weights_is_rounding(results: list[Any]) -> None:
    assert all(worker == ["same", 2, True] for worker in results)


@behaviour(verification.state_after_a_failed_verification, at=few(TWO_WORKERS, of=SEVERAL))
def test_a_failed_verification_leaves_the_model_untrained(results: list[Any]) -> None:
    assert all(worker == ["VerificationError", True, 0] for worker in results)


@behaviour(verification.verified_with_a_learning_rate_of_zero, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_learning_rate_of_zero_does_not_hide_a_wrong_gradient(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "the gradient of" in message) == ("VerificationError", True)


@behaviour(verification.verified_with_a_step_that_is_an_attribute, at=[TWO_REPLICAS])
def test_a_step_that_is_an_attribute_stays(results: list[Any]) -> None:
    [(verdict, losses, is_kept)] = results
    assert (verdict, is_kept) == ("same", True)
    assert len(losses) == 2


@behaviour(verification.steps_of_passes_that_count, at=[ONE_DEVICE])
def test_passes_are_verified_on_one_replica(errors: list[list[str]]) -> None:
    [(error, message)] = errors
    assert error == "VerificationError"
    assert "on 1 replica the variable" in message
    assert "Leave --microbatches out" in message


@pytest.mark.parametrize("case", ["keras", "own"])
@behaviour(verification.passes_that_count_their_rows, at=few(ONE_DEVICE, of=EVERYWHERE))
def test_passes_that_count_their_rows_have_the_numbers_of_one_device(results: list[Any]) -> None:
    assert set(results) == {"same"}


@behaviour(verification.passes_with_losses_of_layers, at=few(ONE_DEVICE, of=EVERYWHERE))
def test_passes_with_losses_of_layers_alone_have_the_numbers_of_one_device(
    results: list[str],
) -> None:
    assert set(results) == {"same"}


@behaviour(verification.warnings_of_passes_that_normalize, at=[ONE_DEVICE, TWO_WORKERS])
def test_passes_of_batch_normalization_are_told(results: list[Any]) -> None:
    assert results == [[0, 1, 0], [0, 0, 0]][: len(results)]


@pytest.mark.parametrize("case", ["clipnorm", "global_clipnorm"])
@behaviour(verification.verified_with_clipped_gradients, at=few(TWO_REPLICAS, of=SEVERAL))
def test_clipping_does_not_hide_a_wrong_gradient(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "the gradient of" in message) == ("VerificationError", True)


@pytest.mark.parametrize("case", ["graph", "eager"])
@behaviour(verification.batches_with_and_without_verification, at=few(TWO_REPLICAS, of=SEVERAL))
def test_the_first_train_on_batch_is_verified(results: list[Any]) -> None:
    assert all(worker == ["same", 1, True, True] for worker in results)


@pytest.mark.parametrize("case", ["loss"])
@behaviour(verification.train_on_batch_with_a_mistake, at=few(TWO_WORKERS, of=SEVERAL))
def test_a_mistake_in_train_on_batch_is_described(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "the gradient of" in message) == ("VerificationError", True)


@pytest.mark.parametrize("case", ["train", "epoch", "train_batch"])
@behaviour(verification.callback_before_the_first_step, at=few(TWO_REPLICAS, of=SEVERAL))
def test_the_step_has_what_callbacks_set_before_it(results: list[Any], one_device: Any) -> None:
    for history, is_verified in results:
        assert np.asarray(history) == pytest.approx(np.asarray(one_device[0]), rel=1e-6)
        assert is_verified


@behaviour(verification.callback_of_the_chief_alone, at=[TWO_WORKERS])
def test_workers_with_different_callbacks_compare_at_the_same_time(results: list[Any]) -> None:
    assert results == ["same", "same"]


@pytest.mark.parametrize("case", ["train_on_batch", "fit"])
@behaviour(verification.other_batches_on_each_worker, at=[TWO_WORKERS])
def test_other_batches_on_each_worker_are_named(errors: list[list[str]]) -> None:
    for error, message in errors:
        assert (error, "read different batches" in message) == ("DataError", True)


@behaviour(verification.reasons_to_skip_verification, at=few(TWO_REPLICAS, of=SEVERAL))
def test_models_that_are_not_verified(results: list[Any]) -> None:
    for unsynchronized, microbatches, plain in results:
        assert "sync_batch_norm=False" in unsynchronized
        assert "microbatches" in microbatches
        assert plain is None


@behaviour(verification.batches_after_verification, at=few(TWO_WORKERS, of=EVERYWHERE))
def test_verification_takes_no_batch_from_fit(results: list[Any]) -> None:
    for worker in results:
        assert len(worker) == 4
        assert all(each == ["same", True] for each in worker.values()), worker
