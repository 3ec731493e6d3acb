"""The estimate of a step's memory, held against TensorFlow's allocator on real steps."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pynvml
import pytest
import tensorflow as tf

import tfmulti
from tests.support.forked import run, run_workers
from tests.support.processes import Finished, Processes, clean_env
from tfmulti.training import memory
from tfmulti.training.memory import GB, MemoryEstimate, form_of

LIMIT_S = 240

# Prints the estimate and what the allocator reports for the steps of a real `fit`.
TRAINS = """
import contextlib, json, sys
import keras, numpy as np, tensorflow as tf, tfmulti
from tfmulti.run.models.resnet import resnet20
from tfmulti.run.models.transformer import text_classifier

name, rows, replicas, workers, passes = sys.argv[1], *map(int, sys.argv[2:])
# The peak of a step depends on the order of its operations, so several steps are measured.
rng, n = np.random.default_rng(0), rows * replicas * workers * 8
strategy = None
if workers > 1:
    strategy = tfmulti.make_strategy()
elif replicas > 1:
    strategy = tfmulti.make_strategy("mirrored", replicas=replicas)
with strategy.scope() if strategy else contextlib.nullcontext():
    if name == "mlp":
        hidden = [keras.layers.Dense(2048, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10, "softmax")])
        x = rng.random((n, 784), dtype="float32")
    elif name == "resnet20":
        model = resnet20(tfmulti.DataSpec((32, 32, 3), "float32", "classification", 10))
        x = rng.random((n, 32, 32, 3), dtype="float32")
    elif name == "recurrent":
        rnns = [keras.layers.GRU(64, return_sequences=True), keras.layers.LSTM(64)]
        words = keras.layers.Embedding(2000, 64, mask_zero=True)
        model = keras.Sequential([keras.Input((50,), dtype="int32"), words, *rnns])
        model.add(keras.layers.Dense(10, "softmax"))
        x = rng.integers(0, 2000, (n, 50)).astype("int32")
    else:
        spec = tfmulti.DataSpec((64,), "int32", "classification", 4, vocabulary_size=5000)
        model = text_classifier(spec)
        x = rng.integers(0, 5000, (n, 64)).astype("int32")
    y = rng.integers(0, 4, n)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
tfmulti.prepare(model, microbatches=passes, verify=False)
found = tfmulti.estimate(model, rows=rows)
peaks = []

class Peaks(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] / replicas)

model.fit(x, y, batch_size=rows * replicas * workers, verbose=0, callbacks=[Peaks()])
print(json.dumps([found.total, float(np.median(peaks[1:])), found.unseen]))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("model", "rows", "replicas", "workers", "passes"),
    [
        ("mlp", 256, 1, 1, 1),
        ("mlp", 4096, 1, 1, 1),
        ("mlp", 256, 2, 1, 1),
        ("mlp", 256, 1, 2, 1),
        ("resnet20", 64, 1, 1, 1),
        ("resnet20", 64, 2, 1, 1),
        ("mlp", 1024, 1, 1, 4),
        ("transformer", 64, 1, 1, 1),
        ("transformer", 64, 2, 1, 1),
        ("transformer", 64, 1, 2, 1),
        ("recurrent", 128, 1, 1, 1),
    ],
)
def test_the_allocator_reports_what_was_estimated(
    tmp_path: Path, model: str, rows: int, replicas: int, workers: int, passes: int
) -> None:
    argv = ["-c", TRAINS, model, *map(str, (rows, replicas, workers, passes))]
    # Not every CPU has the allocator of oneDNN, and TensorFlow's default one reports nothing.
    env = {"TF_CPU_ALLOCATOR_USE_BFC": "true"}
    if model == "resnet20":
        # TensorFlow's other convolutions take 31 MB to work in. It reads this when it is imported.
        env["TF_ENABLE_ONEDNN_OPTS"] = "1"

    def ended() -> list[Finished]:
        if model == "resnet20":
            return [Processes.run(argv, tmp_path, limit_s=LIMIT_S, env=env)]
        if workers == 1:
            return [run(argv, tmp_path, limit_s=LIMIT_S, env=env)]
        return run_workers(argv, workers, tmp_path, limit_s=LIMIT_S, env=env)

    estimates, reported = [0.0] * workers, [math.inf] * workers
    for _ in range(3):
        for worker, done in enumerate(ended()):
            assert done.returncode == 0, done.stderr
            estimates[worker], peak, unseen = json.loads(done.stdout.splitlines()[-1])
            assert not unseen
            reported[worker] = min(reported[worker], peak)
        print(model, rows, replicas, workers, passes, estimates, reported)
        # The allocator may give a tensor almost twice the bytes that it needs. Whether it does so
        # depends on the order of the first operations, and then holds for all steps of a process.
        if min(estimates) > 0.85 * max(reported):
            break
    assert estimates == pytest.approx(reported, rel=0.15)


