"""Programs that hold every class of Keras that tfmulti knows to be exact.

Each branch of a model has trained weights before and after one of Keras' layers, so a wrong row or
gradient shows in them. `tests/training/verification/test_ownership.py` compares the names here with
those that `own_parts` trusts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops

from tests.programs.common import ROWS, SPARSE, fit, labels, rng, sgd, tokens
from tests.programs.registry import Made, program

Make = Callable[[], Any]
# The inputs of the branches by name: the shape of a row.
SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (6,),
    "sequence": (6, 4),
    "image": (8, 8, 3),
    "volume": (4, 4, 4, 2),
    "videos of lines": (2, 3, 2),
    "videos": (2, 3, 3, 2),
    "videos of volumes": (2, 2, 2, 2, 2),
    "tokens": (6,),
}


def _made(name: str, *arguments: Any, **more: Any) -> Any:
    """Returns a layer of this name."""
    return getattr(layers, name)(*arguments, **more)


def sized(name: str, *arguments: Any, **more: Any) -> dict[str, tuple[str, Make]]:
    """Returns branches for the forms of a layer for one, two and three dimensions."""
    inputs = {"1D": "sequence", "2D": "image", "3D": "volume"}
    return {
        name.replace("#", size): (
            given,
            functools.partial(_made, name.replace("#", size), *arguments, **more),
        )
        for size, given in inputs.items()
        if hasattr(layers, name.replace("#", size))
    }


def _of(given: str, *names: str, **more: Any) -> dict[str, tuple[str, Make]]:
    """Returns a branch for each layer, all of which take the same arguments."""
    return {name: (given, lambda n=name: getattr(layers, n)(**more)) for name in names}


def _both(layer: Any) -> Make:
    """Returns a function that calls a layer on its input and on the square of that input."""
    return lambda: lambda x: layer()([x, keras.ops.square(x)])


def _attending(layer: Any) -> Make:
    return lambda: lambda x: layer()(x, x)


PLAIN = {
    **_of("vector", "Identity", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Flatten"),
    **_of("vector", "UnitNormalization", "LayerNormalization", "RMSNormalization"),
    **_of("vector", "BatchNormalization"),
    "Activation": ("vector", lambda: layers.Activation("gelu")),
    "ActivityRegularization": ("vector", lambda: layers.ActivityRegularization(0.01, 0.02)),
    "Dense": ("vector", lambda: layers.Dense(3, "tanh")),
    "EinsumDense": ("sequence", lambda: layers.EinsumDense("abc,cd->abd", (6, 3))),
    "GroupNormalization": ("vector", lambda: layers.GroupNormalization(2)),
    "Normalization": ("vector", lambda: layers.Normalization(mean=0.1, variance=2.0)),
    "SpectralNormalization": (
        "vector",
        lambda: layers.SpectralNormalization(layers.Dense(3)),
    ),
    "Rescaling": ("vector", lambda: layers.Rescaling(0.5, 0.1)),
    "RepeatVector": ("vector", lambda: layers.RepeatVector(2)),
    "Reshape": ("vector", lambda: layers.Reshape((2, 3))),
    "Permute": ("sequence", lambda: layers.Permute((2, 1))),
    "Masking": ("sequence", layers.Masking),
    "TimeDistributed": ("sequence", lambda: layers.TimeDistributed(layers.Dense(3))),
    "Dropout": ("vector", lambda: layers.Dropout(0.3, seed=1)),
    "AlphaDropout": ("vector", lambda: layers.AlphaDropout(0.3, seed=1)),
    "GaussianDropout": ("vector", lambda: layers.GaussianDropout(0.3, seed=1)),
    "GaussianNoise": ("vector", lambda: layers.GaussianNoise(0.3, seed=1)),
    "Add": ("vector", _both(layers.Add)),
    "Average": ("vector", _both(layers.Average)),
    "Concatenate": ("vector", _both(layers.Concatenate)),
    "Maximum": ("vector", _both(layers.Maximum)),
    "Minimum": ("vector", _both(layers.Minimum)),
    "Multiply": ("vector", _both(layers.Multiply)),
    "Subtract": ("vector", _both(layers.Subtract)),
    "Dot": ("vector", _both(lambda: layers.Dot(1))),
    "Embedding": ("tokens", lambda: layers.Embedding(9, 3)),
    "ReversibleEmbedding": ("tokens", lambda: layers.ReversibleEmbedding(9, 3)),
    "CategoryEncoding": ("tokens", lambda: layers.CategoryEncoding(9, "multi_hot")),
    "Hashing": ("tokens", lambda: layers.Hashing(5)),
    "IntegerLookup": ("tokens", lambda: layers.IntegerLookup(vocabulary=[3, 1, 4, 5])),
    "Discretization": ("vector", lambda: layers.Discretization([-1.0, 0.0, 1.0])),
}
OF_SEQUENCES = {
    "SimpleRNN": ("sequence", lambda: layers.SimpleRNN(3)),
    "GRU": ("sequence", lambda: layers.GRU(3)),
    "LSTM": ("sequence", lambda: layers.LSTM(3)),
    "RNN": ("sequence", lambda: layers.RNN(layers.SimpleRNNCell(3))),
    "SimpleRNNCell": ("sequence", lambda: layers.RNN(layers.SimpleRNNCell(3))),
    "GRUCell": ("sequence", lambda: layers.RNN(layers.GRUCell(3))),
    "LSTMCell": ("sequence", lambda: layers.RNN(layers.LSTMCell(3))),
    "StackedRNNCells": (
        "sequence",
        lambda: layers.RNN(
            layers.StackedRNNCells([layers.SimpleRNNCell(3), layers.SimpleRNNCell(2)])
        ),
    ),
    "Bidirectional": ("sequence", lambda: layers.Bidirectional(layers.GRU(2))),
    "Attention": ("sequence", _both(layers.Attention)),
    "AdditiveAttention": ("sequence", _both(layers.AdditiveAttention)),
    "MultiHeadAttention": ("sequence", _attending(lambda: layers.MultiHeadAttention(2, 2))),
    "GroupQueryAttention": (
        "sequence",
        _attending(lambda: layers.GroupQueryAttention(2, 2, 1)),
    ),
    "ConvLSTM1D": ("videos of lines", lambda: layers.ConvLSTM1D(2, 2)),
    "ConvLSTM2D": ("videos", lambda: layers.ConvLSTM2D(2, 2)),
    "ConvLSTM3D": ("videos of volumes", lambda: layers.ConvLSTM3D(2, 2)),
}
IN_SEVERAL_DIMENSIONS = {
    **sized("Conv#", 3, 2, activation="tanh"),
    **sized("Conv#Transpose", 3, 2),
    **sized("DepthwiseConv#", 2),
    **sized("SeparableConv#", 3, 2),
    **sized("AdaptiveAveragePooling#", 2),
    **sized("AdaptiveMaxPooling#", 2),
    **sized("AveragePooling#", 2),
    **sized("MaxPooling#"),
    **sized("GlobalAveragePooling#"),
    **sized("GlobalMaxPooling#"),
    **sized("Cropping#", 1),
    **sized("ZeroPadding#", 1),
    **sized("UpSampling#"),
    **sized("SpatialDropout#", 0.3, seed=1),
}


class Held(keras.layers.Layer):
    """Holds a layer that a functional model would skip, since it may return its input."""

    def __init__(self, inner: keras.layers.Layer) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, training=training)


def _averaged(layer: keras.layers.Layer) -> Any:
    """Returns a layer that crops images in training alone, followed by a mean over each image."""
    return lambda x: layers.GlobalAveragePooling2D()(layer(x, training=True))


_RANGE: dict[str, Any] = {"value_range": (0, 1)}
_SEEDED: dict[str, Any] = {**_RANGE, "seed": 3}
IMAGES = {
    **_of("image", "AutoContrast", **_RANGE),
    "Equalization": ("image", lambda: Held(layers.Equalization(**_RANGE))),
    **_of("image", "RandAugment", "RandomElasticTransform", **_SEEDED),
    **_of("image", "RandomBrightness", "RandomColorDegeneration", factor=0.5, **_SEEDED),
    **_of("image", "RandomContrast", "RandomHue", factor=0.5, **_SEEDED),
    **_of("image", "RandomSharpness", factor=0.5, **_SEEDED),
    **_of("image", "RandomColorJitter", brightness_factor=0.3, contrast_factor=0.3, **_SEEDED),
    **_of("image", "RandomErasing", "RandomGaussianBlur", "RandomInvert", **_SEEDED),
    **_of("image", "RandomPosterization", factor=3, **_SEEDED),
    **_of("image", "RandomSaturation", factor=0.5, **_SEEDED),
    **_of("image", "Solarization", **_SEEDED),
    **_of("image", "RandomRotation", factor=0.2, seed=3),
    **_of("image", "RandomZoom", height_factor=0.2, seed=3),
    **_of("image", "RandomTranslation", height_factor=0.2, width_factor=0.2, seed=3),
    **_of("image", "RandomFlip", "RandomGrayscale", "RandomPerspective", "MixUp", seed=3),
    **_of("image", "CutMix", seed=3),
    **_of("image", "RandomShear", x_factor=0.3, y_factor=0.3, seed=3),
    "RandomCrop": ("image", lambda: _averaged(layers.RandomCrop(5, 5, seed=3))),
    **_of("image", "CenterCrop", "Resizing", height=5, width=5),
}


def _data(name: str) -> np.ndarray:
    if name == "tokens":
        return np.random.default_rng(13).integers(0, 9, (ROWS, 6)).astype("int32")
    found = rng().random((ROWS, *SHAPES[name])).astype("float32")
    return found if name == "image" else 2 * found - 1


def _branch(given: Any, make: Make, *, of_tokens: bool) -> Any:
    """Returns a branch: weights, the layer, and weights again."""
    x = given
    if not of_tokens:
        # Images stay in their range of values.
        x = layers.Dense(given.shape[-1], kernel_initializer="identity")(given)
    layer = make()
    if not isinstance(layer, keras.layers.Layer):
        x = layer(x)
    elif "training" in inspect.signature(layer.call).parameters:
        x = layer(x, training=True)
    else:
        x = layer(x)
    x = layers.Flatten()(x)
    return layers.Dense(2, "tanh")(keras.ops.cast(x, "float32"))


def _branches(branches: dict[str, tuple[str, Make]]) -> Made:
    """Returns a program that trains all branches, each by a loss of its own."""
    names = {given for given, _ in branches.values()}
    inputs = {
        name: keras.Input(SHAPES[name], name=name, dtype="int32" if name == "tokens" else None)
        for name in sorted(names)
    }
    outputs = {
        name: _branch(inputs[given], make, of_tokens=given == "tokens")
        for name, (given, make) in branches.items()
    }
    target = rng().random((ROWS, 2)).astype("float32")
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": sgd(), "loss": dict.fromkeys(outputs, "mse")},
        fit({name: _data(name) for name in inputs}, dict.fromkeys(outputs, target)),
    )


@program("keras.layers: core layers, merging, normalization, regularization, activations")
def keras_layers() -> Made:
    """One branch for each of Keras' layers that take single vectors or tokens."""
    return _branches(PLAIN)


