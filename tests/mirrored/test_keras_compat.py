"""Each private touch of Keras: a test that fails when Keras no longer needs it.

When one fails after an upgrade, look whether `keras_compat` can lose that function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from tfmulti import keras_compat

Behaviours = Callable[..., list[dict[str, Any]]]


def test_upstream_fit_still_fails_on_several_workers(behaviours: Behaviours) -> None:
    """keras#20585: the reason for `build_from_specs`, and for a fit of our own."""
    for worker in behaviours("multi_worker_mirrored", 2):
        assert worker["upstream_fit"]["error"][0] == "ValueError"


def test_upstream_fit_still_fails_on_an_uneven_first_batch(behaviours: Behaviours) -> None:
    assert "AddN" in behaviours("mirrored", 2)[0]["upstream_uneven_first_batch"]["error"][1]


def test_upstream_still_divides_losses_by_the_replicas(behaviours: Behaviours) -> None:
    """The reason for `losses_of_one_device`: divided without it, whole inside it."""
    for kind in ("mirrored", "multi_worker_mirrored"):
        assert behaviours(kind, 2)[0]["upstream_loss_is_divided_by_replicas"] == [0.5, 1.0]


def test_upstream_still_clips_before_reducing(behaviours: Behaviours) -> None:
    """The reason for `take_reduced_gradients`.

    The replicas' gradients are 3 and 0, their mean is 1.5, and a value is clipped at 2. The
    global gradient is not clipped; Keras clips replica 0's part to 2 before it sums.
    """
    alone, mended = behaviours("mirrored", 2)[0]["upstream_clips_before_reducing"]
    assert mended == pytest.approx(-1.5)
    assert alone == pytest.approx(-2.0)


def test_data_adapters_are_still_not_exported() -> None:
    assert not hasattr(keras.utils, "get_data_adapter")
    assert callable(keras_compat.data_adapters.get_data_adapter)


def test_backup_and_restore_still_speaks_through_a_private_name() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert keras_compat.initial_epoch_of(model, 2) == 2
    model._initial_epoch = 5
    assert keras_compat.initial_epoch_of(model, 2) == 5
