"""Lets a grid search of KerasTuner that is started again go on.

KerasTuner 1.4 does not save the position in the grid, and ends a search that is started again
without a message.

| what | private name | upstream | can go when |
|---|---|---|---|
| `restore_position` | `GridSearchOracle._ordered_ids`, `_populate_next`, `_compare` | none | `tests/run/test_tuning.py::test_keras_tuner_alone_still_ends_a_grid_search_that_is_started_again` fails |
"""  # noqa: E501

from __future__ import annotations

import functools

from keras_tuner.oracles import GridSearchOracle


def restore_position(oracle: GridSearchOracle) -> None:
    """Computes the position in the grid from the trials that the oracle has loaded.

    Args:
        oracle: the oracle of a tuner. It is changed.
    """

    def compared(one: str, other: str) -> int:
        values = (oracle.trials[trial_id].hyperparameters.values for trial_id in (one, other))
        return int(oracle._compare(*values))

    oracle._populate_next = sorted(oracle.trials, key=functools.cmp_to_key(compared))
    for trial_id in oracle._populate_next:
        oracle._ordered_ids.insert(trial_id)
