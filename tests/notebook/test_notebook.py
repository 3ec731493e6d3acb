"""Tests of `notebook_launcher` in a real Jupyter kernel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import nbclient
import nbformat
import psutil
import pytest

from tests.support.processes import ROOT, clean_env, is_alive, processes
from tfmulti import ConfigError, TfmultiError, notebook_launcher
from tfmulti.run.notebook import main as call_in_worker

pytestmark = pytest.mark.processes

LIMIT_S = 240

TRAINING = """
import numpy as np
factor = 2.0

def train(epochs):
    import keras, tfmulti
    strategy = tfmulti.make_strategy()
    print("workers", strategy.num_replicas_in_sync)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    x = np.arange(256, dtype="float32").reshape(64, 4) / 256
    return model.fit(x, factor * x[:, :1], batch_size=8, epochs=epochs)
"""


class Notebook:
    """A notebook whose cells run one after the other in one kernel."""

    def __init__(self, client: nbclient.NotebookClient, home: Path) -> None:
        self._client, self._home = client, home
        self.html: list[str] = []
        shown, _ = self.run("import os\nos.getpid()")
        self._kernel = int(shown)

    def run(self, code: str) -> tuple[str, Any]:
        """Returns the text that a cell shows, and its error output or None."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        texts = [each["text"] for each in cell.outputs if each["output_type"] == "stream"]
        texts += [
            each["data"]["text/plain"]
            for each in cell.outputs
            if each["output_type"] == "execute_result"
        ]
        errors = [each for each in cell.outputs if each["output_type"] == "error"]
        self.html = [
            each["data"]["text/html"]
            for each in cell.outputs
            if "text/html" in each.get("data", {})
        ]
        return "".join(texts), errors[0] if errors else None

    def interrupt(self) -> None:
        """Interrupts the kernel as the button of a notebook does."""
        os.kill(self._kernel, signal.SIGINT)

    def workers(self) -> list[int]:
        """Returns the workers that live, of this notebook and not of a test at the same time.

        They inherit the home folder of the kernel, also after the kernel has left them.
        """
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if "tfmulti.run.notebook" in (process.info["cmdline"] or []):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if process.environ().get("HOME") == str(self._home):
                        found.append(process.pid)
        return found


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    env = clean_env({"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)})
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=LIMIT_S, kernel_name="python3", allow_errors=True
    )
    with client.setup_kernel(env=env, cwd=str(tmp_path)):
        yield Notebook(client, tmp_path)


def numbers_of(shown: str) -> list[float]:
    """Returns the list of numbers that a cell shows last."""
    return [float(text) for text in shown[shown.rindex("[") :].strip("[]\n").split(",")]


def test_a_function_of_the_notebook_trains_on_two_workers(notebook: Notebook) -> None:
    notebook.run(TRAINING)
    shown, error = notebook.run(
        "from tfmulti import notebook_launcher\nhistory = notebook_launcher(train, (3,))"
    )
    assert error is None
    assert "workers 2" in shown
    # The progress bar of each epoch has moved on one line.
    assert all(f"Epoch {epoch}/3" in shown for epoch in (1, 2, 3))
    assert "\r" in shown or "\x08" in shown
    assert "8/8" in shown
    # The kernel itself has not started TensorFlow's devices; plain Keras has the same numbers.
    losses, error = notebook.run("history.history['loss']")
    assert error is None
    alone, error = notebook.run("train(3).history['loss']")
    assert error is None
    assert numbers_of(losses) == pytest.approx(numbers_of(alone), rel=1e-5)


def test_the_first_error_of_a_worker_is_raised_in_the_cell(notebook: Notebook) -> None:
    code = """
from tfmulti import notebook_launcher
class Mine(Exception):
    pass

def fails():
    import os
    if os.environ["RANK"] == "1":
        raise Mine("wrong here")
    import time
    time.sleep(60)
    return 1

notebook_launcher(fails)
"""
    _, error = notebook.run(code)
    assert (error["ename"], error["evalue"]) == ("Mine", "wrong here")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert "worker 1:" in text
    assert "in fails" in text
    assert not notebook.workers()


def test_interrupting_the_kernel_ends_all_workers(notebook: Notebook) -> None:
    code = """
from tfmulti import notebook_launcher
def waits():
    import time
    print("begun", flush=True)
    time.sleep(600)

notebook_launcher(waits, workers=2)
"""
    seen: list[int] = []

    def interrupt() -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while len(notebook.workers()) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(5)
        seen.extend(notebook.workers())
        notebook.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    shown, error = notebook.run(code)
    thread.join()
    assert len(seen) >= 2
    assert error["ename"] == "KeyboardInterrupt"
    assert "begun" in shown
    assert not notebook.workers()
    # The kernel lives.
    assert notebook.run("1 + 1") == ("2", None)


def test_a_second_interrupt_kills_workers_that_do_not_end(notebook: Notebook) -> None:
    code = """
from tfmulti import notebook_launcher
def stays():
    import signal, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("begun", file=sys.stderr, flush=True)
    time.sleep(600)

notebook_launcher(stays, workers=2)
"""

    def interrupt() -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while len(notebook.workers()) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(5)
        notebook.interrupt()
        time.sleep(3)
        after_the_first.append(len(notebook.workers()))
        notebook.interrupt()

    after_the_first: list[int] = []
    thread = threading.Thread(target=interrupt)
    thread.start()
    shown, error = notebook.run(code)
    thread.join()
    assert after_the_first[0] >= 2
    assert error["ename"] == "KeyboardInterrupt"
    # What the chief writes to standard error is shown, too.
    assert "begun" in shown
    assert not notebook.workers()


def test_a_process_that_ends_itself_has_no_result() -> None:
    """The messages name no folder, because that of the call is removed."""
    with pytest.raises(TfmultiError, match=r"as by sys\.exit\(\), so there is no result"):
        notebook_launcher(sys.exit, (0,), workers=1)
    with pytest.raises(TfmultiError, match="ended with exit code 3") as raised:
        notebook_launcher(sys.exit, (3,), workers=1)
    assert "tfmulti-notebook-" not in str(raised.value)


class Unloadable:
    """Can be pickled, but not loaded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_result_that_cannot_be_loaded_is_told_so() -> None:
    with pytest.raises(TfmultiError, match=r"cannot be loaded in the notebook \(ValueError: inval"):
        notebook_launcher(Unloadable, workers=1)


# Each epoch takes about a second, so that the interrupt comes in the middle of the training.
SAVES = """
def train(folder):
    import time, keras, tfmulti
    import numpy as np
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.1)
        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, flush=True)
            open("begun", "w").close()
    strategy = tfmulti.make_strategy()
    with strategy.scope():
        model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    callbacks = [tfmulti.Checkpoint(folder, every_s=None, every_steps=None), Slow()]
    return model.fit(x, x[:, :1], batch_size=8, epochs=EPOCHS, callbacks=callbacks, verbose=0)
