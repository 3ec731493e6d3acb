"""Callbacks: they read logs, change rates and variables, stop, save, predict."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.programs.common import BATCH, SPARSE, classifier, features, fit, labels, sgd
from tests.programs.registry import Made, program

X, Y = features(4), labels()
# The number of batches of an epoch.
BATCHES = -(-len(X) // BATCH)


def _with(*callbacks: Any, epochs: int = 4, **more: Any) -> Made:
    return Made(
        classifier(layers.Dropout(0.2)),
        {"optimizer": sgd(0.5), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(X, Y, epochs=epochs, callbacks=list(callbacks), validation_data=(X[::-1], Y), **more),
    )


@program(
    "keras-io: Imbalanced classification: credit card fraud detection",
    "keras-io: Timeseries classification from scratch",
    "keras-io: Timeseries classification with a Transformer model",
    "keras-io: Image classification with modern MLP models",
)
def stopping_and_plateaus() -> Made:
    """EarlyStopping that restores the best weights, and ReduceLROnPlateau."""
    return _with(
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.1, patience=1),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    )


@program(
    "Keras guide: Writing your own callbacks",
    "keras-io: Captcha",
    "keras-io: MultipleChoice Task with Transfer Learning",
    "keras-io: Video Classification with Transformers",
)
def best_weights_in_a_file() -> Made:
    """ModelCheckpoint of the best weights, loaded after training; LearningRateScheduler."""
    folder = Path(tempfile.mkdtemp())
    saver = keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5", save_weights_only=True, save_best_only=True
    )
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    made = _with(saver, schedule)

    def after(model: keras.Model) -> dict[str, Any]:
        if list(folder.iterdir()):  # of several workers one saves
            model.load_weights(folder / "best.weights.h5")
        return {}

    made.after = after
    return made


class OwnStopping(keras.callbacks.Callback):
    """Keeps the best weights and sets them when it stops."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.weights = np.inf, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["val_loss"] < self.best:
            self.best, self.weights = logs["val_loss"], self.model.get_weights()
        elif epoch >= 2:
            self.model.stop_training = True
            self.model.set_weights(self.weights)