@program("keras.layers: recurrent layers and attention")
def keras_sequence_layers() -> Made:
    """One branch for each of Keras' layers that go through a sequence."""
    return _branches(OF_SEQUENCES)


# The weights are sums of hundreds of terms. Rounding changed one of them by 4e-6 of the largest.
@program(
    "keras.layers: convolution, pooling, reshaping",
    "keras-io: Next-Frame Video Prediction with Convolutional LSTMs",
    tolerance=1e-5,
)
def keras_layers_of_several_dimensions() -> Made:
    """One branch for each of Keras' layers that come for one, two and three dimensions."""
    return _branches(IN_SEVERAL_DIMENSIONS)


@program("keras.layers: image augmentation and preprocessing")
def keras_image_layers() -> Made:
    """One branch for each of Keras' layers that change images."""
    return _branches(IMAGES)


# The targets are one-hot, classes, or one chance. The classes have predictions that add up to 1.
LOSSES: dict[str, tuple[str, Make]] = {
    **{
        name: ("one-hot", getattr(losses, name))
        for name in (
            "CategoricalCrossentropy",
            "CategoricalFocalCrossentropy",
            "CategoricalHinge",
            "CosineSimilarity",
            "Dice",
            "Huber",
            "KLDivergence",
            "LogCosh",
            "MeanAbsoluteError",
            "MeanAbsolutePercentageError",
            "MeanSquaredError",
            "MeanSquaredLogarithmicError",
            "Poisson",
            "Tversky",
        )
    },
    "SparseCategoricalCrossentropy": ("classes", losses.SparseCategoricalCrossentropy),
    "CategoricalGeneralizedCrossEntropy": ("classes", losses.CategoricalGeneralizedCrossEntropy),
    "Circle": ("classes", lambda: losses.Circle(gamma=4)),
    **{
        name: ("chance", getattr(losses, name))
        for name in ("BinaryCrossentropy", "BinaryFocalCrossentropy", "Hinge", "SquaredHinge")
    },
}
# Metrics of these names get the same targets.
METRICS: dict[str, tuple[str, Make]] = {
    **{
        name: ("one-hot", getattr(metrics, name))
        for name in (
            "CategoricalAccuracy",
            "CategoricalCrossentropy",
            "CategoricalHinge",
            "ConcordanceCorrelation",
            "CosineSimilarity",
            "F1Score",
            "KLDivergence",
            "LogCoshError",
            "MeanAbsoluteError",
            "MeanAbsolutePercentageError",
            "MeanSquaredError",
            "MeanSquaredLogarithmicError",
            "PearsonCorrelation",
            "Poisson",
            "R2Score",
            "RootMeanSquaredError",
            "TopKCategoricalAccuracy",
            "Accuracy",
        )
    },
    "FBetaScore": ("one-hot", lambda: metrics.FBetaScore(beta=2.0)),
    "OneHotIoU": ("one-hot", lambda: metrics.OneHotIoU(3, [0, 1])),
    "OneHotMeanIoU": ("one-hot", lambda: metrics.OneHotMeanIoU(3)),
    "MeanMetricWrapper": (
        "one-hot",
        lambda: metrics.MeanMetricWrapper(losses.mean_squared_error, "wrapper"),
    ),
    "IoU": ("classes", lambda: metrics.IoU(3, [0, 1], sparse_y_pred=False)),
    "MeanIoU": ("classes", lambda: metrics.MeanIoU(3, sparse_y_pred=False)),
    "SparseCategoricalAccuracy": ("classes", metrics.SparseCategoricalAccuracy),
    "SparseCategoricalCrossentropy": ("classes", metrics.SparseCategoricalCrossentropy),
    "SparseTopKCategoricalAccuracy": (
        "classes",
        lambda: metrics.SparseTopKCategoricalAccuracy(2),
    ),
    **{
        name: ("chance", getattr(metrics, name))
        for name in (
            "AUC",
            "BinaryAccuracy",
            "BinaryCrossentropy",
            "FalseNegatives",
            "FalsePositives",
            "Hinge",
            "Precision",
            "Recall",
            "SquaredHinge",
            "TrueNegatives",
            "TruePositives",
        )
    },
    "BinaryIoU": ("chance", lambda: metrics.BinaryIoU([0, 1])),
    **{
        name: ("chance", lambda n=name: getattr(metrics, n)(0.5))
        for name in (
            "PrecisionAtRecall",
            "RecallAtPrecision",
            "SensitivityAtSpecificity",
            "SpecificityAtSensitivity",
        )
    },
}
# The functions that Keras has for losses and metrics, by the target.
FUNCTIONS = {
    name: kind
    for kind, names in {
        "one-hot": (
            "categorical_accuracy",
            "categorical_crossentropy",
            "categorical_focal_crossentropy",
            "categorical_hinge",
            "concordance_correlation",
            "huber",
            "kl_divergence",
            "log_cosh",
            "mean_absolute_error",
            "mean_absolute_percentage_error",
            "mean_squared_error",
            "mean_squared_logarithmic_error",
            "pearson_correlation",
            "poisson",
            "top_k_categorical_accuracy",
        ),
        "classes": (
            "sparse_categorical_accuracy",
            "sparse_categorical_crossentropy",
            "sparse_top_k_categorical_accuracy",
        ),
        "chance": (
            "binary_accuracy",
            "binary_crossentropy",
            "binary_focal_crossentropy",
            "hinge",
            "squared_hinge",
        ),
    }.items()
    for name in names
}