# One step of 20,000 rows needs far more than the allocator may take; the model itself is small.
USES_UP = """
import sys
import keras, numpy as np, tfmulti
hidden = [keras.layers.Dense(1024, "relu") for _ in range(6)]
model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
model.compile("adam", "mse")
tfmulti.prepare(model, microbatches=int(sys.argv[1]))
x = np.ones((20_000, 64), np.float32)
model.fit(x, x[:, :1], batch_size=20_000, verbose=0)
"""


# A layer of oneDNN that gets no memory ends the process itself.
LITTLE = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPU_ALLOCATOR_USE_BFC": "true",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "400",
}


def uses_up(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with TensorFlow's own log level, and with little memory."""
    env = clean_env(LITTLE)
    del env["TF_CPP_MIN_LOG_LEVEL"]
    return subprocess.run(
        [sys.executable, *argv],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.processes
def test_used_up_memory_ends_in_one_line_with_advice_that_helps(tmp_path: Path) -> None:
    done = uses_up(tmp_path, "-c", USES_UP, "1")
    *before, last = done.stderr.strip().splitlines()
    assert last.startswith("tfmulti.errors.DeviceError: the memory of CPU:0 ("), done.stderr
    assert "on each device for 20,000 rows" in last
    # What TensorFlow says at its start, and the traceback of the script.
    assert len(before) <= 20
    assert not any("bfc_allocator" in line for line in before)
    advised = re.search(r"Give --microbatches (\d+), or at most [\d,]+ rows per replica\.", last)
    assert advised, last
    done = uses_up(tmp_path, "-c", USES_UP, advised[1])
    assert done.returncode == 0, done.stderr


def command_that_uses_up(folder: Path, rows: int) -> list[str]:
    """Returns the arguments of a `tfmulti.fit` whose only step takes `rows` rows."""
    (folder / "mine.py").write_text(
        "import keras, numpy as np\n"
        "def build():\n"
        "    hidden = [keras.layers.Dense(1024, 'relu') for _ in range(6)]\n"
        "    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(2)])\n"
        "def data():\n"
        f"    return np.ones(({rows}, 64), np.float32), np.arange({rows}) % 2\n"
    )
    arguments = ["-m", "tfmulti.fit", "--model", "mine:build", "--dataset", "mine:data"]
    arguments += ["--validation_fraction", "0", "--global_batch_size", str(rows), "--epochs", "1"]
    return [*arguments, "--run_dir", str(folder / "run")]


@pytest.mark.processes
def test_used_up_memory_ends_the_command_with_one_line(tmp_path: Path) -> None:
    done = uses_up(tmp_path, *command_that_uses_up(tmp_path, 20_000))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("tfmulti: the memory of CPU:0 (")
    assert "Give --microbatches " in line


@pytest.mark.processes
def test_used_up_memory_of_workers_ends_the_job_with_the_advice(tmp_path: Path) -> None:
    launched = ["-m", "tfmulti.launch", "--nproc-per-node", "2"]
    done = uses_up(tmp_path, *launched, *command_that_uses_up(tmp_path, 40_000))
    assert done.returncode == 2
    lines = (done.stdout + done.stderr).splitlines()
    told = [line for line in lines if "tfmulti: the memory of CPU:0 (" in line]
    assert 1 <= len(told) <= 2, lines
    assert all("for 20,000 rows" in line and "Give --microbatches " in line for line in told)
    assert not any("bfc_allocator" in line or "Traceback" in line for line in lines)
    assert lines[-1] == "[launch] ending with exit code 2: a user's mistake is not retried"


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model


def test_the_parts_are_counted() -> None:
    found = tfmulti.estimate(dense(), rows=16)
    weights = 4 * (8 * 4 + 4 + 4 * 2 + 2)
    assert found.gradients == found.weights == weights
    # Two moments of each weight, the step count and the learning rate.
    assert weights * 2 <= found.optimizer <= weights * 2 + 16
    assert found.checkpoint == found.weights + found.optimizer
    assert found.batch_per_row % (4 * (8 + 2)) == 0
    assert found.device is None
    assert found.fits is None
    assert found.largest_batch is None


def test_what_fits_fits_and_one_row_more_does_not() -> None:
    found = tfmulti.estimate(dense(), rows=1000, device_memory_gb=150e-6)
    assert found.fits is False
    assert found.largest_batch
    assert found.fitting_microbatches
    assert found.at(found.largest_batch, 1) <= 150_000 < found.at(found.largest_batch + 1, 1)
    passes = found.fitting_microbatches
    assert found.at(1000, passes) <= 150_000 < found.at(1000, passes - 1)


def test_a_tensor_that_grows_with_the_square_of_the_rows_is_exact() -> None:
    inputs = keras.Input((4,))
    # The distances between all rows of the batch.
    outputs = keras.layers.Lambda(
        lambda x: tf.reduce_sum((x[:, None] - x[None]) ** 2, axis=1),
        output_shape=(4,),
    )(keras.layers.Dense(4)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    small, large = (tfmulti.estimate(model, rows=rows).total for rows in (100, 200))
    assert large - 2 * small > 100**2 * 4 * 4


def test_an_estimate_changes_nothing() -> None:
    model = dense()
    x = np.ones((32, 8), np.float32)
    tfmulti.prepare(model)
    before = [np.array(v) for v in model.variables]
    tfmulti.estimate(model, rows=16)
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(value, variable)
    assert int(model.optimizer.iterations) == 0
    model.fit(x, x[:, :2], batch_size=16, verbose=0)
    assert int(model.optimizer.iterations) == 2
    tfmulti.estimate(model, rows=16)
    assert int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("name", ["rows", "device_memory_gb"])
@pytest.mark.parametrize("value", [0, -1.5, "8", float("inf"), float("nan")])
def test_values_of_another_type_or_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(tfmulti.ConfigError, match=re.escape(f"{name} is {value!r}, but it must")):
        tfmulti.estimate(dense(), **{name: value})


def test_only_a_model_has_an_estimate() -> None:
    with pytest.raises(tfmulti.ModelError, match=r"estimate\(\) takes a keras\.Model, not a NoneT"):
        tfmulti.estimate(None)


def test_the_inputs_of_a_functional_model_keep_their_structure() -> None:
    inputs = {"a": keras.Input((3,)), "b": keras.Input((4,), dtype="int32")}
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["a"]))
    model.compile(loss="mse")
    x, y = form_of(model)
    assert {name: (spec.shape, spec.dtype) for name, spec in x.items()} == {
        "a": ([None, 3], tf.float32),
        "b": ([None, 4], tf.int32),
    }
    assert y.shape == [None, 1]


def test_a_model_of_unknown_inputs_needs_specs() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.layer(x)

    model = Own()
    model.compile("sgd", "mse")
    with pytest.raises(tfmulti.ModelError, match=r"Give estimate\(specs=\(x, y\)\)"):
        tfmulti.estimate(model)
    x = np.ones((4, 8), np.float32)
    assert tfmulti.estimate(model, specs=(x, x[:, :2])).gradients == 4 * (8 * 2 + 2)


def test_other_targets_than_the_outputs_are_asked_for() -> None:
    """A function does not tell that it takes class numbers, as a loss of Keras does."""
    sparse = keras.losses.sparse_categorical_crossentropy
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5, activation="softmax")])
    model.compile("sgd", lambda y, p: sparse(y, p))
    with pytest.raises(tfmulti.ModelError, match=r"If it is another one, give estimate\(specs="):
        tfmulti.estimate(model)
    of_batch = tf.TensorSpec([4, 8]), tf.TensorSpec([4], tf.int32)
    assert tfmulti.estimate(model, specs=of_batch).gradients == 4 * (8 * 5 + 5)
    with pytest.raises(tfmulti.ModelError) as error:
        tfmulti.estimate(model, specs=(of_batch[0], of_batch[0]))
    assert "give estimate" not in str(error.value)