class OwnSchedule(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        assert float(self.model.optimizer.learning_rate.value) == rate
        assert float(np.asarray(self.model.optimizer.learning_rate.value)) == rate
        assert float(np.array(self.model.optimizer.learning_rate.value)) == rate
        self.model.optimizer.learning_rate = rate * 0.7


@program("Keras guide: Writing your own callbacks")
def stopping_and_rates_of_its_own() -> Made:
    """Callbacks that read the rate as a float, set it, stop, and set the best weights."""
    return _with(OwnStopping(), OwnSchedule())


class Watcher(keras.callbacks.Callback):
    """Keeps the logs of batches, predicts and evaluates at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.predict(X[:5], verbose=0).sum()))
        self.seen.append(float(self.model.evaluate(X[:9], Y[:9], verbose=0)[0]))
        self.seen.append(float(np.sum(self.model(X[:3], training=False))))
        logs["own"] = self.seen[-1]


@program(
    "keras-io: Image Super-Resolution",
    "keras-io: Text generation with a miniature GPT",
    "keras-io: GPT text generation from scratch with KerasNLP",
)
def predictions_in_a_callback() -> Made:
    """A callback that reads the logs of batches, calls predict, evaluate and the model itself."""
    watcher = Watcher()
    made = _with(watcher, epochs=2)
    made.after = lambda model: {"seen": np.array(watcher.seen)}
    return made


class Evaluating(keras.callbacks.Callback):
    """Evaluates during an epoch. The results overwrite those of the training."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = int(self.model.optimizer.iterations.numpy())
        if number == 1:
            self.model.evaluate(X[:9], Y[:9], verbose=0)
        if number % (2 * BATCHES) == 0:
            self.model.test_on_batch(X[:5], Y[:5])
        elif number % BATCHES == 0:
            self.model.evaluate(X[:9], Y[:9], batch_size=7, verbose=0)


@program("Stack Overflow: an evaluation after every batch")
def evaluations_during_an_epoch() -> Made:
    """An evaluate and a test_on_batch after the first and the last batch of an epoch."""
    return _with(Evaluating())


class Averaging(keras.callbacks.Callback):
    """Averages the weights of the last epochs, and sets them at the end."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.model.get_weights()
        if epoch == 0:
            self.mean = weights
        self.mean = [(m * epoch + w) / (epoch + 1) for m, w in zip(self.mean, weights, strict=True)]

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.mean)


@program("Stochastic weight averaging")
def averages_of_weights() -> Made:
    """A callback that averages the weights of the epochs; a LambdaCallback that reads the logs."""
    seen: list[float] = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    made = _with(Averaging(), log, keras.callbacks.TerminateOnNaN())
    made.after = lambda model: {"seen": np.array(seen)}
    return made


class Thawing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = 0.1 / (1.0 + int(optimizer.iterations.numpy()))


@program("keras-io: learning rates by batch")
def rates_of_batches() -> Made:
    """A callback that sets the rate before each batch from the optimizer's iterations."""
    return _with(Thawing(), epochs=2)


class Recompiling(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            rate = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
            self.model.compile(keras.optimizers.Adam(rate), SPARSE)
            self.model.make_train_function(force=True)


@program("Keras: compile in a callback")
def another_optimizer_from_an_epoch_on() -> Made:
    """A callback that compiles with another optimizer, whose rate follows its steps."""
    return _with(Recompiling())


class Rehearsing(keras.callbacks.Callback):
    """Trains on old rows after the last batch of an epoch, or begins the metrics anew."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == BATCHES - 1 and self.model.optimizer.iterations.numpy() < 2 * BATCHES:
            self.model.train_on_batch(X[:7], Y[:7])
        elif batch == BATCHES - 1:
            self.model.reset_metrics()


@program("Training on old rows in a callback; metrics that begin anew")
def metrics_changed_by_a_callback() -> Made:
    """Plain Keras reads an epoch's metrics after the callbacks of its last batch."""
    return _with(Rehearsing())


class Counting(keras.callbacks.Callback):
    """Updates a metric of its own, and begins those of the validation anew after its last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.overlap = keras.metrics.MeanIoU(3, sparse_y_pred=False)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == BATCHES - 1:
            self.model.reset_metrics()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.overlap.reset_state()
        for rows in (slice(0, 13), slice(13, None)):
            self.overlap.update_state(Y[rows], self.model.predict(X[rows], verbose=0))
        logs["overlap"] = float(self.overlap.result())


@program("A metric that a callback updates by predictions")
def counts_of_a_callback() -> Made:
    """A metric of whole numbers that is made in the scope and updated outside of a step."""
    return _with(Counting())


class ResultsByAVariable(keras.Model):
    """Divides its metrics' results by a variable that a callback changes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = keras.Variable(1.0, trainable=False)

    def get_metrics_result(self) -> Any:
        results = super().get_metrics_result()
        return {name: value / self.batches for name, value in results.items()}


class Batches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.batches.assign(batch + 2.0)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.batches.assign_add(3.0)


@program("get_metrics_result with a schedule that a callback keeps")
def logs_by_a_variable_of_a_callback() -> Made:
    """A variable that changes after the last batch, and that the results of metrics read."""
    inputs = keras.Input((4,))
    model = ResultsByAVariable(inputs, layers.Dense(4)(layers.Dense(8, "relu")(inputs)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = fit(X, Y, callbacks=[Batches()], validation_data=(X[::-1], Y))
    return Made(model, {"optimizer": sgd(0.1), "loss": loss}, data)


class Annealed(keras.Model):
    """Computes with two attributes that only a callback makes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "relu"), layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x) * self.weight) / self.temperature


class Annealing(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.weight = keras.Variable(0.1, trainable=False)
        self.model.temperature = 2.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.weight.assign(min(1.0, 0.3 * (epoch + 1)))


@program("VAEs with an annealed weight of the divergence")
def attributes_that_a_callback_makes() -> Made:
    """A callback makes a number and a variable of the model when the training begins."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    annealing = fit(X, Y, epochs=3, callbacks=[Annealing()], validation_data=(X[::-1], Y))
    return Made(Annealed(), {"optimizer": sgd(0.5), "loss": loss}, annealing)


@program("Keras: global random generators")
def generators_after_training() -> Made:
    """What Python's and NumPy's generators draw after training, and the next model's weights."""

    def after(model: keras.Model) -> dict[str, Any]:
        drawn = {"python": random.random(), "numpy": np.random.rand()}
        layer = layers.Dense(2)
        layer.build((None, 3))
        return {**drawn, "layer": np.array(layer.kernel)}

    made = _with(epochs=1)
    made.after = after
    return made


class Draws(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        keras.random.normal((2,))


class NoisyInputs(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + keras.random.normal(keras.ops.shape(x)), y))


@program("Keras: draws without a seed in a callback and in a step")
def draws_of_a_callback_and_of_a_step() -> Made:
    """A callback makes Keras' generator after `fit` has begun, and the step goes on with it."""
    inputs = keras.Input((4,))
    model = NoisyInputs(inputs, keras.layers.Dense(3, "softmax")(inputs))
    given = {"optimizer": sgd(), "loss": SPARSE}
    data = fit(features(4), labels(), callbacks=[Draws()])
    return Made(model, given, data, prepare={"verify": False})
