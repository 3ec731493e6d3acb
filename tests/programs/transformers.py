"""Programs on tokens: positions, masks, language models, captions, mixtures of experts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.common import SPARSE, adam, batches, features, fit, labels, tokens
from tests.programs.registry import Made, program

LENGTH, WORDS, WIDTH = 5, 8, 4
TEXT = tokens(LENGTH, WORDS)
FULL = np.where(TEXT == 0, 1, TEXT)


class Positions(layers.Layer):
    """Tokens and their positions; `tied` gives the table back as logits."""

    def __init__(self, mask_zero: bool = False) -> None:
        super().__init__()
        self.words = layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, x: Any) -> Any:
        return self.words(x) + self.places(ops.arange(0, ops.shape(x)[-1], 1))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return self.words.compute_mask(inputs)

    def logits(self, hidden: Any) -> Any:
        return ops.matmul(hidden, ops.transpose(self.words.embeddings))


class Attention(layers.Layer):
    def __init__(self, causal: bool = False, rate: float = 0.0) -> None:
        super().__init__()
        self.supports_masking = True
        self.causal = causal
        # Softmax does not see the bias of the keys: its gradient would be rounding.
        self.attend = layers.MultiHeadAttention(2, 2, dropout=rate, use_bias=False)
        self.norm, self.drop = layers.LayerNormalization(), layers.Dropout(rate)
        self.forward = keras.Sequential([layers.Dense(4, "relu"), layers.Dense(WIDTH)])

    def call(self, x: Any, other: Any = None, mask: Any = None) -> Any:
        seen = x if other is None else other
        attended = self.attend(x, seen, use_causal_mask=self.causal)
        return self.norm(x + self.drop(self.forward(attended + x)))


@program(
    "keras-io: Text classification with Transformer",
    "keras-io: Pretraining BERT",
    "keras-io: Structured data learning with TabTransformer",
)
def text_classifier_with_positions() -> Made:
    """Embeddings of tokens and of positions, attention with dropout, pooling, Adam."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(Attention(rate=0.1)(Positions()(inputs)))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    return Made(
        model,
        {"optimizer": adam(), "loss": SPARSE, "metrics": ["accuracy"]},
        fit(FULL, labels()),
        predict={"x": FULL},
    )


@program("keras-io: Text generation with a miniature GPT")
def miniature_gpt() -> Made:
    """Causal attention, two outputs of which one has no loss, next tokens as targets."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = Attention(causal=True)(Positions()(inputs))
    model = keras.Model(inputs, [layers.Dense(WORDS)(hidden), hidden])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Made(
        model,
        {"optimizer": "adam", "loss": [loss, None]},
        fit(batches(FULL, np.roll(FULL, -1, 1))),
    )


@program(
    "keras-io: English-to-Spanish translation with a sequence-to-sequence Transformer",
    "keras-io: Character-level recurrent sequence-to-sequence model",
    "keras-io: English-to-Spanish translation with KerasNLP",
)
def translation_with_masks() -> Made:
    """Encoder and decoder by a dict of inputs, masks of padding, weights of tokens, RMSprop."""
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    encoded = Attention()(Positions(mask_zero=True)(source))
    decoded = Attention(causal=True)(Positions(mask_zero=True)(target))
    decoded = Attention()(decoded, encoded)
    model = keras.Model(
        {"source": source, "target": target}, layers.Dense(WORDS, "softmax")(decoded)
    )
    x = {"source": TEXT, "target": TEXT[::-1].copy()}
    y = np.roll(TEXT[::-1], -1, 1)
    return Made(
        model,
        {"optimizer": "rmsprop", "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=0)}
        | {"metrics": ["accuracy"]},
        fit(x, y, validation_data=(x, y)),
    )


class Masked(keras.Model):
    """The loss of each token, weighted; a tracker that takes the vector."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data: Any) -> Any:
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self(x, training=True), sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=weight)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]


@program("keras-io: End-to-end Masked Language Modeling with BERT")
def masked_language_model() -> Made:
    """A loss of rank 2 with weights, and a tracker of that vector with the same weights."""
    inputs = keras.Input((LENGTH,), dtype="int64")
    hidden = Attention()(Positions()(inputs))
    model = Masked(inputs, layers.Dense(WORDS, "softmax")(hidden))
    weight = (np.random.default_rng(2).random(FULL.shape) < 0.4).astype("float32")
    return Made(model, {"optimizer": adam(0.001)}, fit(batches(FULL.astype("int64"), FULL, weight)))


