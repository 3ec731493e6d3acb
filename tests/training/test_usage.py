"""Tests what users do besides plain training, on two workers and on two replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.support.behaviours import behaviour, custom_steps, numbers, usage
from tests.support.behaviours.common import X
from tests.support.places import (
    EVERYWHERE,
    ONE_DEVICE,
    SEVERAL,
    THREE_WORKERS,
    TWO_REPLICAS,
    TWO_WORKERS,
    few,
)

pytestmark = pytest.mark.multiworker


def flat(value: Any) -> list[float]:
    """Returns the numbers in nested lists and dictionaries."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list):
        return [x for item in value for x in flat(item)]
    return [float(value)]


THE_SAME_ON_REPLICAS = [
    usage.one_row_in_the_last_batch,
    usage.validation_on_a_dataset,
    usage.optimizer_in_a_dict_of_lists,
    usage.several_inputs_and_outputs,
    usage.dropout_after_a_custom_layer,
    usage.mean_over_rows_before_1200_operations,
    usage.gan_with_two_optimizers,
    usage.optimizers_built_outside_the_scope,
    usage.optimizer_of_a_callback,
    numbers.custom_step_with_two_adams,
    numbers.optimizer_for_each_layer,
    numbers.custom_step_in_a_tf_function,
    numbers.custom_step_with_a_summed_loss,
    custom_steps.metrics_that_compile_makes,
    custom_steps.batches_of_three_inputs,
    custom_steps.batches_in_dicts,
    custom_steps.batches_of_one_tensor,
    custom_steps.batch_normalization_in_an_unrolled_cell,
]
# Each worker has callbacks, data, generators of random numbers and files of its own.
THE_SAME_ON_WORKERS = [
    usage.early_stopping_and_learning_rate_callbacks,
    usage.workers_with_different_seeds,
    usage.shuffled_arrays,
    usage.dataset_shuffled_with_a_seed,
    usage.pydataset_without_and_with_reader_threads,
    usage.python_generator,
    usage.evaluate_after_stop_training,
    usage.embedding,
    usage.random_draws_without_a_seed,
    usage.every_worker_saves_to_one_file,
    usage.calls_on_single_batches,
    custom_steps.batch_normalization_in_a_cell,
    custom_steps.learning_rate_halved_by_a_callback,
]


@pytest.mark.parametrize(
    ("behaviour", "place"),
    [
        (function, place)
        for functions, places in (
            (THE_SAME_ON_REPLICAS, few(TWO_REPLICAS, of=SEVERAL)),
            (THE_SAME_ON_WORKERS, few(TWO_WORKERS, of=SEVERAL)),
        )
        for function in functions
        for place in places
    ],
)
def test_the_same_as_on_one_device(results: list[Any], one_device: Any) -> None:
    for worker in results:
        assert flat(worker) == pytest.approx(flat(one_device), abs=1e-6, rel=1e-6)


@behaviour(usage.pydataset_without_and_with_reader_threads, at=[ONE_DEVICE])
def test_reader_threads_do_not_change_the_order_of_a_pydataset(results: list[Any]) -> None:
    [[without, with_readers]] = results
    assert with_readers == without


@behaviour(usage.files_of_callbacks_in_a_shared_folder, at=[TWO_WORKERS])
def test_callbacks_write_their_files_once(results: list[Any]) -> None:
    assert results == [[4, 1, ["best.keras", "log.csv", "tb", "w.weights.h5"]], None]


@behaviour(usage.path_of_a_model_checkpoint, at=[TWO_WORKERS])
def test_a_model_checkpoint_has_its_path_after_a_fit(results: list[Any]) -> None:
    assert results == [[True, True]] * 2


@behaviour(usage.one_worker_stops_within_an_epoch, at=SEVERAL)
def test_one_worker_stops_all_within_an_epoch(results: list[Any], place: str) -> None:
    # The vote of the worker reaches the others with the next step.
    steps = 6 if place == TWO_REPLICAS else 7
    assert all(worker == [steps, 2] for worker in results)


@behaviour(usage.one_worker_stops_at_the_end_of_an_epoch, at=few(TWO_WORKERS, of=SEVERAL))
def test_one_worker_stops_all_at_the_end_of_an_epoch(results: list[Any]) -> None:
    assert all(worker == 2 for worker in results)


@behaviour(usage.calls_after_a_failed_fit, at=few(*SEVERAL, of=EVERYWHERE))
def test_a_failed_fit_does_not_change_later_calls(results: list[Any]) -> None:
    """Workers connect again after the failure."""
    for raised, (after_failure, without_failure) in results:
        assert raised in ("InvalidArgumentError", "UnavailableError")
        assert after_failure == without_failure