def _outputs(names: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Returns a model with an output for each name, and the targets of its outputs."""
    inputs = keras.Input((4,))
    middle = layers.Dense(5, "tanh")(inputs)
    outputs = {
        name: layers.Dense(1, "sigmoid")(middle)
        if kind == "chance"
        else layers.Dense(3, "softmax")(middle)
        for name, kind in names.items()
    }
    classes = labels()
    targets = {
        "one-hot": np.eye(3, dtype="float32")[classes],
        "classes": classes,
        "chance": (classes > 0).astype("float32")[:, None],
    }
    return keras.Model(inputs, outputs), {name: targets[kind] for name, kind in names.items()}


def _features() -> np.ndarray:
    return rng().standard_normal((ROWS, 4)).astype("float32")


@program("keras.losses: all losses")
def keras_losses() -> Made:
    """One output for each of Keras' losses."""
    model, targets = _outputs({name: kind for name, (kind, _) in LOSSES.items()})
    own = {name: make() for name, (_, make) in LOSSES.items()}
    return Made(model, {"optimizer": sgd(0.01), "loss": own}, fit(_features(), targets))


@program("keras.metrics: all metrics")
def keras_metrics() -> Made:
    """One output for each of Keras' metrics."""
    kinds = {name: kind for name, (kind, _) in METRICS.items()} | FUNCTIONS
    model, targets = _outputs(kinds)
    own: dict[str, Any] = {name: [make()] for name, (_, make) in METRICS.items()}
    own |= {name: [getattr(metrics, name)] for name in FUNCTIONS}
    of_kind = {"classes": SPARSE, "chance": "mse", "one-hot": "mse"}
    loss = {name: of_kind[kind] for name, kind in kinds.items()}
    return Made(
        model, {"optimizer": sgd(0.01), "loss": loss, "metrics": own}, fit(_features(), targets)
    )


# The metrics that count rows, by code that several of them share.
COUNTS = (
    *("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives", "BinaryIoU", "IoU"),
    *("MeanIoU", "OneHotIoU", "OneHotMeanIoU", "PrecisionAtRecall", "RecallAtPrecision"),
    *("SensitivityAtSpecificity", "SpecificityAtSensitivity"),
)


@program("keras.layers.Embedding with microbatches")
def embedding_with_three_microbatches() -> Made:
    """Lookups of tokens and of positions, whose gradients three passes add up."""
    inputs = keras.Input((6,), dtype="int32")
    positions = layers.Embedding(6, 4)(ops.arange(6))
    hidden = layers.Embedding(9, 4)(inputs) + positions
    outputs = layers.Dense(3, "softmax")(layers.GlobalAveragePooling1D()(hidden))
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": keras.optimizers.Adam(0.01), "loss": SPARSE},
        fit(tokens(), labels()),
        prepare={"microbatches": 3},
    )


