"""Imports every family of programs, so that `PROGRAMS` is complete."""

from __future__ import annotations

import importlib
import os

from tests.programs.registry import PROGRAMS

FAMILIES = (
    "guides",
    "gan",
    "autoencoders",
    "diffusion",
    "contrastive",
    "transformers",
    "supervised",
    "optimizers",
    "second_order",
    "late_effects",
    "metrics",
    "layers_with_state",
    "datasets",
    "callbacks",
    "precision",
    "keras_classes",
    "keras_io",
)

for family in FAMILIES:
    importlib.import_module(f"tests.programs.{family}")


# A program takes some seconds at each place. So the tests run only these programs, one of each kind
# of value in a step. Before a release, `PROGRAMS=all pytest tests/programs` runs all programs.
CORE = (
    "logs_of_all_metrics",
    "logs_of_none_and_texts",
    "gradient_of_a_vector",
    "gradient_of_a_sum",
    "sum_over_a_constant_batch_size",
    "root_of_a_mean",
    "weights_normalized_over_the_batch",
    "loss_of_all_pairs_in_the_step",
    "queue_of_embeddings",
    "vae",
    "vq_vae_and_normalization",
    "wgan_with_gradient_penalty",
    "gan_with_trackers_made_by_compile",
    "diffusion_with_averaged_weights",
    "patches_with_learned_positions",
    "several_inputs_and_outputs_by_name",
    "miniature_gpt",
    "translation_with_masks",
    "recurrent_with_masks",
    "captions_in_several_updates",
    "loss_class_of_one_number_on_a_softmax",
    "results_under_other_keys",
    "metric_that_counts_batches",
    "overwritten_states_of_metrics",
    "weights_of_trackers",
    "metric_built_in_the_step",
    "subclass_of_a_loss",
    "outputs_that_are_no_rows",
    "states_in_conditions",
    "clipped_by_the_optimizer",
    "metrics_of_selected_and_mixed_rows",
    "activity_regularizer_and_normalization",
    "minibatch_standard_deviation",
    "rows_mixed_with_other_rows",
    "softmax_over_the_rows",
    "axes_of_the_rows",
    "activation_that_mixes_rows",
    "normalization_inside_a_recurrent_cell",
    "recurrent_cell_and_scan",
    "draws_of_tf_random",
    "cached_and_shuffled",
    "accumulated_by_hand",
    "normalized_gradients",
    "subclassed_and_not_built",
    "rows_in_the_order_of_their_times",
    "functions_within_the_step",
    "function_as_the_loss",
    "clipped_twice",
    "clipped_gradients_of_lookups",
    "optimizer_held_by_a_layer",
    "texts_in_the_step",
    "part_without_rows",
    "penalty_in_a_condition",
    "gradients_in_a_condition",
    "loss_in_a_condition",
    "sum_in_a_condition",
    "gradient_through_two_steps",
    "gradient_through_a_stateless_call",
    "gradient_penalty_through_normalization",
    "ctc_in_an_added_loss",
    "keras_losses",
    "keras_optimizers",
)
CHOSEN = tuple(PROGRAMS) if os.environ.get("PROGRAMS") == "all" else CORE

__all__ = ["CHOSEN", "CORE", "FAMILIES", "PROGRAMS"]
