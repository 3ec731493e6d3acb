"""Starts several workers from a notebook, and shows in the cell what the chief prints.

    from tfmulti import notebook_launcher

    def train():
        import keras, tfmulti
        strategy = tfmulti.make_strategy()
        with strategy.scope():
            model = tfmulti.prepare(keras.Sequential([...]))
            model.compile("adam", "mse")
        return model.fit(x, y, epochs=3)

    history = notebook_launcher(train, workers=2)

The function may be defined in the notebook. It is sent to the workers by value (cloudpickle), with
the variables that it uses. `tfmulti launch` starts the workers as new processes, each with its part
of the GPUs or cores, so TensorFlow need not be started in the notebook itself.

If the kernel is killed, the launcher gets SIGTERM from the system. It then ends the workers, which
may save, and removes the folder through which they were sent the function.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from tfmulti.config.notebook_output import FILE, FOLDER_VARIABLE, NotebookOutput
from tfmulti.errors import ConfigError, DeviceError, TfmultiError
from tfmulti.launch.__main__ import main as launch
from tfmulti.launch.shim import PARENT, tie_to_launcher
from tfmulti.launch.signals import GRACE

_CALL, _RESULT, _ERROR = "call.pkl", "result.pkl", "failed_{}.pkl"
_PRINTED = "printed.txt"
_POLL_S, _STOP_S = 0.1, 45.0
_LAUNCH = "--launch"
_LAST_LINES = 20


class WorkerTraceback(Exception):
    """The traceback of a worker, which is the cause of the error that the cell raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), *, workers: int = 2
) -> Any:
    """Runs a function on several workers of this machine, and returns what it returns on the chief.

    The cell shows what the chief prints, with its progress bar and its warnings. Interrupting the
    kernel ends all workers; a run with a Checkpoint callback saves first. A second interrupt ends
    them at once.

    Args:
        function: the function that every worker calls. It may be defined in the notebook. In it,
            `tfmulti.make_strategy()` returns the strategy over all workers.
        args: a tuple or list of its arguments, which cloudpickle can send.
        workers: the number of workers. With GPUs, each gets an equal part of them.

    Returns:
        The chief's result, which cloudpickle can send: values, arrays, or Keras' History (without
        its model).

    Raises:
        ConfigError: there is no function, or it or an argument cannot be sent.
        DeviceError: TensorFlow has taken the GPUs in this kernel.
        TfmultiError: a worker was lost without an error of its own, or there is no result.
        Exception: the first error that a worker has raised, with the worker's traceback.
    """
    _check(function, args, workers)
    # Only this user can read or write the folder, so nobody else can change what the workers run.
    with tempfile.TemporaryDirectory(prefix="tfmulti-notebook-") as name:
        folder = Path(name)
        try:
            _write_file(folder / _CALL, cloudpickle.dumps((function, args)))
        except Exception as error:
            raise ConfigError(
                f"the function or an argument cannot be sent to the workers ({error}). Make it "
                "inside the function, or load it there."
            ) from None
        code, errors = _run_workers(folder, workers)
        _raise_first_error(folder, workers)
        if code:
            raise TfmultiError(
                f"the workers have ended with exit code {code}. The launcher said: {errors}"
            )
        if not (folder / _RESULT).exists():
            raise TfmultiError(
                "the function has ended its process, as by sys.exit(), so there is no result. "
                "Return a value instead, or None."
            )
        return _loaded((folder / _RESULT).read_bytes())


def _loaded(data: bytes) -> Any:
    """Returns the result that a worker has sent; raises TfmultiError if it cannot be loaded."""
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise TfmultiError(
            f"the result cannot be loaded in the notebook ({type(error).__name__}: {error}). "
            "Return numbers, arrays or a History."
        ) from error