@program("keras.metrics: metrics that count, with microbatches")
def counts_with_microbatches() -> Made:
    """Metrics that count weighted rows, in two passes a step."""
    model, targets = _outputs({name: METRICS[name][0] for name in COUNTS})
    own = {name: [METRICS[name][1]()] for name in COUNTS}
    loss = {name: SPARSE if METRICS[name][0] == "classes" else "mse" for name in COUNTS}
    # The weights of an IoU are whole numbers.
    weights = {name: rng().integers(0, 4, ROWS).astype("float32") for name in COUNTS}
    return Made(
        model,
        {"optimizer": sgd(0.01), "loss": loss, "weighted_metrics": own},
        fit(_features(), targets, sample_weight=weights),
        prepare={"microbatches": 2},
    )


OPTIMIZERS: dict[str, Make] = {
    **{
        name: lambda n=name: getattr(keras.optimizers, n)(0.01)
        for name in (
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "Ftrl",
            "Lamb",
            "Lion",
            "Muon",
            "Nadam",
            "RMSprop",
            "SGD",
            # It must be built before the training, as here: see docs/limits.md.
            "ScheduleFreeAdamW",
        )
    },
}


# Metrics that take values instead of targets and predictions.
TRACKERS: dict[str, Make] = {"Mean": metrics.Mean, "Sum": metrics.Sum}


