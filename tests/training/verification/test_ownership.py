"""Tests which parts of a model are known to be exact; any other part is compared by default."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs.keras_classes import COMPARED
from tfmulti.keras_patches.layers import has_own_layers
from tfmulti.keras_patches.model_structure import has_own_step
from tfmulti.training.verification import compared
from tfmulti.training.verification.ownership import own_parts

MODULES = {
    "LAYERS": keras.layers,
    "LOSSES": keras.losses,
    "METRICS": keras.metrics,
    "OPTIMIZERS": keras.optimizers,
}
# The public names that no program compares, with the reason. A model with one of them is compared
# with one device by default.
NOT_COMPARED = {
    "LAYERS": {
        # Prepared models refuse it.
        "AugMix",
        # They hold code of the user.
        "FlaxLayer",
        "JaxLayer",
        "Lambda",
        "Layer",
        "Pipeline",
        "TFSMLayer",
        "TorchModuleWrapper",
        "Wrapper",
        # They read strings, two inputs or boxes, or need SciPy.
        "ContrastLimitedAdaptiveHistogramEqualization",
        "HashedCrossing",
        "MaxNumBoundingBoxes",
        "MelSpectrogram",
        "STFTSpectrogram",
        "StringLookup",
        "TextVectorization",
        # It is not a layer.
        "InputSpec",
    },
    "LOSSES": {"CTC", "Loss", "ctc"},
    "METRICS": {"Metric"},
    "OPTIMIZERS": {
        # They hold other optimizers.
        "LossScaleOptimizer",
        "MultiOptimizer",
        "OptimizerMap",
        "Optimizer",
    },
}
# These functions are neither losses nor metrics, and `keras.layers` has functions for its classes.
TOOLS = {"deserialize", "get", "serialize"}


def public_parts(module: ModuleType) -> set[Any]:
    """Returns a module's classes and, for losses and metrics, its functions."""
    has_functions = module in (keras.losses, keras.metrics)
    return {
        part
        for name, part in vars(module).items()
        if inspect.isclass(part)
        or (has_functions and inspect.isfunction(part) and name not in TOOLS)
    }


@pytest.mark.parametrize("kind", MODULES)
def test_each_class_of_keras_is_compared_or_not_known(kind: str) -> None:
    """A class that a new version of Keras adds fails here, and `own_parts` does not know it."""
    module, names = MODULES[kind], COMPARED[kind] | NOT_COMPARED[kind]
    assert getattr(compared, kind) == COMPARED[kind]
    assert public_parts(module) == {getattr(module, name) for name in names}
    assert not COMPARED[kind] & NOT_COMPARED[kind]


def compiled(*layers: Any, loss: Any = "mse", metrics: Any = None, by: Any = "sgd") -> Any:
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, "softmax")])
    model.compile(by, loss, metrics=metrics)
    # Keras makes the metrics of `compile` with the first batch.
    model.train_on_batch(keras.ops.ones((2, 6)), keras.ops.ones((2, 3)))
    return model


def test_parts_that_were_compared_are_known() -> None:
    model = compiled(
        keras.layers.Dropout(0.1),
        keras.Sequential([keras.layers.Dense(4)]),
        loss=keras.losses.Huber(),
        metrics=["accuracy", keras.metrics.MeanSquaredError(), keras.metrics.AUC()],
        by="adam",
    )
    assert own_parts(model) == []


@pytest.mark.parametrize("metric", ["F1Score", "FBetaScore"])
def test_a_metric_that_names_the_axis_of_the_rows_is_known(metric: str) -> None:
    assert own_parts(compiled(metrics=[getattr(keras.metrics, metric)()])) == []


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_cell_of_a_convolutional_recurrent_layer_is_known(dimensions: int) -> None:
    layer = getattr(keras.layers, f"ConvLSTM{dimensions}D")
    model = keras.Sequential([keras.Input((2, *[3] * dimensions, 1)), layer(1, 2)])
    model.compile("sgd", "mse")
    assert own_parts(model) == []


def test_parts_of_keras_that_nobody_compared_are_not_known() -> None:
    averaged = keras.metrics.MeanMetricWrapper(keras.losses.ctc, name="averaged")
    model = compiled(keras.layers.Pipeline([keras.layers.Dense(4)], name="steps"))
    model.loss = "ctc"
    assert own_parts(model) == ["the loss ctc", "the layer steps"]
    model = compiled()
    model._metrics.append(averaged)
    assert own_parts(model) == ["the metric averaged"]


