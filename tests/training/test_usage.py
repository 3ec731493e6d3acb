"""What users do beside plain training, on two workers and on two replicas of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.multiworker

KINDS = pytest.mark.parametrize("kind", ["mirrored", "multi_worker_mirrored"])
Behaviours = Callable[..., list[dict[str, Any]]]

SAME_EVERYWHERE = [
    "deciding_callbacks_decide_alike",
    "differently_seeded_workers_share_one_order",
    "one_row_in_the_last_batch_shuffled",
    "validation_dataset_beside_arrays",
    "optimizer_in_a_dict",
    "shuffled_arrays",
    "seeded_dataset",
    "shuffled_pydataset",
    "pydataset_with_readers",
    "generator",
    "evaluates_fully_after_a_stop",
    "several_inputs_and_outputs",
    "embedding",
    "draws_without_a_seed_go_on",
    "saved_by_all_to_one_file",
    "dropout_after_a_layer_of_its_own",
    "long_chain_after_a_mean_over_the_rows",
    "two_optimizers",
    "one_batch_at_a_time",
    "two_adams_of_its_own",
    "an_optimizer_for_each_layer",
    "a_step_in_a_function",
    "prepared_before_compile_makes_its_metrics",
    "batches_of_three_inputs",
    "batches_in_dicts",
    "batches_of_one_tensor",
    "batch_normalization_in_an_unrolled_cell",
    "batch_normalization_in_a_cell",
    "sum_in_a_step_of_its_own",
    "numbers_of_the_optimizer_in_a_callback",
]


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        assert "error" not in value, value
        return [x for key in sorted(value) for x in flat(value[key])]
    if isinstance(value, list):
        return [x for item in value for x in flat(item)]
    return [float(value)]


@pytest.mark.parametrize("name", SAME_EVERYWHERE)
def test_the_same_on_one_device_replicas_and_workers(behaviours: Behaviours, name: str) -> None:
    one = flat(behaviours("one_device")[0][name])
    for found in (behaviours("mirrored", 2), behaviours("multi_worker_mirrored", 2)):
        for worker in found:
            assert flat(worker[name]) == pytest.approx(one, abs=1e-6, rel=1e-6)


def test_readers_do_not_change_a_pydatasets_order(behaviours: Behaviours) -> None:
    found = behaviours("one_device")[0]
    assert found["pydataset_with_readers"] == found["shuffled_pydataset"]


def test_files_are_written_once(behaviours: Behaviours) -> None:
    names = ["best.keras", "log.csv", "tb", "w.weights.h5"]
    found = behaviours("multi_worker_mirrored", 2)
    assert found[0]["file_callbacks_share_a_folder"] == [4, 1, names]
    assert found[1]["file_callbacks_share_a_folder"] == "chief's"
    for worker in found:
        assert worker["checkpoints_keep_their_paths"] == [True, True]


@KINDS
def test_one_worker_can_stop_all(behaviours: Behaviours, kind: str) -> None:
    steps = 6 if kind == "mirrored" else 7  # the others hear of it with the next step
    for worker in behaviours(kind, 2):
        assert worker["one_worker_stops_within_an_epoch"] == [steps, 2]
        assert worker["one_worker_stops_at_the_end_of_an_epoch"] == 2


@pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])
def test_a_model_trains_on_after_a_call_that_failed(behaviours: Behaviours, kind: str) -> None:
    """As if that call had not been; workers connect anew for it."""
    workers = behaviours(kind) if kind == "one_device" else behaviours(kind, 2)
    for worker in workers:
        raised, (after, without) = worker["used_after_an_error"]
        assert raised in ("InvalidArgumentError", "UnavailableError")
        assert after == without


EVERYWHERE = pytest.mark.parametrize("kind", ["one_device", "mirrored", "multi_worker_mirrored"])


@EVERYWHERE
def test_no_call_draws_from_the_global_generators(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind) if kind == "one_device" else behaviours(kind, 2):
        before, *after = worker["global_generators_after_each_call"]
        assert after == [before] * 4


@EVERYWHERE
def test_a_step_that_draws_without_a_seed_draws_one_seed(behaviours: Behaviours, kind: str) -> None:
    """As Keras: from Python's generator, once, whatever the number of replicas."""
    for worker in behaviours(kind) if kind == "one_device" else behaviours(kind, 2):
        before, drawn, after = worker["global_generators_after_a_draw_without_a_seed"]
        assert after == drawn != before


@EVERYWHERE
def test_each_fit_has_an_order_of_its_own(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind) if kind == "one_device" else behaviours(kind, 2):
        first, second = worker["two_fits_shuffle_differently"]
        assert first != second