class OneOfEach(keras.Model):
    """Trains one layer by each optimizer, and tracks the values of a loss."""

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def __init__(self) -> None:
        super().__init__()
        self.of = {name: layers.Dense(3) for name in OPTIMIZERS}
        self.by = {name: make() for name, make in OPTIMIZERS.items()}
        self.trackers = [make() for make in TRACKERS.values()]

    def call(self, x: Any) -> Any:
        return {name: layer(x) for name, layer in self.of.items()}

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            values = {name: tf.reduce_mean(tf.square(found - y)) for name, found in self(x).items()}
        for name, value in values.items():
            weights = self.of[name].trainable_variables
            self.by[name].apply(tape.gradient(value, weights), weights)
        for tracker in self.trackers:
            tracker.update_state(values["SGD"])
        return values | {tracker.name: tracker.result() for tracker in self.trackers}


@program("keras.optimizers: all optimizers")
def keras_optimizers() -> Made:
    """One layer for each of Keras' optimizers, and the metrics that take values."""
    model = OneOfEach()
    model(_features()[:1])
    for name, optimizer in model.by.items():
        optimizer.build(model.of[name].trainable_variables)
    target = np.eye(3, dtype="float32")[labels()]
    return Made(model, {}, fit(_features(), target), optimizers=model.by)


# The names of everything above, as `tfmulti.training.verification.compared` has them. A loss of a
# class computes the loss function of Keras with the same formula. Every model has an InputLayer.
COMPARED: dict[str, set[str]] = {
    "LAYERS": {*PLAIN, *OF_SEQUENCES, *IN_SEVERAL_DIMENSIONS, *IMAGES, "InputLayer"},
    "LOSSES": {
        *LOSSES,
        *(make().fn.__name__ for _, make in LOSSES.values() if hasattr(make(), "fn")),
    },
    "METRICS": {*METRICS, *FUNCTIONS, *TRACKERS},
    "OPTIMIZERS": {*OPTIMIZERS},
}