def test_a_new_class_of_keras_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Added(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x

    Added.__module__ = "keras.src.layers.core.added"
    model = compiled(Added(name="added"))
    assert own_parts(model) == ["the layer added"]


def test_a_subclass_of_a_known_class_is_not_known() -> None:
    class Dense(keras.layers.Dense):
        pass

    assert own_parts(compiled(Dense(4, name="mine"))) == ["the layer mine"]


def test_a_step_that_the_model_has_as_an_attribute_is_not_known() -> None:
    model = compiled()
    model.train_step = lambda data: {"loss": 0.0}
    assert own_parts(model) == ["train_step"]
    assert has_own_step(model, "train_step")
    assert not has_own_step(model, "test_step")


def test_a_regularizer_of_the_users_own_is_not_known() -> None:
    class Own(keras.regularizers.Regularizer):
        def __call__(self, x: Any) -> Any:
            return keras.ops.max(x)

    def dense(regularizer: Any) -> Any:
        return keras.layers.Dense(4, activity_regularizer=regularizer, name="regularized")

    assert own_parts(compiled(dense("l2"))) == []
    assert own_parts(compiled(dense(Own()))) == ["the layer regularized"]


def test_a_cell_that_is_no_layer_is_not_known() -> None:
    class Cell:
        state_size, output_size = 4, 4

        def call(self, x: Any, states: Any) -> Any:
            return x[:, :4] - keras.ops.mean(x[:, :4], axis=0), states

    layer = keras.layers.RNN(Cell(), name="recurrent")
    model = keras.Sequential([keras.Input((2, 6)), layer])
    model.compile("sgd", "mse")
    assert own_parts(model) == ["the layer recurrent"]
    assert has_own_layers(model)


def test_an_operation_of_the_users_own_is_not_known() -> None:
    class Add(keras.Operation):
        def call(self, x: Any) -> Any:
            return x + keras.ops.mean(x, axis=0)

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    inputs = keras.Input((6,))
    for operation, parts in ((Add(), ["the operation Add"]), (keras.ops.abs, [])):
        model = keras.Model(inputs, operation(inputs))
        model.compile("sgd", "mse")
        assert own_parts(model) == parts
        assert has_own_layers(model)


@pytest.mark.parametrize(
    ("made_by", "is_known"),
    [
        ((0,), False),
        ((1, 2), True),
        ("abcd,de->abce", True),
        ("...x,xy->...y", True),
        ("abcd,de->bace", False),
        ("abcd,ae->abce", False),
    ],
)
def test_a_layer_that_computes_along_the_rows_is_not_known(made_by: Any, is_known: bool) -> None:
    """The layer is an attention along axes, or a product that an equation describes."""
    inputs = keras.Input((3, 3, 3), batch_size=3)
    if isinstance(made_by, str):
        outputs = keras.layers.EinsumDense(made_by, (3, 3, 2))(inputs)
    else:
        outputs = keras.layers.MultiHeadAttention(1, 2, attention_axes=made_by)(inputs, inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    assert (own_parts(model) == []) is is_known


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"loss": lambda y, p: tf.reduce_mean(y - p)}, "the loss <lambda>"),
        ({"metrics": [lambda y, p: y - p]}, "the metric"),
        ({"loss": "mse", "metrics": ["mae", "accuracy"]}, ""),
        ({"loss": keras.losses.Huber(), "optimizer": keras.optimizers.Adam()}, ""),
    ],
)
def test_parts_of_users_are_named(part: dict[str, object], words: str) -> None:
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(3)(inputs) + inputs
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **part})
    zeros = np.zeros((2, 3), np.float32)
    model.train_on_batch(zeros, zeros[:, :1])
    found = own_parts(model)
    assert [words in each for each in found] == ([True] if words else [])


def test_layers_and_operations_of_users_are_named() -> None:
    class Own(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.ops.flip(Own(name="mine")(inputs), 0))
    assert own_parts(model) == ["the layer mine", "the operation Flip"]
    unchanged = keras.layers.Lambda(lambda x: x, name="unchanged")
    assert own_parts(keras.Sequential([unchanged])) == ["the layer unchanged"]
