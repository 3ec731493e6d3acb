"""Starts, watches and ends the workers on this machine for a launcher on another machine.

The launcher runs this command over SSH, and sends its requests to the standard input:

    python -m tfmulti.launch.agent

If the user starts the launch command by hand on each machine, `serve` takes the requests from the
connection to the first machine. `remote_machine` describes the protocol.

The agent ends when the connection ends, or when it receives nothing for eight seconds. Its guard
then ends the workers: by SIGTERM, and after the grace period by SIGKILL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import operator
import os
import queue
import re
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tfmulti.cluster.messages import MessageConnection
from tfmulti.errors import ConfigError
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import STOPPING
from tfmulti.launch.machine import LocalMachine
from tfmulti.launch.remote_machine import LOST_S
from tfmulti.launch.workers import StartRequest, WorkerStatus

# The time between two checks of the workers.
POLL_S = 0.1

# The longest time between two messages to the launcher.
REPORT_S = 1.0

# The launcher sends the variables with these prefixes to the other machines. A worker's program may
# depend on them, and they mean the same on each machine of a job.
FORWARDED = ("PYTHON", "TF_", "TFMULTI_", "KERAS_", "XLA_", "GRPC_", "NCCL_", "OMP_", "MKL_")

# The fields of a StartRequest that are whole numbers.
_NUMBERS = ("rank", "local_rank", "local_world", "attempt", "gpus")


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the launcher's environment that goes to other machines."""
    return {name: value for name, value in env.items() if name.startswith(FORWARDED)}


def serve(
    connection: MessageConnection,
    config: LaunchConfig | None,
    env: Mapping[str, str],
    first_message: dict[str, Any] | None = None,
) -> int | None:
    """Does what a launcher asks for, until the job or the connection ends.

    Args:
        connection: the connection to the launcher.
        config: the configuration of the command that was started by hand here. None: the launcher
            sends it.
        env: the environment of this machine's workers.
        first_message: the launcher's first message, if it was received already.

    Returns:
        The exit code of the job, or None if the launcher is gone or the job cannot run here.

    Raises:
        ConfigError: the launcher refuses this machine, or the folder of the lock is not safe.
    """
    message = first_message or connection.receive() or {}
    if "fails" in message:
        raise ConfigError(message["fails"])
    if type(message.get("ended")) is int:
        return int(message["ended"])
    if "begin" not in message:
        return None
    begin = message["begin"]
    try:
        lock_name = f"{begin['run_id']}-{begin['name']}"
        if config is None:
            os.chdir(begin["folder"])
            env = {**env, **{str(name): str(value) for name, value in begin["env"].items()}}
            config = _config(begin["config"])
        _own_folder()
    except FileNotFoundError:
        reason = f"the folder {begin['folder']} does not exist here. Create it on each machine."
        connection.send({"fails": reason})
        return None
    except OSError as error:
        connection.send(
            {"fails": f"the folder {begin['folder']} cannot be used: {error.strerror}."}
        )
        return None
    except ConfigError as error:
        connection.send({"fails": str(error)})
        return None
    except (AttributeError, KeyError, TypeError, ValueError):
        connection.send({"fails": "the launcher there has another version of tfmulti."})
        return None
    with (
        _lock_of_job(lock_name) as lock,
        tempfile.TemporaryDirectory(prefix="tfmulti-") as folder,
    ):
        machine = LocalMachine(config, env, begin["name"], _sink(connection))
        code = Agent(connection, machine, Path(folder)).run()
        if code is not None:
            lock.unlink(missing_ok=True)
        return code


def _config(values: dict[str, Any]) -> LaunchConfig:
    """Returns the configuration that `sent_config` has made into JSON values."""
    return LaunchConfig(**{**values, "program": tuple(values["program"])})


def sent_config(config: LaunchConfig) -> dict[str, Any]:
    """Returns the part of the configuration that an agent needs, as JSON values."""
    names = ("program", "module", "python", "shutdown_grace_s", "standby")
    return {name: getattr(config, name) for name in names}


@contextlib.contextmanager
def _lock_of_job(name: str) -> Iterator[Path]:
    """A context that holds the lock of this job on this machine, and gives the lock's file.

    It waits for the end of an earlier agent whose connection was lost, and of that agent's workers.
    The guard of that agent is forked from it, so it holds the lock until the workers have ended.
    """
    path = _own_folder() / (re.sub(r"[^\w.-]", "_", name)[:200] + ".lock")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def _own_folder() -> Path:
    """Returns a folder for lock files that only this user can change, or raises ConfigError."""
    path = Path(tempfile.gettempdir()) / f"tfmulti-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"{path} is not this user's own folder. Remove it, or set TMPDIR.")
    return path