def test_options_of_another_type_are_refused() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    for options in (32, {"microbatches": 2}):
        with pytest.raises(tfmulti.ConfigError, match="must be TrainingOptions"):
            tfmulti.estimate(model, options)  # type: ignore[arg-type]


class Halves(keras.layers.Layer):
    """A layer whose loop ends when its values are small."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        large = lambda x: tf.reduce_max(x) > 1.0  # noqa: E731
        return tf.while_loop(large, lambda x: (tf.sin(x) / 2.0,), (x,))[0]


def test_the_passes_of_a_loop_may_be_unknown_and_what_fits_is_then_unknown() -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), Halves()])
    model.compile("sgd", "mse")
    found = tfmulti.estimate(model, rows=4, device_memory_gb=1)
    assert len(found.unseen) == 1
    assert re.fullmatch(
        r"the number of passes of the loop \S*while\S* is known only while it runs", found.unseen[0]
    )
    assert f"more than that, because {found.unseen[0]}" in found.describe()
    assert found.fits is found.largest_batch is found.fitting_microbatches is None
    assert found.describe()[-1] == (
        "a device has 1 GB. Whether it fits is not known: try some steps."
    )
    # What is seen is too much already.
    found = tfmulti.estimate(model, rows=4, device_memory_gb=1e-6)
    assert found.fits is False
    assert found.largest_batch is found.fitting_microbatches is None
    assert found.advice().startswith("It does not fit: give more --microbatches")


def test_a_loop_keeps_what_its_gradient_needs_of_each_pass() -> None:
    def bytes_of(steps: int) -> float:
        model = keras.Sequential([keras.Input((steps, 3)), keras.layers.LSTM(4)])
        model.compile("sgd", "mse")
        found = tfmulti.estimate(model, rows=32, device_memory_gb=1)
        assert found.fits
        of_passes = tfmulti.estimate(model, rows=32, device_memory_gb=1, options=two_passes)
        assert of_passes.fits is None
        assert "once more" in of_passes.unseen[0]
        return found.activations_per_row

    two_passes = tfmulti.TrainingOptions(microbatches=2)
    # Of each step: four gates, the state and its tanh, the output, and the input with its copy.
    assert bytes_of(60) - bytes_of(40) == pytest.approx(20 * 4 * (7 * 4 + 3 * 2), rel=0.1)


def test_a_tensor_of_unknown_shape_is_named() -> None:
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
    found = tfmulti.estimate(model, rows=8, device_memory_gb=1)
    assert found.fits is None
    assert "is known only while the step runs" in found.unseen[0]
    known = tf.TensorSpec((8, 5, 4)), tf.TensorSpec((8, 5, 2))
    assert tfmulti.estimate(model, specs=known, rows=8, device_memory_gb=1).fits


def test_the_branches_of_a_condition_count() -> None:
    def total(layer: keras.layers.Layer) -> float:
        model = keras.Sequential([keras.Input((64,)), layer])
        model.compile("sgd", "mse")
        return tfmulti.estimate(model, rows=1000).total

    class Distances(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            far = lambda: tf.reduce_sum(x[:, None] - x[None], 1)  # noqa: E731
            return tf.cond(tf.reduce_max(x) > 0.0, far, lambda: x)

    assert total(Distances()) - total(keras.layers.Identity()) > 1000 * 1000 * 64 * 4


@pytest.mark.parametrize("passes", [1, 2])
def test_a_row_adds_activations_where_the_gradients_are_larger(passes: int) -> None:
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    found = tfmulti.estimate(model, tfmulti.TrainingOptions(microbatches=passes), rows=8)
    assert found.activations_per_row >= 4 * 512


def test_several_passes_need_the_sums_of_the_gradients() -> None:
    found = MemoryEstimate(100, 1, 10, 20, 1000, 0, 1, ((50.0, 2.0),), 0)
    assert found.at(100, 1) == 10 + 20 + 50 + 2 * 100 + 100
    assert found.at(100, 3) == 10 + 20 + 1000 + 50 + 2 * 34 + 100


def test_advice_for_each_case() -> None:
    def advice(device: int | None, line: tuple[float, float] = (0.0, 1e6)) -> str:
        return MemoryEstimate(100, 1, 10**6, 0, 0, 0, 0, (line,), 0, device).advice()

    assert "Give --device_memory_gb" in advice(None)
    assert advice(201 * 10**6) == "It fits; up to 200 rows per replica do."
    assert advice(26 * 10**6) == "Give --microbatches 4, or at most 25 rows per replica."
    assert advice(10**6).startswith("Not even one row fits")


@pytest.mark.processes
def test_the_dry_run_tells_what_fits(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()

    def fit(*flags: str) -> Finished:
        argv = ["-m", "tfmulti.fit", "--dry_run", *flags]
        return run(argv, tmp_path / "logs", limit_s=LIMIT_S, cwd=inside)

    done = fit("--device_memory_gb", "0.001")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("memory ")]
    assert "on each device for 64 rows: weights 212 kB" in lines[0]
    assert "a device has only 1 MB. Give " in lines[-1]
    last = "no step was run, because it does not fit. Nothing was written."
    assert done.stdout.splitlines()[-1] == f"dry run    {last}"
    refused = fit("--device_memory_gb", "0")
    assert refused.returncode == 2
    assert refused.stderr == (
        "tfmulti: --device_memory_gb is 0.0, but it must be above 0. "
        "(docs: troubleshooting#configuration)\n"
    )
    assert not list(inside.iterdir())


def test_the_memory_is_that_of_the_smallest_gpu_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: f"GPU-{index}")
    sizes = (8 * GB, 80 * GB, 40 * GB)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda index: SimpleNamespace(total=sizes[index])
    )
    assert memory._memory_of_gpus(0, {}) is None
    assert memory._memory_of_gpus(3, {}) == 8 * GB
    assert memory._memory_of_gpus(2, {"CUDA_VISIBLE_DEVICES": "1,GPU-2"}) == 40 * GB
    assert memory._memory_of_gpus(1, {"CUDA_VISIBLE_DEVICES": "1"}) == 80 * GB
