"""Runs a worker's program inside the worker's process, and writes error.json when it fails.

    python -m tfmulti.launch.shim [-m] MODULE_OR_SCRIPT [ARGUMENTS…]

The program runs as Python would run it. Without a launcher the exit code 138 says that another
worker was lost, if there are several. As the first process of a container the shim starts a second
one for the program, so that SIGTERM ends it at any time. SIGUSR1 makes the process write the stack
of all its threads to a file.

    python -m tfmulti.launch.shim --standby

The process imports TensorFlow and waits for a line of JSON on its standard input: the environment
and the arguments of a worker. It becomes that worker at once. A new process takes four seconds.

    python -m tfmulti.launch.shim --command PROGRAM [ARGUMENTS…]

The process replaces itself by a program that is not written in Python.
"""

from __future__ import annotations

import ctypes
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
import traceback
from collections.abc import Mapping
from pathlib import Path

from tfmulti.cluster.environments import described
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import EXIT_PEER_LOST, ConfigError, TfmultiError
from tfmulti.launch import garbage_collection
from tfmulti.launch.guard import outlive_signals
from tfmulti.launch.heartbeat import note_error
from tfmulti.launch.init_process import leave_first_process
from tfmulti.launch.policy import has_lost_a_worker
from tfmulti.launch.signals import GRACE
from tfmulti.launch.stacks import STACKS_FILE, write_at_sigusr1

STANDBY, COMMAND = "--standby", "--command"
PARENT = "TFMULTI_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# How often a worker checks that its launcher runs.
_POLL_S = 0.5


def tie_to_launcher() -> None:
    """Makes this worker end even when its launcher and the guard are both killed.

    At the launcher's death the worker gets SIGTERM from the system (PR_SET_PDEATHSIG). After the
    grace period a thread of the worker sends SIGKILL to the worker's process group. The guard does
    the same if it is alive. The function does nothing if no launcher has started this process.
    """
    parent = os.getppid()
    if os.environ.get(PARENT) not in (None, str(parent)):
        # The launcher was killed before its guard knew of this process.
        sys.exit(1)
    if PARENT not in os.environ:
        return
    _end_with_parent()
    grace_s = float(os.environ.get(GRACE, "30"))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        time.sleep(grace_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="tfmulti-launcher", daemon=True).start()


def _end_with_parent() -> None:
    """Makes the system send SIGTERM to this process when its launcher ends, see prctl(2).

    A failure of the call is ignored, because the guard ends the process as well.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.environ.get(PARENT) != str(os.getppid()):
        # The launcher has ended before the call.
        sys.exit(1)


def _fork_watcher() -> None:
    """Forks a process that ends this process group when the launcher is gone.

    The program that replaces this process may ignore SIGTERM, or start other processes.
    """
    if PARENT not in os.environ:
        return
    launcher, program = os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())
    if os.fork():
        return
    outlive_signals()
    select.select([launcher, program], [], [])
    if not select.select([launcher], [], [], _POLL_S)[0]:
        # The program has ended by itself.
        os._exit(0)
    os.killpg(0, signal.SIGTERM)
    time.sleep(float(os.environ.get(GRACE, "30")))
    os.killpg(0, signal.SIGKILL)


def stand_by() -> list[str]:
    """Waits until this process becomes a worker, and returns the worker's arguments.

    The process gets the worker's environment. It exits if its standard input ends before.
    """
    with garbage_collection.importing():
        # This module imports TensorFlow and Keras.
        importlib.import_module("tfmulti.training.distributed_model")
    line = sys.stdin.readline()
    if not line:
        # The launcher has ended.
        sys.exit(0)
    request = json.loads(line)
    os.environ.clear()
    os.environ.update(request["env"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    arguments: list[str] = request["arguments"]
    return arguments


def _check_module(name: str) -> None:
    """Raises ConfigError if a module does not exist. Modules that it imports are not checked."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package above the module may itself import a module that is missing.
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        raise ConfigError(f"there is no module {name!r}. Look at its spelling, and at this folder.")


def is_alone(env: Mapping[str, str]) -> bool:
    """Returns whether the environment describes a job of one worker, or none.

    Args:
        env: the environment variables of this process.
    """
    try:
        environment = described(env)
    except TfmultiError:
        # The program may have chosen one of several descriptions, or given its own.
        return False
    return environment is None or environment.job.size == 1


def main() -> None:
    """Runs the program that the command line names; writes error.json if it raises."""
    leave_first_process()
    if sys.argv[1:2] == [COMMAND]:
        # The setting stays when the program replaces this process.
        _end_with_parent()
        _fork_watcher()
        os.execvp(sys.argv[2], sys.argv[2:])
    tie_to_launcher()
    if sys.argv[1:] == [STANDBY]:
        sys.argv[1:] = stand_by()
    stacks = os.environ.get(STACKS_FILE)
    if stacks:
        write_at_sigusr1(open(stacks, "w"))  # noqa: SIM115
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
        note_error(error)
        print_error(error)
        sys.exit(error.exit_code)
    except BaseException as error:
        note_error(error)
        if PARENT not in os.environ and has_lost_a_worker(error) and not is_alone(os.environ):
            # A scheduler tells by the code that this worker can be started again.
            traceback.print_exc()
            print(
                "tfmulti: another worker was lost. This one ends with exit code "
                f"{EXIT_PEER_LOST}, and can be started again.",
                file=sys.stderr,
            )
            sys.exit(EXIT_PEER_LOST)
        raise


if __name__ == "__main__":
    main()
