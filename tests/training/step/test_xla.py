"""Tests that XLA compiles the computing of a replica, and no communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.behaviours import behaviour, xla
from tests.support.forked import run
from tests.support.places import (
    EVERYWHERE,
    ONE_DEVICE,
    ONE_REPLICA,
    ONE_WORKER,
    TWO_REPLICAS,
    TWO_WORKERS,
    few,
)
from tests.support.processes import ONE_THREAD
from tfmulti.training.step.xla import is_dense

pytestmark = pytest.mark.multiworker

# Places of one replica, whose whole step is compiled.
ALONE = (ONE_DEVICE, ONE_REPLICA)

# Why XLA cannot compile a network. The second reason holds only for several replicas.
OBSTACLES = {
    "dense": None,
    "normalized": "takes the statistics of all replicas",
    "dropped": None,
    "truncated": "draws from truncated_normal",
    "by TensorFlow": "draws by StatelessRandomNormalV2",
}


DETERMINISTIC = """
import keras, numpy as np, tensorflow as tf, tfmulti
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8, 1)), keras.layers.MaxPooling1D(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
tfmulti.prepare(model, jit_compile=True)
model.fit(np.ones((8, 8, 1), np.float32), np.ones((8, 4, 1)), verbose=0)
"""


@behaviour(xla.passes_compiled_by_xla, at=few(*ALONE, TWO_WORKERS, of=(ONE_REPLICA, *EVERYWHERE)))
@pytest.mark.parametrize("network", OBSTACLES)
def test_xla_does_not_change_the_numbers(results: list[Any], place: str, network: str) -> None:
    for worker in results:
        plain, by_xla = worker[network]
        local_replicas = 2 if place == TWO_REPLICAS else 1
        obstacle = OBSTACLES[network]
        if place in ALONE and network == "normalized":
            obstacle = None
        assert plain["functions"] == 0
        assert plain["warned"] == []
        for one, other in zip(plain["weights"], by_xla["weights"], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
        for key, values in plain["logs"].items():
            np.testing.assert_allclose(by_xla["logs"][key], values, rtol=1e-6)
        for one, other in zip(plain["batches"], by_xla["batches"], strict=True):
            assert other == pytest.approx(one, rel=1e-5)
        assert by_xla["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-5)
        np.testing.assert_allclose(by_xla["predicted"], plain["predicted"], rtol=0, atol=1e-6)
        assert by_xla["collectives"] == plain["collectives"]
        if obstacle:
            assert by_xla["functions"] == 0
            assert all(obstacle in text for text in by_xla["warned"])
            assert by_xla["warned"]
        else:
            assert by_xla["warned"] == []
            assert by_xla["functions"] == local_replicas
            # The forward pass has two products. The backward pass has two for each layer, less
            # the one for the inputs.
            assert by_xla["products"] == local_replicas * (2 + 3)
            assert by_xla["collectives inside"] == 0
            # A single replica compiles the update, too, and `evaluate` and `predict`.
            assert bool(by_xla["updates"]) == (place in ALONE)
            assert by_xla["in evaluate and predict"] == [int(place in ALONE)] * 2


def test_sparse_and_ragged_tensors_and_texts_are_not_dense() -> None:
    assert is_dense((tf.ones(2), None, 3))
    assert not is_dense((tf.ones(2), None, tf.constant(["text"])))
    assert not is_dense((tf.sparse.from_dense([[1.0]]), tf.ones(1)))
    assert not is_dense(tf.ragged.constant([[1.0], []]))


@behaviour(xla.custom_step_compiled, at=[*ALONE, ONE_WORKER])
def test_a_single_replica_compiles_a_custom_step(results: list[Any]) -> None:
    (logs, weights, none, _), *by_xla = results[0]
    assert none == 0
    for logs_by_xla, weights_by_xla, functions, warned in by_xla:
        assert (functions, warned) == (1, [])
        for key, values in logs.items():
            assert logs_by_xla[key] == pytest.approx(values, rel=1e-5)
        for one, other in zip(weights, weights_by_xla, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@behaviour(xla.predictions_of_an_unbuilt_model, at=ALONE)
def test_a_model_that_predict_builds_has_the_same_weights(results: list[Any]) -> None:
    for without, by_xla in results[0]:
        np.testing.assert_allclose(by_xla, without, rtol=0, atol=1e-6)


@behaviour(
    xla.losses_without_reduction, xla.lookups_of_positions, at=few(TWO_REPLICAS, of=EVERYWHERE)
)
def test_xla_knows_the_rows_of_a_replica(results: list[Any]) -> None:
    for without, by_xla in results:
        for one, other in zip(without, by_xla, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@behaviour(
    xla.step_that_xla_cannot_compile,
    xla.batch_that_xla_cannot_compile,
    at=few(ONE_DEVICE, TWO_REPLICAS, of=EVERYWHERE),
)
def test_an_operation_that_xla_does_not_know_is_named(errors: list[list[str]]) -> None:
    for kind, message in errors:
        assert kind == "ModelError"
        assert "text" in message
        assert "does not know the operation AsString. XLA is the default" in message
        assert "--nojit_compile" in message


@pytest.mark.processes
def test_deterministic_operations_are_not_compiled(tmp_path: Path) -> None:
    done = run(["-c", DETERMINISTIC], tmp_path, limit_s=120, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "XLA does not compile this step" in done.stderr
    assert "deterministic" in done.stderr


@behaviour(xla.jit_compile_options, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_the_jit_compile_of_prepare_wins_over_that_of_compile(
    results: list[Any], place: str
) -> None:
    assert all(worker == [2 if place == TWO_REPLICAS else 1, 0, 0] for worker in results)


@behaviour(xla.lines_about_draws, at=few(ONE_DEVICE, TWO_WORKERS, of=EVERYWHERE))
@pytest.mark.parametrize("case", xla.DRAWS)
def test_fit_says_once_that_xla_draws_other_numbers_in_plain_keras(
    results: list[Any], case: str
) -> None:
    chief, *others = results
    assert others == [[]] * len(others)
    assert len(chief) == (case == "dropout by XLA")
    assert all("plain Keras with compile(jit_compile=False)" in line for line in chief)


@behaviour(xla.warnings_of_steps_without_xla, at=few(TWO_REPLICAS, of=EVERYWHERE))
def test_a_warning_says_why_xla_does_not_compile(results: list[Any]) -> None:
    reasons = ["a train_step of your own", "--microbatches", "a layer does not support it"]
    for worker in results:
        for warnings, reason in zip(worker, reasons, strict=True):
            assert len(warnings) == 1
            assert reason in warnings[0]