"""


def test_an_interrupt_saves_and_the_cell_goes_on_from_there(
    notebook: Notebook, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    cell = (
        "from tfmulti import notebook_launcher\n"
        "history = notebook_launcher(train, ('checkpoints',))\n"
        "print(history.epoch)"
    )

    def interrupt() -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        notebook.interrupt()

    notebook.run(SAVES.replace("EPOCHS", "300"))
    thread = threading.Thread(target=interrupt)
    thread.start()
    _, error = notebook.run(cell)
    thread.join()
    assert error["ename"] == "KeyboardInterrupt"
    assert not notebook.workers()
    saved = sorted(folder.glob("step-*"))
    assert saved
    step = int(re.sub(r"\D", "", saved[-1].name))
    assert 8 <= step < 300 * 8
    # The next run of the cell trains only what was left of the epochs.
    notebook.run(SAVES.replace("EPOCHS", str(step // 8 + 2)))
    shown, error = notebook.run(cell)
    assert error is None
    assert "epoch 0\n" not in shown
    assert f"epoch {step // 8 + 1}\n" in shown


def test_a_report_and_live_curves_are_shown_as_html(notebook: Notebook) -> None:
    code = """
import tfmulti
class Seen(tfmulti.LiveCurves):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        print("shown", epoch)

import keras, numpy as np
strategy = tfmulti.make_strategy("mirrored", replicas=2)
with strategy.scope():
    model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