class Captioner(keras.Model):
    """Several captions of each row, each with an update; a masked mean as the loss."""

    def __init__(self, captions: int) -> None:
        super().__init__()
        self.captions = captions
        self.encoder, self.words = layers.Dense(WIDTH, "tanh"), Positions(mask_zero=True)
        self.decoder, self.final = Attention(causal=True), layers.Dense(WORDS, "softmax")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="accuracy")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.acc_tracker]

    def _of(self, image: Any, text: Any) -> Any:
        true = text[:, 1:]
        mask = tf.cast(tf.not_equal(true, 0), tf.float32)
        encoded = self.encoder(image)[:, None, :]
        predicted = self.final(self.decoder(self.words(text[:, :-1]) + encoded))
        loss = tf.reduce_sum(self.loss(true, predicted) * mask) / tf.reduce_sum(mask)
        right = tf.equal(tf.cast(true, tf.int64), tf.argmax(predicted, axis=2))
        right = tf.cast(right, tf.float32) * mask
        return loss, tf.reduce_sum(right) / tf.reduce_sum(mask)

    def train_step(self, data: Any) -> Any:
        image, texts = data
        total = accuracy = 0.0
        for i in range(self.captions):
            with tf.GradientTape() as tape:
                loss, right = self._of(image, texts[:, i])
                total, accuracy = total + loss, accuracy + right
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(total)
        self.acc_tracker.update_state(accuracy / float(self.captions))
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}


def _captioner(text: np.ndarray, captions: int) -> Made:
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    texts = np.stack([np.roll(text, i, 0) for i in range(captions)], 1)
    return Made(
        Captioner(captions), {"optimizer": adam(), "loss": loss}, fit(batches(features(4), texts))
    )


@program("keras-io: Image Captioning")
def captions_with_a_masked_mean() -> Made:
    """A masked mean over uneven lengths in the step, by whose rows replicas differ."""
    return _captioner(TEXT, 1)


@program("keras-io: Image Captioning")
def captions_in_several_updates() -> Made:
    """Several updates in a step, a metric by another key; layers first built in the train_step."""
    return _captioner(FULL, 2)


class NonPadding(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(entropy(y_true, y_pred) * mask) / ops.sum(mask)


@program("keras-io: Named Entity Recognition using Transformers")
def loss_class_of_one_number_on_a_softmax() -> Made:
    """A Loss of one number, a masked mean, on a softmax output; ragged rows padded by tf.data."""
    inputs = keras.Input((None,), dtype="int32")
    outputs = layers.Dense(WORDS, "softmax")(Attention()(layers.Embedding(WORDS, WIDTH)(inputs)))
    lengths = np.maximum((TEXT > 0).sum(1), 1)
    rows = tf.RaggedTensor.from_tensor(FULL, lengths=lengths)
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).map(lambda x, y: (x, tf.identity(y)))
    return Made(
        keras.Model(inputs, outputs),
        {"optimizer": adam(), "loss": NonPadding()},
        fit(data.padded_batch(16)),
    )


