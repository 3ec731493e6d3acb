"""Tests each built-in model on each kind of data, saved and loaded by plain Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.data_set import DataSpec
from tfmulti.run.models.transformer import patch_size
from tfmulti.run.optimizers import make_learning_rate, make_optimizer, peak_learning_rate

pytestmark = pytest.mark.processes

IMAGE = DataSpec((12, 12, 3), "uint8", "classification", 7, input_scale=1 / 255)
VECTOR = DataSpec((10,), "float32", "regression", 2)
TOKENS = DataSpec((9,), "int32", "classification", 4, vocabulary_size=50)
SPECS = {"image": IMAGE, "vector": VECTOR, "tokens": TOKENS}

PAIRS = [(name, kind) for name, entry in registry.MODELS.items() for kind in entry.takes]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_builds_to_the_data_and_loads_again(tmp_path: Path, name: str, kind: str) -> None:
    spec = SPECS[kind]
    model = registry.load_reference("model", registry.model_entry(name).reference)(spec)
    high = spec.vocabulary_size or 255
    x = np.random.default_rng(0).integers(0, high, (3, *spec.input_shape)).astype(spec.input_dtype)
    found = model.predict(x, verbose=0)
    assert found.shape == (3, spec.outputs)
    if spec.task == "classification":
        assert found.sum(axis=1) == pytest.approx(1, abs=1e-5)
    model.save(tmp_path / "m.keras")
    assert np.array_equal(
        keras.saving.load_model(tmp_path / "m.keras").predict(x, verbose=0), found
    )


def test_parameter_counts_are_those_of_the_papers() -> None:
    cifar = DataSpec((32, 32, 3), "uint8", "classification", 10)
    imagenet = DataSpec((224, 224, 3), "uint8", "classification", 1000)
    resnet20 = registry.load_reference("model", registry.model_entry("resnet20").reference)(cifar)
    resnet50 = registry.load_reference("model", registry.model_entry("resnet50").reference)(
        imagenet
    )

    def trainable(model: Any) -> int:
        return int(sum(np.prod(w.shape) for w in model.trainable_weights))

    # The number is from He et al., table 6.
    assert trainable(resnet20) == pytest.approx(0.27e6, rel=0.03)
    assert trainable(resnet50) == pytest.approx(25.56e6, rel=0.001)


@pytest.mark.parametrize(
    ("size", "patch"), [((8, 8), 1), ((28, 28), 4), ((32, 32), 4), ((224, 224), 16), ((9, 9), 1)]
)
def test_patches(size: tuple[int, int], patch: int) -> None:
    assert patch_size(*size) == patch


def config(**changes: Any) -> FitConfig:
    return FitConfig(**changes).resolved("image")


def test_float16_has_a_loss_scale() -> None:
    optimizer = make_optimizer(config(precision="mixed_float16"), 64, 10)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def test_linear_scaling_rule() -> None:
    assert peak_learning_rate(config(learning_rate=0.1, scale_learning_rate=256), 1024) == 0.4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {0: 0.2, 99: 0.2}),
        ({"warmup_steps": 10}, {0: 0.0, 5: 0.1, 10: 0.2, 99: 0.2}),
        ({"learning_rate_decay": "cosine"}, {0: 0.2, 50: 0.1, 100: 0.0}),
        (
            {"warmup_steps": 20, "learning_rate_decay": "cosine"},
            {10: 0.1, 20: 0.2, 60: 0.1, 100: 0},
        ),
    ],
)
def test_schedules(changes: dict[str, Any], expected: dict[int, float]) -> None:
    rate = make_learning_rate(config(learning_rate=0.2, **changes), 64, 100)
    for step, value in expected.items():
        found = rate if isinstance(rate, float) else float(rate(step))
        assert found == pytest.approx(value, abs=1e-7)
