"""Makes optimizers and learning rate schedules by name.

All of them are Keras' own, so a saved model loads without tfmulti. `weight_decay` is decoupled.
Without one, the optimizer has Keras' default: 0.004 for AdamW and Muon, and none for the others.
"""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.config.fit_config import FitConfig

# The classes by the names of `registry.OPTIMIZERS`.
_CLASSES: dict[str, Any] = {
    "sgd": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    # You et al., Large batch optimization for deep learning, 2019 (arXiv:1904.00962).
    "lamb": keras.optimizers.Lamb,
    # Shazeer and Stern, Adafactor, 2018 (arXiv:1804.04235).
    "adafactor": keras.optimizers.Adafactor,
    # Chen et al., Symbolic discovery of optimization algorithms, 2023 (arXiv:2302.06675).
    "lion": keras.optimizers.Lion,
    # Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    "muon": keras.optimizers.Muon,
}


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
    rate = make_learning_rate(config, global_batch_size, total_steps)
    options: dict[str, Any] = {}
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    if config.optimizer == "muon":
        # Keras' Muon uses AdamW for variables that are not matrices, for embeddings, and for the
        # layers that are excluded.
        options["exclude_layers"] = ["output"]
        if config.weight_decay is not None:
            options["adam_weight_decay"] = config.weight_decay
    optimizer = _CLASSES[str(config.optimizer)](rate, **options)
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