class Speech(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.encoder = keras.Sequential([layers.Conv1D(WIDTH, 3, padding="same"), Attention()])
        self.words, self.decoder = Positions(), Attention(causal=True)
        self.final = layers.Dense(WORDS)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_metric]

    def call(self, inputs: Any) -> Any:
        source, target = inputs
        return self.final(self.decoder(self.words(target), self.encoder(source)))

    def train_step(self, batch: Any) -> Any:
        source, target = batch["source"], batch["target"]
        true = target[:, 1:]
        with tf.GradientTape() as tape:
            predicted = self([source, target[:, :-1]])
            loss = self.compute_loss(
                None, tf.one_hot(true, WORDS), predicted, sample_weight=tf.not_equal(true, 0)
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


@program("keras-io: Automatic Speech Recognition with Transformer")
def speech_from_a_dict() -> Made:
    """A batch that is a dict, compute_loss with a mask as weights, positional arguments."""
    data = batches({"source": features(6, 3), "target": TEXT})
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return Made(Speech(), {"optimizer": adam(), "loss": loss}, fit(data))


class Router(layers.Layer):
    def __init__(self, *, coupled: bool) -> None:
        super().__init__()
        self.route = layers.Dense(2)
        self.experts = [layers.Dense(WIDTH, "relu") for _ in range(2)]
        self.coupled = coupled

    def call(self, x: Any) -> Any:
        chances = ops.softmax(self.route(x))
        if self.coupled:  # the product of two means over all tokens of the batch
            chosen = ops.one_hot(ops.argmax(chances, -1), 2)
            density, proxy = ops.mean(chosen, (0, 1)), ops.mean(chances, (0, 1))
            self.add_loss(0.1 * 4.0 * ops.mean(density * proxy))
        else:
            self.add_loss(0.1 * ops.mean(ops.square(self.route(x))))
        outputs = ops.stack([expert(x) for expert in self.experts], -1)
        return ops.sum(outputs * ops.expand_dims(chances, -2), -1)


def _experts(coupled: bool) -> Made:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = Router(coupled=coupled)(layers.Embedding(WORDS, WIDTH)(inputs))
    hidden = layers.GlobalMaxPooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    return Made(model, {"optimizer": adam(), "loss": SPARSE}, fit(FULL, labels()))


@program("keras-io: Text classification with Switch Transformer")
def experts_with_an_added_mean() -> Made:
    """Routed experts, and a loss that a layer adds as a mean over tokens."""
    return _experts(coupled=False)


@program("keras-io: Text classification with Switch Transformer")
def experts_with_a_balance_of_the_batch() -> Made:
    """A loss that a layer adds: the product of two means over all tokens of the batch."""
    return _experts(coupled=True)


class Tied(layers.Layer):
    def __init__(self, words: layers.Embedding) -> None:
        super().__init__()
        self.words = words

    def call(self, hidden: Any) -> Any:
        return ops.matmul(hidden, ops.transpose(self.words.embeddings))


@program("keras-io: Text generation from scratch with KerasHub")
def tied_embeddings() -> Made:
    """One table looked up and multiplied by: its gradient is sparse and dense; AdamW, warm-up."""
    words = layers.Embedding(WORDS, WIDTH)
    inputs = keras.Input((LENGTH,), dtype="int32")
    model = keras.Model(inputs, Tied(words)(Attention(causal=True)(words(inputs))))
    rate = keras.optimizers.schedules.CosineDecay(0.0, 4, warmup_target=0.01, warmup_steps=2)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Made(model, {"optimizer": optimizer, "loss": loss}, fit(FULL, np.roll(FULL, -1, 1)))


class LowRank(layers.Layer):
    def __init__(self, original: layers.Layer) -> None:
        super().__init__()
        self.original = original
        self.original.trainable = False
        self.down = layers.Dense(1, use_bias=False)
        self.up = layers.Dense(WIDTH, use_bias=False)

    def call(self, x: Any) -> Any:
        return self.original(x) + 2.0 * self.up(self.down(x))


@program(
    "keras-io: Parameter-efficient fine-tuning of GPT-2 with LoRA",
    "keras-io: Using pre-trained word embeddings",
)
def low_rank_adaptation() -> Made:
    """Frozen layers beside trained ones of low rank, repeated tokens, global_clipnorm."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = LowRank(layers.Dense(WIDTH))(layers.Embedding(WORDS, WIDTH)(inputs))
    model = keras.Model(inputs, layers.Dense(WORDS)(hidden))
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.05)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Made(
        model,
        {"optimizer": optimizer, "loss": loss, "weighted_metrics": ["accuracy"]},
        fit(FULL, FULL, sample_weight=(TEXT > 0).astype("float32")),
    )


@program(
    "keras-io: Image classification with Vision Transformer",
    "keras-io: Classification with Neural Decision Forests",
    "keras-io: Image classification with EANet (External Attention Transformer)",
    "keras-io: Image classification with modern MLP models",
    "keras-io: Image classification with Perceiver",
    "keras-io: Object detection with Vision Transformers",
    "keras-io: Learning to tokenize in Vision Transformers",
)
def patches_with_learned_positions() -> Made:
    """A weight of positions added to patches, a class token, top-k accuracy."""

    class Patches(layers.Layer):
        def build(self, shape: Any) -> None:
            self.place = self.add_weight(shape=(LENGTH, WIDTH), initializer="random_normal")
            self.token = self.add_weight(shape=(1, 1, WIDTH), initializer="random_normal")

        def call(self, x: Any) -> Any:
            token = ops.repeat(self.token, ops.shape(x)[0], axis=0)
            return ops.concatenate([token, x + self.place], axis=1)

    inputs = keras.Input((LENGTH, WIDTH))
    hidden = Attention()(Patches()(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))
    return Made(
        model,
        {
            "optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.001),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
        },
        fit(features(LENGTH, WIDTH), labels()),
    )


@program("attention on vectors instead of sequences")
def attention_between_the_rows() -> Made:
    """Layers of attention that get one vector for each row, and so attend to all rows."""
    inputs = keras.Input((WIDTH,))
    hidden = layers.Dense(WIDTH, "tanh")(inputs)
    attended = layers.Attention()([hidden, hidden])
    model = keras.Model(inputs, layers.Dense(1)(layers.AdditiveAttention()([attended, hidden])))
    x, y = features(WIDTH), features(1)
    compiled = {"optimizer": adam(), "loss": "mse", "metrics": ["mae"]}
    return Made(model, compiled, fit(x, y, validation_data=(x, y)))