def _check(function: Any, args: Any, workers: int) -> None:
    """Checks the arguments, and that the GPUs are free."""
    if not callable(function):
        raise ConfigError(
            f"notebook_launcher needs a function, but got {function!r}. Write "
            "notebook_launcher(train, (argument,)), without calling it."
        )
    if not isinstance(args, (tuple, list)):
        raise ConfigError(
            f"args is {args!r}, but it must be a tuple or list of arguments. Write (argument,) for "
            "a single one."
        )
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"workers is {workers!r}, but it must be a whole number from 1.")
    tf = sys.modules.get("tensorflow")
    if tf is None or not tf.config.list_physical_devices("GPU"):
        return
    try:
        # TensorFlow refuses to change this setting once it has started on the GPUs.
        for gpu in tf.config.list_physical_devices("GPU"):
            grows = tf.config.experimental.get_memory_growth(gpu)
            tf.config.experimental.set_memory_growth(gpu, not grows)
            tf.config.experimental.set_memory_growth(gpu, grows)
    except (RuntimeError, ValueError):
        raise DeviceError(
            "TensorFlow has started in this kernel, and holds the GPUs. Restart the kernel (menu "
            "Kernel, Restart), and call notebook_launcher before any other TensorFlow operation."
        ) from None


def _run_workers(folder: Path, workers: int) -> tuple[int, str]:
    """Runs the workers, and returns the launcher's exit code and its last lines."""
    argv = [sys.executable, "-m", "tfmulti.run.notebook", _LAUNCH, str(folder), str(workers)]
    paths = [path for path in sys.path if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *paths])}
    env[FOLDER_VARIABLE] = str(folder)
    # If this process ends, the launcher gets SIGTERM. It kills its process group only after a time
    # that is longer than the time that the workers have to save.
    env |= {PARENT: str(os.getpid()), GRACE: f"{_STOP_S:g}"}
    # A notebook shows no colours of a terminal, and no lines of TensorFlow's start.
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with open(folder / "launcher.log", "wb") as log:
        launcher = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            # The interrupt of the kernel goes to its process group.
            start_new_session=True,
        )
    chief = _CellOutput(folder / _PRINTED, folder / FILE)
    try:
        while (code := launcher.poll()) is None:
            chief.show()
            time.sleep(_POLL_S)
        chief.show()
    finally:
        _stop(launcher)
    lines = (folder / "launcher.log").read_text(errors="replace").splitlines()
    # The folder is removed, so no line may send the user there.
    return code, "\n".join(line for line in lines[-_LAST_LINES:] if str(folder) not in line)


def _run_launcher(folder: Path, workers: str) -> int:
    """Runs the launcher, and returns its exit code; removes the folder if the kernel was killed.

    It is the program of the process that `_run_workers` starts.
    """
    # Until the launcher handles SIGTERM, the signal ends this process with the clean-up below.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        tie_to_launcher()
        # The workers run on this machine, also within a scheduler's allocation of several.
        argv = ["--nnodes", "1", "--nproc-per-node", workers, "--max-restarts", "0", "--no-standby"]
        argv += ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        return launch([*argv, "-m", "tfmulti.run.notebook", str(folder)])
    finally:
        if str(os.getppid()) != os.environ[PARENT]:
            shutil.rmtree(folder, ignore_errors=True)