@behaviour(usage.global_generators_after_each_call, at=few(TWO_WORKERS, of=EVERYWHERE))
def test_no_call_draws_from_the_global_generators(results: list[Any]) -> None:
    for before, *after in results:
        assert after == [before] * 4


@behaviour(usage.global_generators_after_a_draw_without_a_seed, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_a_step_that_draws_without_a_seed_draws_one_seed(results: list[Any]) -> None:
    """As in Keras, it is one draw from Python's generator, with any number of replicas."""
    for before, after_one_draw, after_fit in results:
        assert after_fit == after_one_draw != before


@behaviour(usage.two_fits_shuffle_differently, at=few(TWO_WORKERS, of=EVERYWHERE))
def test_two_fits_shuffle_differently(results: list[Any]) -> None:
    for first, second in results:
        assert first != second


@behaviour(usage.nan_on_one_replica_stops_all, at=SEVERAL)
def test_nan_on_one_replica_stops_all(results: list[Any]) -> None:
    for epochs, loss in results:
        assert epochs == 1
        assert math.isnan(float(loss))


@behaviour(usage.batch_normalization_and_dropout, at=few(TWO_REPLICAS, of=SEVERAL))
def test_batch_normalization_and_dropout_train(results: list[Any]) -> None:
    assert all(worker is True for worker in results)


@behaviour(usage.logs_that_are_not_metrics, at=few(TWO_REPLICAS, of=SEVERAL))
def test_logs_that_are_not_metrics_are_averaged_by_rows(
    results: list[Any], one_device: Any
) -> None:
    for log, mean, losses in results:
        assert log == pytest.approx(mean, abs=1e-6)
        assert losses == pytest.approx(one_device[2], abs=1e-6)


@behaviour(usage.mixed_float16, at=few(TWO_WORKERS, of=SEVERAL))
def test_mixed_float16_trains_alike_on_all_workers(results: list[Any]) -> None:
    """There is no comparison with one device, because rounding decides which steps overflow."""
    first, *others = results
    losses, scale = first
    assert losses[-1] < losses[0]
    assert scale > 0
    assert all(other == first for other in others)


@behaviour(usage.saved_inside_another_model, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_registered_model_inside_another_one_can_be_loaded(results: list[Any]) -> None:
    assert results == [True]


@behaviour(usage.saved_loaded_and_trained_again, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_saved_model_is_plain_keras_and_trains_on(results: list[Any]) -> None:
    assert all(worker == ["Sequential", True, True, True] for worker in results)


@behaviour(usage.a_second_model_that_is_not_prepared, at=[ONE_DEVICE, TWO_REPLICAS])
def test_a_model_that_is_not_prepared_is_told_once(results: list[Any], place: str) -> None:
    assert results == [[0, 0, int(place == TWO_REPLICAS), 0]]


@pytest.mark.parametrize(
    "case",
    [
        "before fit",
        "rate in a callback",
        "before evaluate",
        "before predict",
        "before train_on_batch",
        "between calls of predict_on_batch",
    ],
)
@behaviour(usage.weights_set_on_the_chief_alone, at=[TWO_WORKERS])
def test_workers_with_different_weights_are_told(errors: list[list[str]], case: str) -> None:
    name = "learning_rate" if case == "rate in a callback" else "kernel"
    for kind, message in errors:
        assert kind == "ModelError"
        assert message.startswith("the workers have different weights: ")
        assert f"{name}' has other values on worker 1 than on the chief" in message


@pytest.mark.parametrize("case", ["of the model", "of the callback"])
@behaviour(usage.a_metric_updated_by_a_callback, at=[TWO_REPLICAS, TWO_WORKERS])
def test_a_metric_that_a_callback_updates_is_told_once_on_workers(
    results: list[Any], place: str, case: str
) -> None:
    is_told = place == TWO_WORKERS and case == "of the model"
    assert [len(told) for told in results] == [int(is_told)] * len(results)


@behaviour(usage.dataset_shorter_than_an_epoch, at=few(TWO_WORKERS, of=SEVERAL))
def test_a_dataset_that_ends_early_ends_the_epoch(results: list[Any]) -> None:
    assert all(worker == 2 for worker in results)


MISTAKES = [
    (usage.fit_without_compile, "ModelError", "Call model.compile"),
    (usage.train_function_by_hand, "ModelError", "is called by fit and evaluate alone"),
    (usage.prepare_a_function, "ModelError", "takes a keras.Model, not a function"),
    (usage.overridden_make_train_function, "ModelError", "Override train_step instead"),
    (usage.distributed_dataset, "ModelError", "Give the tf.data.Dataset of global batches"),
    (usage.dataset_with_separate_targets, "DataError", "y does not go with a _BatchDataset"),
    (usage.class_weight_and_sample_weight, "DataError", "Give one of them"),
    (usage.validation_split_of_a_dataset, "DataError", "validation_split needs arrays"),
    (usage.validation_split_of_all_rows, "DataError", "leaves one part empty"),
    (usage.optimizer_in_a_closure, "ModelError", "Keep it as an attribute of the model"),
    (
        usage.optimizer_of_a_callback_outside_the_scope,
        "ModelError",
        "was made outside the strategy's scope. Make it in `with strategy.scope()`",
    ),
    (usage.class_weight_with_two_outputs, "DataError", "several parts"),
    (usage.ragged_input, "DataError", "a RaggedTensor cannot be read by rows"),
    (usage.empty_dataset, "DataError", "no batches"),
    (usage.evaluate_an_empty_dataset, "DataError", "no batches"),
    (numbers.microbatches_with_two_updates, "ModelError", "updates more than once a step"),
    (numbers.microbatches_with_a_scalar_loss, "ModelError", "which --microbatches splits"),
    (numbers.microbatches_with_spectral_normalization, "ModelError", "changes its weights in each"),
    (numbers.microbatches_in_float8, "ModelError", "takes its gradient as its value"),
    (numbers.eager_step_with_a_loss_that_sums, "ModelError", "reduction='sum'"),
    (numbers.microbatches_with_custom_clipping, "ModelError", "knows only after the last pass"),
    (numbers.zero_microbatches, "ConfigError", "must be at least 1"),
    (numbers.fewer_targets_than_inputs, "DataError", "have different numbers of rows"),
    (numbers.fewer_targets_in_the_second_batch, "DataError", "have different numbers of rows"),
    (numbers.batches_with_a_scalar, "DataError", "without rows"),
    (numbers.update_in_a_condition, "ModelError", "inside a condition"),
    (numbers.aug_mix_in_the_model, "ModelError", "Put it into the data (dataset.map)"),
    (numbers.stateful_lstm, "ModelError", "keeps a state for each row"),
    (numbers.result_that_changes_the_state, "ModelError", "changes its variable 'halved/total'"),
    (numbers.metric_of_a_bool, "ModelError", "'above/seen' is a bool"),
    (custom_steps.a_text_of_the_inputs, "ModelError", "'text' is a text that the step computes"),
]


# All workers must find a mistake in the data, or the others would wait for the one that does.
@pytest.mark.parametrize(
    ("behaviour", "error", "part", "place"),
    [
        (*mistake, place)
        for mistake in MISTAKES
        for place in few(TWO_WORKERS if mistake[1] == "DataError" else TWO_REPLICAS, of=SEVERAL)
    ],
)
def test_a_mistake_is_named(errors: list[list[str]], error: str, part: str) -> None:
    for kind, message in errors:
        assert kind == error
        assert part in message


@behaviour(usage.what_a_step_finds_of_the_strategy, at=[TWO_REPLICAS, TWO_WORKERS])
def test_the_users_code_in_a_step_finds_one_device(results: list[Any]) -> None:
    for found in results:
        assert found == {
            "user": [1, 1, False],
            "autograph": [1, 1, False],
            "keras": [2, 2, True],
        }


@behaviour(usage.prediction_of_fixed_rows, at=[TWO_REPLICAS])
def test_a_layer_that_takes_its_rows_from_a_shape_is_told_what_to_do(errors: list[Any]) -> None:
    [(kind, message)] = errors
    assert kind == "ModelError"
    assert message.startswith("the step computes with None: ")
    assert "so x.shape[0] is None. Take keras.ops.shape(x)[0]" in message


ELSEWHERE = ["all in the scope", "all outside", "rows in the scope", "rows outside"]


@behaviour(custom_steps.predictions_of_one_number, at=[ONE_DEVICE])
def test_a_prediction_may_be_one_number(results: list[Any]) -> None:
    [(of_keras, prepared)] = results
    assert prepared == of_keras


@pytest.mark.parametrize("case", ELSEWHERE)
@behaviour(usage.variable_elsewhere, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_variable_that_is_not_found_is_refused(errors: list[list[str]]) -> None:
    for kind, message in errors:
        assert kind == "ModelError"
        assert "'Variable:0', which was no attribute of the model" in message


@pytest.mark.parametrize("case", ELSEWHERE)
@behaviour(usage.variable_elsewhere, at=[ONE_DEVICE])
def test_one_device_may_change_a_variable_that_is_not_found(results: list[Any]) -> None:
    means = [X[:20].mean(), X[20:40].mean()]
    assert results[0] == pytest.approx([sum(means)])


@behaviour(custom_steps.log_of_rows, at=[ONE_DEVICE, TWO_WORKERS])
def test_replicas_average_a_log_of_rows_with_a_warning(results: list[Any], place: str) -> None:
    for rank, (log, losses, warned) in enumerate(results):
        expected = losses if place == ONE_DEVICE else np.mean(losses)
        assert log == pytest.approx(expected, rel=1e-6)
        assert warned == (rank == 0 and place != ONE_DEVICE)


@pytest.mark.parametrize("case", ["graph", "eager"])
@behaviour(custom_steps.texts_that_count_calls, at=[TWO_REPLICAS])
def test_other_logs_on_each_replica_are_refused(errors: list[list[str]]) -> None:
    assert [kind for kind, _ in errors] == ["ModelError"]
    assert "'text' is b'call 1' on one replica and b'call 2' on another" in errors[0][1]


@pytest.mark.parametrize("case", ["eager"])
@behaviour(custom_steps.texts_that_count_calls, at=[ONE_DEVICE])
def test_an_eager_step_may_return_another_text_each_time(results: list[Any]) -> None:
    assert results == ["[array(b'call 3', dtype=object)]"]


@behaviour(
    usage.different_data_on_each_worker,
    usage.batches_whose_digests_differ_by_one,
    usage.other_batches_to_predict_on_each_worker,
    usage.another_batch_to_predict_on_each_worker,
    at=[TWO_WORKERS],
)
def test_different_data_on_workers_is_an_error(errors: list[list[str]]) -> None:
    for kind, message in errors:
        assert (kind, "shuffle(seed=" in message) == ("DataError", True)


@behaviour(
    usage.other_values_to_predict_on_each_worker,
    usage.more_rows_to_predict_on_one_worker,
    at=[TWO_WORKERS],
)
def test_different_rows_to_predict_are_an_error(errors: list[list[str]]) -> None:
    for kind, message in errors:
        assert (kind, "the workers have different data" in message) == ("DataError", True)


@behaviour(usage.numbers_gathered_from_each_worker, at=[TWO_WORKERS, THREE_WORKERS])
def test_gathered_numbers_and_bytes_are_exact(results: list[Any]) -> None:
    numbers = [[-(2**62) - rank, 0, rank] for rank in range(len(results))]
    assert results == [[numbers, [True] * 7]] * len(results)


@behaviour(usage.numbers_gathered_without_a_channel, at=[TWO_WORKERS])
def test_numbers_and_bytes_are_exact_where_a_worker_cannot_reach_another(
    results: list[Any],
) -> None:
    numbers = [[-(2**62), 0, 0], [-(2**62) - 1, 0, 1]]
    assert results == [[numbers, [True] * 7, True]] * 2


@behaviour(usage.numbers_gathered_where_a_worker_cannot_listen, at=[TWO_WORKERS])
def test_numbers_and_bytes_are_exact_where_a_worker_cannot_listen(results: list[Any]) -> None:
    numbers = [[-(2**62), 0, 0], [-(2**62) - 1, 0, 1]]
    assert results == [[numbers, [True] * 7]] * 2


@behaviour(usage.exchanges_after_errors, at=[TWO_WORKERS])
def test_no_exchange_gets_the_messages_of_another_one(results: list[Any]) -> None:
    for rank, (message, again, kind, at_last) in enumerate(results):
        other = 1 - rank
        names = ("2 numbers", "bytes")
        assert message == (
            f"worker {other} is in another call: it sends {names[other]!r}, and not {names[rank]!r}"
        )
        assert (again, at_last) == ([[0], [1]], [[0], [1]])
        assert kind == ("SystemExit", "UnavailableError")[rank]


@behaviour(usage.what_travels_over_the_channel_after_a_step, at=[TWO_WORKERS])
def test_a_worker_that_ends_after_a_vote_or_a_checkpoint_leaves_no_message_unsent(
    results: list[Any],
) -> None:
    assert results == [[True, True, True]] * 2


@behaviour(usage.heartbeat_while_it_waits_for_bytes, at=[TWO_WORKERS])
def test_a_worker_that_waits_for_bytes_is_not_stuck_by_itself(results: list[Any]) -> None:
    assert results == [True, True]


@behaviour(usage.backup_and_restore_after_an_error, at=[ONE_DEVICE, TWO_REPLICAS])
def test_backup_and_restore_resumes_in_one_process(results: list[Any]) -> None:
    assert results == [[2, 3]]


@behaviour(usage.backup_and_restore, usage.orbax_checkpoint, at=[TWO_WORKERS])
def test_a_callback_of_one_process_is_refused_on_several_workers(errors: list[list[str]]) -> None:
    for kind, message in errors:
        assert kind == "ModelError"
        assert "does not work with several workers" in message
        assert "Use tfmulti.Backup(folder) instead" in message


@behaviour(usage.pickled_model, at=few(TWO_REPLICAS, of=SEVERAL))
def test_a_pickled_model_has_its_weights(results: list[Any]) -> None:
    assert all(worker is True for worker in results)
