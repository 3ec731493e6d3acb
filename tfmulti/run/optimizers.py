"""Makes optimizers and learning rate schedules by name.

All of them are Keras' own, so a saved model loads without tfmulti. `weight_decay` is decoupled.
"""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig


def make_optimizer(
    config: FitConfig, global_batch_size: int, total_steps: int
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a resolved configuration.

    Call this function inside the scope of the strategy.

    Args:
        config: the configuration, with every default filled in.
        global_batch_size: the rows of the global batch, for the scaling of the learning rate.
        total_steps: the optimizer steps of the whole run, for the decay of the learning rate.
    """
    make = registry.load_reference("optimizer", registry.optimizer_reference(str(config.optimizer)))
    rate = make_learning_rate(config, global_batch_size, total_steps)
    optimizer = make(config, rate)
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    if config.precision == "mixed_float16":
        # `compile` would wrap the optimizer too, but would save the inner one. The slots of such a
        # saved model do not load.
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def peak_learning_rate(config: FitConfig, global_batch_size: int) -> float:
    """Returns the learning rate after warm-up, which `scale_learning_rate` scales with the batch.

    Source: Goyal et al., Accurate, large minibatch SGD, 2017 (arXiv:1706.02677).

    Args:
        config: the configuration, with every default filled in.
        global_batch_size: the rows of the global batch.
    """
    assert config.learning_rate is not None
    base = config.scale_learning_rate
    return config.learning_rate * (global_batch_size / base if base else 1.0)


def make_learning_rate(config: FitConfig, global_batch_size: int, total_steps: int) -> Any:
    """Returns the learning rate: a number, or a Keras schedule with a warm-up or a decay.

    Args:
        config: the configuration, with every default filled in.
        global_batch_size: the rows of the global batch.
        total_steps: the optimizer steps of the whole run.
    """
    peak = peak_learning_rate(config, global_batch_size)
    constant = config.learning_rate_decay == "constant"
    if constant and not config.warmup_steps:
        return peak
    # With alpha 1 the cosine stays at its peak, so it is a warm-up without a decay.
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0 if config.warmup_steps else peak,
        decay_steps=max(1, total_steps - config.warmup_steps),
        alpha=1.0 if constant else 0.0,
        warmup_target=peak if config.warmup_steps else None,
        warmup_steps=config.warmup_steps,
    )


def sgd(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns stochastic gradient descent with momentum."""
    return keras.optimizers.SGD(
        learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )


def adam(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns Adam."""
    return keras.optimizers.Adam(learning_rate, weight_decay=config.weight_decay)


def adamw(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns AdamW, with Keras' default weight decay 0.004 unless another one is given."""
    decay = 0.004 if config.weight_decay is None else config.weight_decay
    return keras.optimizers.AdamW(learning_rate, weight_decay=decay)


def lamb(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns LAMB.

    Source: You et al., Large batch optimization for deep learning, 2019 (arXiv:1904.00962).
    """
    return keras.optimizers.Lamb(learning_rate, weight_decay=config.weight_decay)


def adafactor(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns Adafactor.

    Source: Shazeer and Stern, Adafactor, 2018 (arXiv:1804.04235).
    """
    return keras.optimizers.Adafactor(learning_rate, weight_decay=config.weight_decay)


def lion(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns Lion.

    Source: Chen et al., Symbolic discovery of optimization algorithms, 2023 (arXiv:2302.06675).
    """
    return keras.optimizers.Lion(learning_rate, weight_decay=config.weight_decay)


def muon(config: FitConfig, learning_rate: Any) -> keras.optimizers.Optimizer:
    """Returns Muon, with Keras' default weight decay 0.004 unless another one is given.

    Keras' Muon uses AdamW for variables that are not matrices, for embeddings and for the layer
    named `output`. AdamW gets the same learning rate and weight decay.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    decay = 0.004 if config.weight_decay is None else config.weight_decay
    return keras.optimizers.Muon(
        learning_rate, weight_decay=decay, adam_weight_decay=decay, exclude_layers=["output"]
    )