class _CellOutput:
    """Shows in the cell what the chief has printed, and the HTML that it has made.

    Args:
        printed: the file that holds what the chief prints.
        html: the file that holds the HTML. It may be replaced.
    """

    def __init__(self, printed: Path, html: Path) -> None:
        self._printed, self._length = printed, 0
        self._html, self._changed = html, 0
        self._output = NotebookOutput()
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> None:
        """Shows what was added to the files since the last call."""
        with contextlib.suppress(FileNotFoundError), open(self._printed, "rb") as file:
            file.seek(self._length)
            data = file.read()
            self._length += len(data)
            if data:
                print(self._decoder.decode(data), end="", flush=True)
        with contextlib.suppress(FileNotFoundError):
            changed = self._html.stat().st_mtime_ns
            if changed != self._changed:
                self._changed = changed
                self._output.show(self._html.read_text())


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the launcher with its workers, if it still runs.

    A second interrupt of the kernel, or a launcher that does not end, kills all of them.
    """
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(_STOP_S)
        finally:
            if launcher.poll() is None:
                for process in reversed(_with_descendants(launcher.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                launcher.wait()


def _with_descendants(process: int) -> list[int]:
    """Returns a process and all processes below it, see proc_pid_task(5)."""
    found = [process]
    for parent in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += map(int, children.split())
    return found


def _raise_first_error(folder: Path, workers: int) -> None:
    """Raises the first error that a worker has raised, if any."""
    errors = []
    for rank in range(workers):
        path = folder / _ERROR.format(rank)
        if path.exists():
            errors.append((*cloudpickle.loads(path.read_bytes()), rank))
    if errors:
        _, error, text, rank = min(errors, key=lambda entry: entry[0])
        raise error from WorkerTraceback(f"worker {rank}:\n{text}")


def _read_call(folder: Path) -> bytes:
    """Returns the content of the file of the call, which only this user can have written.

    Raises:
        ConfigError: another user could have written the file, or there is none.
    """
    path = folder / _CALL
    rule = (
        f"{path} is loaded as code, so only this user may write it. The folder must have mode 0700 "
        "and the file 0600, as notebook_launcher makes them."
    )
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as file:
            of_file, of_folder = os.fstat(number), folder.lstat()
            is_private = stat.S_ISREG(of_file.st_mode) and stat.S_ISDIR(of_folder.st_mode)
            for status in (of_file, of_folder):
                is_private &= status.st_uid == os.getuid() and not status.st_mode & 0o077
            if not is_private:
                raise ConfigError(rule)
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). {rule}") from None


def main(folder: Path) -> None:
    """Calls the function in a worker, and leaves its result or its error in the folder.

    Raises:
        ConfigError: another user could have written the folder.
        Exception: the function has raised it.
    """
    call = _read_call(folder)
    rank = int(os.environ["RANK"])
    if rank == 0:
        # The launcher passes on whole lines only, so a progress bar would not move.
        printed = os.open(folder / _PRINTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(printed, sys.stdout.fileno())
        os.close(printed)
    try:
        function, args = cloudpickle.loads(call)
        # What TensorFlow itself writes to standard error stays in the log.
        with contextlib.redirect_stderr(sys.stdout if rank == 0 else sys.stderr):
            result = function(*args)
        if rank == 0:
            _write_result(folder / _RESULT, _sendable(result))
    except Exception as error:
        text = traceback.format_exc()
        try:
            data = cloudpickle.dumps((time.time(), error, text))
            cloudpickle.loads(data)
        except Exception:
            # An error that cannot be sent is replaced by its type and message.
            words = f"{type(error).__name__}: {error}"
            data = cloudpickle.dumps((time.time(), TfmultiError(words), text))
        _write_file(folder / _ERROR.format(rank), data)
        raise


def _sendable(result: Any) -> Any:
    """Returns a result without the model that Keras' History holds."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(result, keras.callbacks.History):
        history = keras.callbacks.History()
        history.history, history.epoch = result.history, getattr(result, "epoch", [])
        history.params = result.params
        return history
    return result


def _write_result(path: Path, value: Any) -> None:
    """Writes a value for the notebook; raises ConfigError if it cannot be sent."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"the result, of type {type(value).__name__}, cannot be sent to the notebook ({error})."
            " Return numbers, arrays or a History, and save a model to a file."
        ) from None
    _write_file(path, data)


def _write_file(path: Path, data: bytes) -> None:
    """Writes a file that is whole or absent, and that only this user can read and write."""
    partial = path.with_suffix(".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == _LAUNCH:
        sys.exit(_run_launcher(Path(sys.argv[2]), sys.argv[3]))
    main(Path(sys.argv[1]))