def _sink(connection: MessageConnection) -> Callable[[int, str, bytes], None]:
    """Returns a sink that sends each line of a worker's output to the launcher."""

    def send(rank: int, stream: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.send({"line": [rank, stream, line.decode("latin-1")]})

    return send


class Agent:
    """Handles the requests of one launcher, and reports the status of the workers to it.

    The main thread handles the requests. The receiver thread takes them from the connection, and a
    third thread ends the process if the main thread hangs.

    Args:
        connection: the connection to the launcher.
        machine: this machine.
        folder: the folder for the files of the workers.
    """

    def __init__(self, connection: MessageConnection, machine: LocalMachine, folder: Path) -> None:
        self._connection, self._machine, self._folder = connection, machine, folder
        self._requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._last_message_s = time.monotonic()
        self._stop_signal: int | None = None

    def run(self) -> int | None:
        """Handles requests until the job or the connection ends.

        A signal to the agent means that this machine is about to be taken away. The agent then asks
        its workers to stop, so that the job saves a checkpoint.

        Returns:
            The exit code of the job, or 128 + the number of a signal to the agent. None if the
            launcher is gone. Then the guard ends the workers when this process ends.
        """
        for number in STOPPING:
            signal.signal(number, self._on_stop_signal)
        self._connection.send({"hello": {"cores": self._machine.cores, "gpus": self._machine.gpus}})
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        reported: list[WorkerStatus] | None = None
        reported_s = 0.0
        parent = os.getppid()
        while time.monotonic() - self._last_message_s < LOST_S:
            if os.getppid() != parent:
                # The process that started this agent was killed.
                return None
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=POLL_S)
                if request is None:
                    return None
                if request.get("do") == "close":
                    self._machine.close()
                    code = request.get("code")
                    return code if type(code) is int else 1
                # The request may change the status, so the status is sent again below.
                reported = None
                if not self._handle(request):
                    return None
            statuses = self._machine.statuses()
            if self._stop_signal is not None and not any(status.runs for status in statuses):
                self._report({})
                return 128 + self._stop_signal
            if statuses != reported or time.monotonic() - reported_s > REPORT_S:
                reported, reported_s = statuses, time.monotonic()
                if not self._report({}):
                    return None
        return None

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal and asks the workers to stop. It is the signal handler."""
        if self._stop_signal is None:
            self._stop_signal = number
            self._machine.stop()

    def _end_if_stuck(self) -> None:
        """Ends the process if the launcher is silent and the main thread does not end by itself.

        The main thread may hang in a write, because the launcher does not read any more.
        """
        while time.monotonic() - self._last_message_s < LOST_S + 2:
            time.sleep(0.5)
        os._exit(1)

    def _handle(self, request: dict[str, Any]) -> bool:
        """Handles one request and sends the answer; returns False if the connection has ended."""
        name = request.get("do")
        try:
            answer = {"gives": self._result_of(name, request.get("with") or [])}
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            answer = {"fails": f"{name}: {error}"}
        return self._report({"id": request.get("id"), **answer})

    def _result_of(self, name: Any, arguments: list[Any]) -> Any:
        """Calls the method of the machine that a request names, and returns its result.

        Raises LookupError, TypeError or ValueError if the request has another name or form.
        """
        machine = self._machine
        if name in ("start", "prepare"):
            requests = [self._start_request(values) for values in arguments[0]]
            return machine.start(requests) if name == "start" else machine.prepare(requests)
        if name == "reserve":
            return machine.reserve(operator.index(arguments[0]))
        if name == "silent":
            return machine.silent([str(address) for address in arguments[0]])
        return {"stacks": machine.stacks, "stop": machine.stop, "kill": machine.kill}[name]()

    def _start_request(self, values: dict[str, Any]) -> StartRequest:
        """Returns a received StartRequest with the types of its values checked.

        The worker's folder is made from whole numbers alone. A received path is never used.
        """
        numbers = {name: operator.index(values[name]) for name in _NUMBERS}
        subfolder = f"attempt_{numbers['attempt']}/worker_{numbers['rank']}"
        return StartRequest(
            **numbers,
            addresses=tuple(str(address) for address in values["addresses"]),
            run_id=str(values["run_id"]),
            saved={str(name): operator.index(step) for name, step in values["saved"].items()},
            folder=str(self._folder / subfolder),
        )

    def _report(self, content: dict[str, Any]) -> bool:
        """Sends a message with the workers' status; returns False if the connection has ended."""
        statuses = [dataclasses.asdict(status) for status in self._machine.statuses()]
        try:
            self._connection.send({**content, "statuses": statuses, "now_s": time.monotonic()})
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        """Queues all requests until the connection ends, in the receiver thread."""
        while (message := self._connection.receive()) is not None:
            self._last_message_s = time.monotonic()
            if message.get("do") != "ping":
                self._requests.put(message)
        self._requests.put(None)


def main() -> int:
    """Serves the launcher at the other end of standard input and standard output; returns 0."""
    # Whatever this process prints goes to standard error, because it must not mix with messages.
    writer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(MessageConnection(sys.stdin.buffer, writer), None, os.environ)
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # the guard ends what is left
