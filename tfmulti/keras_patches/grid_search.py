"""Lets a grid search of KerasTuner continue after a restart.

KerasTuner 1.4 does not save the position in the grid. A search that is started again ends without a
message.

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

    def compare(first_id: str, second_id: str) -> int:
        values = (
            oracle.trials[trial_id].hyperparameters.values for trial_id in (first_id, second_id)
        )
        return int(oracle._compare(*values))

    oracle._populate_next = sorted(oracle.trials, key=functools.cmp_to_key(compare))
    for trial_id in oracle._populate_next:
        oracle._ordered_ids.insert(trial_id)