@KINDS
def test_nan_on_one_replica_stops_all(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        epochs, loss = worker["nan_on_one_replica_stops_all"]
        assert epochs == 1
        assert math.isnan(float(loss))


@KINDS
def test_layers_with_state_and_chance_run(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        assert worker["batch_normalization_and_dropout_run"] is True


@KINDS
def test_logs_that_are_no_metrics_are_averaged_by_rows(behaviours: Behaviours, kind: str) -> None:
    one = behaviours("one_device")[0]["logs_that_are_no_metrics"]
    for worker in behaviours(kind, 2):
        found, right, loss = worker["logs_that_are_no_metrics"]
        assert found == pytest.approx(right, abs=1e-6)
        assert loss == pytest.approx(one[2], abs=1e-6)


@KINDS
def test_mixed_float16_trains_alike_on_all_workers(behaviours: Behaviours, kind: str) -> None:
    """Not compared with one device: which steps overflow and are skipped depends on rounding."""
    first, *others = [worker["mixed_float16"] for worker in behaviours(kind, 2)]
    losses, scale = first
    assert losses[-1] < losses[0]
    assert scale > 0
    assert all(other == first for other in others)


@KINDS
def test_saves_plain_keras_and_goes_on_after_loading(behaviours: Behaviours, kind: str) -> None:
    for worker in behaviours(kind, 2):
        assert worker["saved_as_plain_keras_and_loaded_again"] == ["Sequential", True, True, True]


@KINDS
def test_a_dataset_that_ends_early_ends_the_epoch(behaviours: Behaviours, kind: str) -> None:
    assert all(worker["data_that_ends_early"] == 2 for worker in behaviours(kind, 2))


@KINDS
@pytest.mark.parametrize(
    ("name", "kind_of_error", "words"),
    [
        ("not_compiled", "ModelError", "Call model.compile"),
        ("no_keras_model", "ModelError", "takes a keras.Model, not a function"),
        ("a_make_train_function_of_its_own", "ModelError", "Override train_step instead"),
        ("distributed_dataset", "ModelError", "Give the tf.data.Dataset of global batches"),
        ("dataset_with_targets_beside_it", "DataError", "y does not go with a _BatchDataset"),
        ("weights_of_two_kinds", "DataError", "Give one of them"),
        ("validation_split_of_a_dataset", "DataError", "validation_split needs arrays"),
        ("validation_split_of_nothing", "DataError", "leaves one part empty"),
        ("optimizer_out_of_sight", "ModelError", "Keep it as an attribute of the model"),
        ("microbatches_and_two_updates", "ModelError", "updates more than once a step"),
        ("microbatches_and_a_loss_of_one_number", "ModelError", "which --microbatches splits"),
        ("microbatches_and_a_clip_of_its_own", "ModelError", "knows only after the last pass"),
        ("no_microbatches", "ConfigError", "must be at least 1"),
        ("class_weight_of_several_outputs", "DataError", "several parts"),
        ("ragged_array", "DataError", "a RaggedTensor cannot be read by rows"),
        ("parts_of_different_rows", "DataError", "have different numbers of rows"),
        ("parts_of_different_rows_found_later", "DataError", "have different numbers of rows"),
        ("an_update_in_a_condition", "ModelError", "inside a condition"),
        ("a_stateful_layer", "ModelError", "keeps a state for each row"),
        ("a_part_of_one_number", "DataError", "without rows"),
        ("empty_dataset", "DataError", "no batches"),
        ("evaluating_an_empty_dataset", "DataError", "no batches"),
    ],
)
def test_mistakes_are_named(
    behaviours: Behaviours, kind: str, name: str, kind_of_error: str, words: str
) -> None:
    for worker in behaviours(kind, 2):
        error, message = worker[name]["error"]
        assert error == kind_of_error
        assert words in message


@pytest.mark.parametrize(
    "name", ["different_data_on_each_worker", "batches_whose_digests_differ_by_one"]
)
def test_workers_with_different_data_are_told(behaviours: Behaviours, name: str) -> None:
    for worker in behaviours("multi_worker_mirrored", 2):
        error, message = worker[name]["error"]
        assert (error, "shuffle(seed=" in message) == ("DataError", True)


def test_numbers_of_each_worker_are_exact(behaviours: Behaviours) -> None:
    for worker in behaviours("multi_worker_mirrored", 2):
        numbers = [[-(2**62), 0, 0], [-(2**62) - 1, 0, 1]]
        assert worker["numbers_gathered_from_each_worker"] == [numbers, True, True]


def test_backup_and_restore_is_for_one_worker(behaviours: Behaviours) -> None:
    assert behaviours("mirrored", 2)[0]["interrupted_and_restored"] == [2, 3]
    assert behaviours("one_device")[0]["interrupted_and_restored"] == [2, 3]
    for worker in behaviours("multi_worker_mirrored", 2):
        assert worker["backup_and_restore"]["error"][0] == "ModelError"


@KINDS
def test_a_model_is_pickled_as_plain_keras(behaviours: Behaviours, kind: str) -> None:
    assert all(worker["copies"] is True for worker in behaviours(kind, 2))
