"""`python -m tfmulti.fit` as a user runs it: real processes, real files, real signals."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import made_data
from tests.support import processes as started
from tests.support.forked import Forks, run, run_workers
from tests.support.processes import (
    Finished,
    Processes,
    clean_env,
    processes,
    reserved,
    tf_config,
)
from tfmulti.config.console import number
from tfmulti.data.formats.record_index import index_of
from tfmulti.launch.heartbeat import read_progress

pytestmark = pytest.mark.processes

FIT = ["-m", "tfmulti.fit"]
LIMIT_S = 120


def fit(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Finished:
    """Runs the command in a folder and returns it, done well."""
    done = run([*FIT, *flags], folder / "logs", limit_s=LIMIT_S, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def report_of(folder: Path, name: str) -> dict[str, Any]:
    found = json.loads((folder / name / "report.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The README's first command, in a new process, with a folder to find it in."""
    folder = tmp_path_factory.mktemp("first")
    argv = [*FIT, "--strategy", "mirrored", "--run_dir", "a"]
    done = started.run(argv, folder / "logs", limit_s=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder, done


def test_the_first_command_learns_digits(first: tuple[Path, Finished]) -> None:
    folder, done = first
    report = report_of(folder, "a")
    assert report["metrics"]["val_accuracy"] >= 0.97
    assert report["metrics"]["test_accuracy"] >= 0.95
    assert report["steps"] == 15 * 19
    assert report["examples"] == 15 * 1197
    # The seconds count tracing and validation, and the examples per second do not.
    assert report["examples_per_second"] > report["examples"] / report["seconds"]
    assert (
        f"speed      285 steps, 17,955 examples in {number(report['seconds'])} s; "
        f"{number(report['examples_per_second'])} examples/s in the steps alone, without tracing"
    ) in done.stdout
    for words in (
        "strategy   mirrored (",
        "no GPU found",
        "devices    CPU:0: 1 replica",
        "64 global = 64 per replica × 1",
        "Epoch 15/15",
        "val_accuracy 0.9",
        "examples/s",
        "written    a: ",
    ):
        assert words in done.stdout
    assert "━" not in done.stdout, "a progress bar in a file"


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    mine, its = pty.openpty()
    argv = [sys.executable, *FIT, "--epochs", "1", "--run_dir", "r"]
    process = subprocess.Popen(argv, cwd=tmp_path, env=clean_env(), stdout=its, stderr=its)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(mine, 4096):
            shown += part
    os.close(mine)
    assert process.wait(LIMIT_S) == 0
    assert "━" in shown.decode()


def test_it_leaves_all_files(first: tuple[Path, Finished]) -> None:
    folder, _ = first
    names = {path.name for path in (folder / "a").iterdir()}
    assert names == {
        "config.json",
        "history.csv",
        "report.json",
        "curves.png",
        "report.html",
        "tensorboard",
        "model.keras",
        "checkpoints",
    }
    assert (folder / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "a" / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    report = report_of(folder, "a")
    assert [int(row["epoch"]) for row in rows] == list(range(1, 16))
    assert float(rows[-1]["val_accuracy"]) == report["metrics"]["val_accuracy"]
    assert [float(row["loss"]) for row in rows] == report["history"]["loss"]


def test_tensorboard_has_metrics_and_throughput(first: tuple[Path, Finished]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = first
    tags = set()
    for part in ("train", "validation"):
        events = EventAccumulator(str(folder / "a" / "tensorboard" / part))
        events.Reload()
        tags |= set(events.Tags()["tensors"])
    assert {
        "epoch_loss",
        "epoch_accuracy",
        "throughput/examples_per_sec",
        "throughput/device/examples_per_sec",
        "throughput/steps_per_sec",
    } <= tags


def test_the_model_loads_with_plain_keras(first: tuple[Path, Finished], tmp_path: Path) -> None:
    folder, _ = first
    code = textwrap.dedent("""
        import sys, hashlib, json, keras
        model = keras.saving.load_model(sys.argv[1])
        digest = hashlib.sha256()
        for weight in model.get_weights():
            digest.update(f"{weight.dtype} {weight.shape};".encode() + weight.tobytes())
        print(json.dumps([digest.hexdigest(), int(model.optimizer.iterations),
                          [m for m in sys.modules if m.startswith("tfmulti")]]))
    """)
    done = run(["-c", code, str(folder / "a" / "model.keras")], tmp_path, limit_s=LIMIT_S)
    digest, steps, tfmulti = json.loads(done.stdout)
    assert (digest, steps, tfmulti) == (report_of(folder, "a")["weights_sha256"], 285, [])


def test_config_json_starts_the_same_run_again(first: tuple[Path, Finished]) -> None:
    folder, _ = first
    fit(folder, "--config", "a/config.json", "--run_dir", "b", "--verbose", "0")
    again, before = report_of(folder, "b"), report_of(folder, "a")
    assert again["weights_sha256"] == before["weights_sha256"]
    assert again["history"] == before["history"]


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns TensorBoard's scalars by part and name, the times of things left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    found = {}
    for part in ("train", "validation"):
        events = EventAccumulator(str(folder / "tensorboard" / part), {"tensors": 0})
        events.Reload()
        for tag in events.Tags()["tensors"]:
            if not tag.startswith(("throughput", "data/waiting")):
                values = events.Tensors(tag)
                found[f"{part} {tag}"] = [
                    (v.step, float(tensor_util.make_ndarray(v.tensor_proto))) for v in values
                ]
    return found


def test_a_run_killed_at_any_time_ends_like_the_one_that_was_not(
    first: tuple[Path, Finished], tmp_path: Path
) -> None:
    """SIGKILL within the third epoch, in the sixth, and while the resumed one starts."""
    folder, _ = first
    argv = [
        *FIT,
        "--run_dir",
        str(tmp_path / "r"),
        "--checkpoint_every_steps",
        "7",
        "--verbose",
        "0",
    ]
    with processes(tmp_path / "logs", Forks) as group:
        for number, until in enumerate((45, 100, 0)):
            progress = tmp_path / f"progress-{number}"
            process = group.start(argv, {"TFMULTI_PROGRESS_FILE": str(progress)})
            wait_for_step(progress, until)
            process.kill()
            process.wait()
        whole = tmp_path / "r" / "checkpoints"
        kept = [path for path in whole.iterdir() if path.name.startswith("step-")]
        # A run that is killed after it wrote a checkpoint has not removed the oldest one yet.
        assert len(kept) in (2, 3)
    done = run(argv, tmp_path / "last", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    mine, its = tmp_path / "r", folder / "a"
    assert (mine / "history.csv").read_text() == (its / "history.csv").read_text()
    left, right = (json.loads((at / "report.json").read_text()) for at in (mine, its))
    for name in ("weights_sha256", "history", "metrics", "steps", "examples", "epochs"):
        assert left[name] == right[name]
    assert scalars_of(mine) == scalars_of(its)
    assert list(mine.glob(".partial*")) == []


def test_a_resumed_run_says_what_it_did_itself(tmp_path: Path) -> None:
    flags = ["--strategy", "mirrored", "--replicas", "2", "--run_dir", "r", "--verbose", "0"]
    flags += ["--epochs"]
    done = fit(tmp_path, *flags, "1").stdout
    assert "speed      19 steps, 1,197 examples in" in done
    assert "resumed" not in done
    (tmp_path / "r" / "report.json").unlink()  # it was ended before it said that it is done
    assert (
        "speed      nothing was left to train after step 19\n" in fit(tmp_path, *flags, "1").stdout
    )
    report = report_of(tmp_path, "r")
    assert (report["examples"], report["examples_before"]) == (1197, 1197)
    assert report["examples_per_second"] == 0
    finished = fit(tmp_path, *flags, "2")
    assert "resumed    after step 19, from r/checkpoints\n" in finished.stdout
    assert "speed      19 steps after step 19, 1,197 examples in" in finished.stdout
    # TensorFlow warns if a mirrored strategy runs outside of a function.
    assert "WARNING:tensorflow" not in finished.stderr
    report = report_of(tmp_path, "r")
    assert (report["steps"], report["steps_before"], report["examples"]) == (38, 19, 2394)


def wait_for_step(progress: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (told := read_progress(progress)) is None or told.step < step:
        assert time.monotonic() < deadline, "no such step in time"
        time.sleep(0.005)


def test_the_same_command_again_has_nothing_left_to_do(first: tuple[Path, Finished]) -> None:
    folder, _ = first
    before = {path: path.stat().st_mtime_ns for path in (folder / "a").rglob("*")}
    argv = [*FIT, "--run_dir", "a", "--strategy", "mirrored"]
    done = run(argv, folder / "logs", limit_s=LIMIT_S, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a has all 15 epochs; nothing is left to do" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (folder / "a").rglob("*")} == before


def test_fit_in_a_script_has_the_same_result(first: tuple[Path, Finished]) -> None:
    folder, _ = first
    code = textwrap.dedent("""
        from tfmulti import FitConfig, train
        report = train(FitConfig(strategy="mirrored", run_dir="script", verbose="0"))
        print("sha", report.weights_sha256, report.metrics["val_accuracy"])
    """)
    done = run(["-c", code], folder / "logs", limit_s=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    before = report_of(folder, "a")
    words = f"sha {before['weights_sha256']} {before['metrics']['val_accuracy']}"
    assert words in done.stdout


def test_op_determinism_is_a_flag(tmp_path: Path) -> None:
    """With this flag TensorFlow refuses every random operation without a seed."""
    code = textwrap.dedent("""
        import tensorflow as tf
        from tfmulti import FitConfig, train
        flags = {"replicas": 2, "epochs": 1, "run_dir": "a", "verbose": "0"}
        train(FitConfig(strategy="mirrored", op_determinism=True, **flags))
        try:
            tf.random.set_seed(None)
            tf.random.uniform([2])
        except RuntimeError as error:
            print("refused", error)
    """)
    done = run(["-c", code], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refused Random ops require a seed" in done.stdout


def test_two_replicas_and_two_workers_train_as_one_device(
    first: tuple[Path, Finished], tmp_path: Path
) -> None:
    folder, _ = first
    fit(tmp_path, "--replicas", "2", "--epochs", "2", "--run_dir", "replicas", "--log_throughput")
    workers = started.run_workers(
        [*FIT, "--epochs", "2", "--run_dir", "workers", "--log_throughput"],
        2,
        tmp_path / "logs2",
        limit_s=LIMIT_S,
        cwd=tmp_path,
    )
    one = report_of(folder, "a")["history"]
    for name in ("replicas", "workers"):
        report = report_of(tmp_path, name)
        assert report["replicas"] == 2
        for metric, values in report["history"].items():
            assert values == pytest.approx(one[metric][:2], abs=2e-5)
        speed = report["throughput"]
        assert 0 < speed["steps"] <= report["steps"] - 1  # without what was traced
        assert speed["examples_per_sec"] == pytest.approx(speed["examples"] / speed["seconds"])
        assert report["examples_per_second"] == pytest.approx(speed["examples_per_sec"])
        assert speed["device_examples_per_sec"] == pytest.approx(speed["examples_per_sec"] / 2)
    assert report_of(tmp_path, "replicas")["strategy"] == "mirrored"
    assert report_of(tmp_path, "workers")["strategy"] == "multi_worker_mirrored"
    assert "cluster of 2 workers" in workers[0].stdout
    events = [
        len(list((tmp_path / name / "tensorboard" / "train").glob("*tfevents*")))
        for name in ("replicas", "workers")
    ]
    assert events[0] == events[1], "the chief alone writes"
    assert (workers[1].stdout, workers[1].stderr) == ("", "")


def test_inexact_flags_are_told_and_go_on(tmp_path: Path) -> None:
    """After one epoch and a start more the history is that of two epochs at once, to the bit."""
    flags = ["--gradient_compression", "bfloat16", "--nosync_batch_norm"]

    def two_workers(name: str, epochs: str) -> Finished:
        argv = [*FIT, *flags, "--epochs", epochs, "--run_dir", name]
        logs = tmp_path / f"logs-{name}-{epochs}"
        return run_workers(argv, 2, logs, limit_s=LIMIT_S, cwd=tmp_path)[0]

    chief = two_workers("whole", "2")
    said = "--gradient_compression bfloat16, --nosync_batch_norm"
    assert f"inexact    {said}: not the numbers of one device" in chief.stdout
    two_workers("parts", "1")
    two_workers("parts", "2")
    whole, parts = (report_of(tmp_path, name) for name in ("whole", "parts"))
    assert whole["inexact"] == said.split(", ")
    assert parts["history"] == whole["history"]
    assert parts["weights_sha256"] == whole["weights_sha256"]
    alone = fit(tmp_path, *flags[:2], "--epochs", "1", "--run_dir", "alone")
    said = "--gradient_compression bfloat16"
    assert f"exact      {said} has no effect with one worker" in alone.stdout
    assert report_of(tmp_path, "alone")["inexact"] == []


def test_rows_of_tables_that_cannot_be_read_are_left_out_once(tmp_path: Path) -> None:
    """All workers read the same tables; the chief names the rows that are left out."""
    rows = [f"{i},{'ab'[i % 2]}" for i in range(20)]
    (tmp_path / "train.csv").write_text("\n".join(["n,y", *rows[:9], "cut", *rows[9:]]))
    (tmp_path / "test.csv").write_text("\n".join(["n,y", *rows[:4], "1,a,b"]))
    data = "csv:train.csv,target=y,test=test.csv"
    flags = ["--dataset", data, "--global_batch_size", "5", "--epochs", "2", "--run_dir", "r"]
    argv = [*FIT, *flags, "--skip_bad_records", "2", "--validation_fraction", "0"]
    logs = tmp_path / "logs"
    chief, other = run_workers(argv, 2, logs, limit_s=LIMIT_S, cwd=tmp_path)
    said = [line for line in chief.stderr.splitlines() if "left out" in line]
    assert said == [
        "tfmulti: left out row 10 of train.csv: it has 1 column, but the header has 2: 'cut'.",
        "tfmulti: left out row 5 of test.csv: it has 3 columns, but the header has 2: '1,a,b'.",
    ]
    assert "left out" not in other.stderr
    report = report_of(tmp_path, "r")
    assert (report["examples"], report["examples_lost"]) == (40, 2)
    assert "20 training, 4 test" in chief.stdout


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    """On two workers the same as on one device."""
    (tmp_path / "data").mkdir()
    dataset = made_data.tfrecord(tmp_path / "data")
    path = tmp_path / "data" / "c"
    content = bytearray(path.read_bytes())
    for record in (3, 14):
        content[int(index_of(str(path))[record, 0])] ^= 1
    path.write_bytes(content)
    flags = ["--dataset", dataset, "--model", "linear", "--optimizer", "sgd", "--epochs", "2"]
    flags += ["--global_batch_size", "8", "--validation_fraction", "0"]
    more = ["--class_weight", "balanced", "--skip_bad_records", "2", "--run_dir"]
    alone = fit(tmp_path, *flags, *more, "alone", "--strategy", "one_device")
    argv, logs = [*FIT, *flags, *more, "workers"], tmp_path / "logs2"
    both = run_workers(argv, 2, logs, limit_s=LIMIT_S, cwd=tmp_path)
    for text in (alone.stderr, "".join(done.stderr for done in both)):
        said = {line for line in text.splitlines() if "left out" in line}
        words = "the checksum is wrong (the file is damaged)."
        assert said == {f"tfmulti: left out {path}, record {n}: {words}" for n in (3, 14)}
    reports = [report_of(tmp_path, name) for name in ("alone", "workers")]
    assert [report["examples_lost"] for report in reports] == [4, 4]
    for metric, values in reports[0]["history"].items():
        assert values == pytest.approx(reports[1]["history"][metric], abs=2e-5)
    done = run([*FIT, *flags], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 2
    assert "or give --skip_bad_records N to leave out up to N such" in done.stderr


def test_three_workers_with_a_chief_and_an_evaluator(tmp_path: Path) -> None:
    with reserved(4) as a, processes(tmp_path / "logs", Forks) as group:
        cluster = {"chief": [a[0]], "worker": [a[1], a[2]], "evaluator": [a[3]]}
        for kind, index in (("chief", 0), ("worker", 0), ("worker", 1), ("evaluator", 0)):
            config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
            group.start(
                [*FIT, "--epochs", "1", "--global_batch_size", "100", "--run_dir", "r"],
                {"TF_CONFIG": config},
                tmp_path,
            )
        done = group.wait(LIMIT_S)
    assert [d.returncode for d in done] == [0] * 4, [d.stderr for d in done]
    assert "at most 34 per replica × 3" in done[0].stdout
    assert done[1].stdout + done[2].stdout == ""
    assert "nothing to do" in done[3].stdout
    assert report_of(tmp_path, "r")["examples"] == 1197


@pytest.mark.parametrize("steps", ["1", "8", "40"])  # of 19 an epoch
def test_dry_run_writes_nothing(tmp_path: Path, steps: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    argv = [*FIT, "--replicas", "2", "--dry_run", "--steps_per_execution", steps]
    done = run(argv, tmp_path / "logs", limit_s=LIMIT_S, cwd=inside)
    assert done.returncode == 0, done.stderr
    (step_ms,) = re.findall(r"285 steps of ([\d.,]+) ms would take", done.stdout)
    assert float(step_ms.replace(",", "")) < 500  # a traced execution takes a second and more
    assert "Nothing was written." in done.stdout
    assert list(inside.iterdir()) == []


def test_export_serves(tmp_path: Path) -> None:
    fit(tmp_path, "--epochs", "1", "--replicas", "2", "--run_dir", "r", "--export_dir", "served")
    code = textwrap.dedent("""
        import json, keras, numpy as np, tensorflow as tf
        x = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8, 1) % 17
        module = tf.saved_model.load("served")
        served = module.serve(x).numpy()
        loaded = keras.saving.load_model("r/model.keras").predict(x, verbose=0)
        print(json.dumps([list(served.shape), float(abs(served - loaded).max())]))
    """)
    done = run(["-c", code], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shape, gap = json.loads(done.stdout.splitlines()[-1])
    assert shape == [3, 10]
    assert gap < 1e-6


OPTIONS: dict[str, list[str]] = {
    "regression": ["--dataset", "regression", "--replicas", "2"],
    "schedule": [
        "--optimizer",
        "sgd",
        "--warmup_steps",
        "5",
        "--learning_rate_decay",
        "cosine",
        "--scale_learning_rate",
        "32",
        "--epochs",
        "1",
    ],
    "float16": [
        "--precision",
        "mixed_float16",
        "--optimizer",
        "lamb",
        "--epochs",
        "1",
        "--replicas",
        "2",
    ],
    "resnet": [
        "--model",
        "resnet20",
        "--epochs",
        "1",
        "--replicas",
        "2",
        "--optimizer",
        "adamw",
        "--dataset",
        "synthetic:shape=16x16x3,examples=96",
        "--precision",
        "mixed_bfloat16",
    ],
    "text": [
        "--dataset",
        "synthetic:tokens=8,vocabulary=40,classes=2,examples=128",
        "--epochs",
        "1",
        "--per_replica_batch_size",
        "17",
        "--replicas",
        "2",
        "--steps_per_execution",
        "2",
    ],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(tmp_path: Path, name: str) -> None:
    done = fit(tmp_path, *OPTIONS[name], "--run_dir", "r", "--verbose", "2")
    report = report_of(tmp_path, "r")
    assert np.isfinite(list(report["metrics"].values())).all()
    if name == "regression":
        assert (report["steps"], report["examples"]) == (100, 100 // 7 * 100 + 2 * 16)
        assert report["history"]["loss"][-1] < 0.2 * report["history"]["loss"][0]
    if name == "schedule":
        assert "sgd at 0.006 (scaled from 0.003)" in done.stdout
    if name == "text":
        assert (report["global_batch_size"], report["steps"]) == (34, 4)


NORMALIZED = """
    import keras

    def build(spec):
        return keras.Sequential([
            keras.Input(spec.input_shape), keras.layers.Rescaling(1 / 16), keras.layers.Flatten(),
            keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dense(16, "tanh"),
            keras.layers.Dropout(0.3), keras.layers.Dense(10, "softmax")])
"""


def test_passes_and_batch_normalization_are_flags(tmp_path: Path) -> None:
    """One device's history on three replicas; with each replica's own statistics another."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(NORMALIZED))
    replicas = ["--replicas", "3"]
    history = {}
    for name, flags in {
        "one": [],
        "three": replicas,
        "own": [*replicas, "--nosync_batch_norm", "--microbatches", "4"],
    }.items():
        fit(tmp_path, "--model", "mine:build", "--epochs", "1", *flags, "--run_dir", name)
        history[name] = report_of(tmp_path, name)["history"]
    for metric, values in history["one"].items():
        assert history["three"][metric] == pytest.approx(values, abs=1e-5)
    assert history["own"]["loss"] != pytest.approx(history["one"]["loss"], abs=1e-4)
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["sync_batch_norm"], config["microbatches"]) == (False, 4)


USER_SIDE = """
    import keras, numpy as np, tensorflow as tf

    x = np.random.default_rng(0).standard_normal((60, 5)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")

    def arrays():
        return x, y

    def batches(global_batch_size):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)
        return data, data.take(2), data

    def nothing():
        return 3

    def other_labels():
        return (x, y), (x, y + 1)

    def build(spec):
        inputs = keras.Input(spec.input_shape)
        return keras.Model(inputs, keras.layers.Dense(spec.outputs, "softmax")(inputs))

    class ShareOfEachClass(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="shares")
            self.sums = self.add_weight(shape=(2,), initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.sums.assign_add(keras.ops.sum(y_pred, 0))

        def result(self):
            return keras.ops.divide_no_nan(self.sums, keras.ops.sum(self.sums))

    def compiled():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, "softmax")])
        model.compile(keras.optimizers.RMSprop(0.01), "sparse_categorical_crossentropy",
                      metrics=["accuracy", ShareOfEachClass()])
        return model

    class Divided(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, self(x))
                # The public property is 1 in a step.
                replicas = self.distribute_strategy.extended._num_replicas_in_sync
                loss = tf.reduce_mean(losses) / replicas
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def divided():
        inputs = keras.Input((5,))
        model = Divided(inputs, keras.layers.Dense(2, "softmax")(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model
"""


@pytest.fixture
def user_side(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_SIDE))
    return tmp_path


@pytest.mark.parametrize(
    ("dataset", "model"),
    [("arrays", "mlp"), ("arrays", "mine:build"), ("batches", "mine:compiled")],
)
def test_users_own_functions(user_side: Path, dataset: str, model: str) -> None:
    done = fit(
        user_side,
        "--dataset",
        f"mine:{dataset}",
        "--model",
        model,
        "--replicas",
        "2",
        "--global_batch_size",
        "20",
        "--epochs",
        "2",
        "--run_dir",
        "r",
        *(["--verify", "--verify_steps", "2"] if model == "mine:build" else []),
    )
    report = report_of(user_side, "r")
    assert "accuracy" in report["metrics"]
    assert report["steps"] == 6
    if model == "mine:build":
        found = report["verification"]
        assert (found["verdict"], found["steps"], found["replicas"]) == ("same", 2, 2)
        assert 0 <= found["seconds_apart"] <= found["seconds"]
    assert ("compiled with RMSprop by its own function" in done.stdout) == (
        model == "mine:compiled"
    )
    if dataset == "batches":
        assert report["metrics"]["test_accuracy"] >= 0
        assert [sum(shares) for shares in report["history"]["val_shares"]] == pytest.approx([1, 1])
        last = list(csv.DictReader(io.StringIO((user_side / "r/history.csv").read_text())))[-1]
        assert json.loads(last["val_shares"]) == report["history"]["val_shares"][-1]


def test_other_numbers_than_one_devices_fail_the_run(user_side: Path) -> None:
    """The message is one line, and nothing is written; without the check the run is made."""
    flags = ["--dataset", "mine:arrays", "--model", "mine:divided", "--replicas", "2"]
    flags += ["--global_batch_size", "20", "--epochs", "1", "--run_dir", "r"]
    done = run([*FIT, *flags], user_side / "logs", limit_s=LIMIT_S, cwd=user_side)
    assert done.returncode == 1
    told = [line for line in done.lines() if line.startswith("tfmulti: ")]
    assert len(told) == 1
    assert "mine.py:" in told[0]
    assert "(gradients = tape.gradient(loss, self.trainable_variables))" in told[0]
    assert "Traceback" not in done.stderr
    assert not (user_side / "r").exists()
    fit(user_side, *flags, "--noverify")
    assert report_of(user_side, "r")["verification"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset", "mine:nothing"], "returned a int"),
        (["--dataset", "mine:other_labels"], "y of the validation part is 2 in row"),
        (["--dataset", "mine:arays"], "did you mean 'arrays'"),
        (["--dataset", "mine:batches", "--model", "cnn"], "gives no plain arrays"),
        (["--dataset", "mine:arrays", "--model", "mine:nothing"], "Return a keras.Model"),
        (["--model", "mine:compiled"], "but those of --dataset digits have shape (8, 8, 1)"),
        (["--dataset", "mine:arrays", "--global_batch_size", "61"], "which has 54 examples"),
    ],
)
def test_users_functions_gone_wrong(user_side: Path, flags: list[str], words: str) -> None:
    size = [] if "--global_batch_size" in flags else ["--global_batch_size", "20"]
    done = run([*FIT, *flags, *size], user_side / "logs", limit_s=LIMIT_S, cwd=user_side)
    assert (done.returncode, len(done.lines())) == (2, 1), done.stderr
    assert words in done.stderr
    assert not (user_side / "runs").exists()


def wait_for_epoch(group: Processes, epoch: int) -> None:
    for _ in range(LIMIT_S * 20):
        if f"Epoch {epoch}/" in group.output(0):
            return
        time.sleep(0.05)
    raise AssertionError(f"epoch {epoch} did not begin\n{group.logs()}")


@pytest.mark.parametrize(
    ("number", "workers", "to"),
    [
        (signal.SIGINT, 1, [0]),
        (signal.SIGTERM, 1, [0]),
        (signal.SIGINT, 2, [0, 1]),
        (signal.SIGINT, 2, [1]),
        (signal.SIGTERM, 2, [0]),
    ],
    ids=["ctrl-c", "term", "ctrl-c-both", "ctrl-c-worker-1", "term-worker-0"],
)
def test_signals_save_what_was_reached(
    tmp_path: Path, number: signal.Signals, workers: int, to: list[int]
) -> None:
    with reserved(workers) as addresses, processes(tmp_path / "logs") as group:
        started = [
            group.start(
                [*FIT, "--epochs", "100000", "--run_dir", "r", "--verbose", "2"],
                {"TF_CONFIG": tf_config(addresses, i)} if workers > 1 else {},
                tmp_path,
            )
            for i in range(workers)
        ]
        wait_for_epoch(group, 3)
        for worker in to:
            started[worker].send_signal(number)
        done = group.wait(5)  # the limit that users are promised, saving included
    assert [d.returncode for d in done] == [128 + number] * workers, [d.stderr for d in done]
    report = report_of(tmp_path, "r")
    assert report["stopped_by"] == number.name
    assert report["epochs"] >= 2
    assert report["steps"] >= 38
    assert (tmp_path / "r" / "model.keras").exists()
    assert len((tmp_path / "r" / "history.csv").read_text().splitlines()) == report["epochs"] + 1


def test_a_worker_that_waits_for_another_ends_on_ctrl_c(tmp_path: Path) -> None:
    """SIGTERM is another matter there: TensorFlow has put its own handler in place by then."""
    with reserved(2) as addresses, processes(tmp_path / "logs") as group:
        worker = group.start(
            [*FIT, "--run_dir", "r"], {"TF_CONFIG": tf_config(addresses, 0)}, tmp_path
        )
        for _ in range(LIMIT_S * 20):
            if "waiting" in group.output(0):
                break
            time.sleep(0.05)
        time.sleep(1)  # into TensorFlow's own waiting, where Python runs no handler
        worker.send_signal(signal.SIGINT)
        done = group.wait(5)
    assert done[0].returncode == -signal.SIGINT  # a shell says 130
    assert not (tmp_path / "r").exists()


def test_xla_is_asked_for_by_a_flag(tmp_path: Path) -> None:
    """What reaches the model is told by what it says of a step that XLA cannot compile."""
    flags = ("--epochs", "1", "--model", "mlp", "--microbatches", "2", "--run_dir", "a")
    done = fit(tmp_path, *flags, "--jit_compile")
    assert "XLA does not compile this step (jit_compile): --microbatches" in done.stderr
