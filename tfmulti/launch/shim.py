"""Runs a worker's program inside its process, and writes down what goes wrong in it.

    python -m tfmulti.launch.shim MODULE_OR_SCRIPT [ARGUMENTS…]

with `-m` first for a module. SIGUSR1 makes it write the stack of each of its threads.

    python -m tfmulti.launch.shim --standby

imports TensorFlow and waits for a line of JSON on its standard input: the environment and the
arguments of a worker. It becomes that worker at once, where a new process takes four seconds.

    python -m tfmulti.launch.shim --command PROGRAM [ARGUMENTS…]

runs a program that is not Python's in its place.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from pathlib import Path

from tfmulti.errors import ConfigError, TfmultiError
from tfmulti.launch import garbage_collection
from tfmulti.launch.heartbeat import ERROR_FILE, write_error

STACKS_FILE, STANDBY, COMMAND = "TFMULTI_STACKS_FILE", "--standby", "--command"
PARENT, GRACE = "TFMULTI_LAUNCHER_PID", "TFMULTI_GRACE_S"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5


def tie_to_launcher() -> None:
    """Has this worker end when its launcher and the guard are gone, both killed.

    It gets SIGTERM at the launcher's death (PR_SET_PDEATHSIG), and its group SIGKILL after the
    grace. The guard does the same, if it is there: what ends sooner is ended once.
    """
    parent = os.getppid()
    if os.environ.get(PARENT) not in (None, str(parent)):
        sys.exit(1)  # the launcher was killed before its guard knew of this process
    if PARENT not in os.environ:
        return
    _end_with_parent()
    grace_s = float(os.environ.get(GRACE, "30"))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="tfmulti-launcher", daemon=True).start()


def _end_with_parent() -> None:
    """See prctl(2); where it fails there is still the guard."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.environ.get(PARENT) != str(os.getppid()):
        sys.exit(1)  # it has ended just before


def _leave_a_watch() -> None:
    """Leaves a process that ends this one's group where the launcher is gone, as a worker does.

    A program that is run in this one's place may ignore SIGTERM, or have started others.
    """
    if PARENT not in os.environ:
        return
    launcher, program = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
    if os.fork():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)  # else who waits for the program's output waits for this process
    select.select([launcher, program], [], [])
    if not select.select([launcher], [], [], _LOOK_S)[0]:
        os._exit(0)  # the program has ended by itself
    os.killpg(0, signal.SIGTERM)
    time.sleep(float(os.environ.get(GRACE, "30")))
    os.killpg(0, signal.SIGKILL)


def stand_by() -> list[str]:
    """Returns the arguments of the worker that this process is to become, when it is told."""
    with garbage_collection.importing():
        # TensorFlow and Keras come with it.
        importlib.import_module("tfmulti.training.distributed_model")
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the launcher has ended
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["env"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    arguments: list[str] = order["arguments"]
    return arguments


def _check_module(name: str) -> None:
    """Raises ConfigError where there is no such module; what it imports is not asked."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None:
        raise ConfigError(f"there is no module {name!r}. Look at its spelling, and at this folder.")


def main() -> None:
    """Runs the program that the command line names, as Python would."""
    if sys.argv[1:2] == [COMMAND]:
        _end_with_parent()  # what is run in its place keeps that
        _leave_a_watch()
        os.execvp(sys.argv[2], sys.argv[2:])
    tie_to_launcher()
    if sys.argv[1:] == [STANDBY]:
        sys.argv[1:] = stand_by()
    stacks = os.environ.get(STACKS_FILE)
    if stacks:
        # The handler is C's own: it runs also while the main thread waits inside TensorFlow.
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    argv = sys.argv[1:]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path[0] = os.getcwd()
            _check_module(argv[1])
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit:
        raise
    except TfmultiError as error:
        print(f"tfmulti: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BaseException as error:
        path = os.environ.get(ERROR_FILE)
        if path and not isinstance(error, KeyboardInterrupt):
            write_error(Path(path), error, int(os.environ.get("RANK", "0")))
        raise


if __name__ == "__main__":
    main()