x = np.ones((32, 4), "float32")
history = model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[Seen()])
"""
    shown, error = notebook.run(code)
    assert error is None
    assert [f"shown {epoch}" in shown for epoch in range(3)] == [True] * 3
    # One picture was replaced each time.
    [picture] = notebook.html
    assert picture.count("<svg") == 1
    assert ">loss<" in picture
    assert '<progress value="3" max="3"></progress> 3 of 3 epochs' in picture
    code = """
report = tfmulti.train(tfmulti.FitConfig(epochs=1, replicas=2, run_dir="run <b>"))
report
"""
    shown, error = notebook.run(code)
    assert error is None
    # The bar of a terminal, although a cell is none.
    assert "━" in shown
    assert "<h3>Curves</h3>" in notebook.html[-1]
    assert "run &lt;b&gt;" in notebook.html[-1]


def test_live_curves_of_a_worker_are_shown_in_the_cell(notebook: Notebook) -> None:
    code = TRAINING.replace("epochs=epochs", "epochs=epochs, callbacks=[tfmulti.LiveCurves()]")
    notebook.run(code)
    _, error = notebook.run(
        "from tfmulti import notebook_launcher\nhistory = notebook_launcher(train, (3,))"
    )
    assert error is None
    [picture] = notebook.html
    assert ">loss<" in picture


def test_a_kernel_whose_tensorflow_has_started_is_told_to_restart(notebook: Notebook) -> None:
    _, error = notebook.run(
        "import tensorflow as tf, tfmulti\ntf.constant(1) + 1\n"
        "tfmulti.make_strategy('mirrored', replicas=2)"
    )
    assert error["ename"] == "DeviceError"
    assert "restart the kernel first (menu Kernel, Restart Kernel)" in error["evalue"]


WAITS = """
import time
from tfmulti import notebook_launcher

def waits():
    print("begun", flush=True)
    time.sleep(600)

notebook_launcher(waits, workers=2)
"""


def test_a_killed_kernel_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    script = tmp_path / "cell.py"
    script.write_text(WAITS)
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folders)}
    with processes(tmp_path / "out") as group:
        kernel = psutil.Process(group.start([str(script)], env).pid)
        begun_by = time.monotonic() + LIMIT_S / 2
        while "begun" not in group.output(0) and time.monotonic() < begun_by:
            time.sleep(0.2)
        assert "begun" in group.output(0), group.logs()
        left = kernel.children(recursive=True)
        # The launcher, its guard, and two workers.
        assert len(left) >= 4
        (folder,) = folders.glob("tfmulti-notebook-*")
        kernel.kill()
        gone_by = time.monotonic() + LIMIT_S / 4
        while time.monotonic() < gone_by and (folder.exists() or any(map(_runs, left))):
            time.sleep(0.2)
        alive = [process for process in left if _runs(process)]
        for process in alive:
            process.kill()
        assert not alive
        assert not folder.exists()


def _runs(process: psutil.Process) -> bool:
    """Returns whether a process runs; another process may have its id by now."""
    return process.is_running() and is_alive(process.pid)


@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o755, 0o600), (0o700, 0o644), (0o700, None)]
)
def test_a_worker_loads_no_function_that_another_user_could_write(
    tmp_path: Path, folder_mode: int, file_mode: int | None
) -> None:
    folder, sign = tmp_path / "call", tmp_path / "sign"
    folder.mkdir()
    call = folder / "call.pkl"
    if file_mode is None:
        other = tmp_path / "other.pkl"
        call.symlink_to(other)
        file_mode = 0o600
    call.write_bytes(cloudpickle.dumps((lambda: sign.write_text("called"), ())))
    call.chmod(file_mode)
    folder.chmod(folder_mode)
    with pytest.raises(ConfigError, match=r"is loaded as code, so only this user may write it"):
        call_in_worker(folder)
    assert not sign.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": 3}, "notebook_launcher needs a function, but got 3."),
        ({"function": print, "workers": 0}, "workers is 0, but it must be a whole number from 1."),
        ({"function": print, "workers": True}, "workers is True, but it must be"),
        ({"function": print, "args": 3}, "args is 3, but it must be a tuple or list of arguments."),
        ({"function": print, "args": "ab"}, "args is 'ab', but it must be a tuple or list"),
        ({"function": print, "args": (threading.Lock(),)}, "cannot be sent to the workers"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        notebook_launcher(**arguments)
