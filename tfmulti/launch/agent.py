"""The launcher's hands on another machine: starts, watches and ends the workers there.

    python -m tfmulti.launch.agent

is run over SSH and obeys the lines on its standard input (`remote_machine`). Where the command was
started by hand on each machine, `serve` obeys those that come from the first one. When the
connection ends, or is silent for eight seconds, the agent ends, and its guard ends the workers:
SIGTERM first, and SIGKILL after the grace period.
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

from tfmulti.errors import ConfigError
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import STOPPING
from tfmulti.launch.machine import LocalMachine
from tfmulti.launch.remote_machine import LOST_S, AgentConnection
from tfmulti.launch.workers import StartRequest, WorkerStatus

LOOK_S = 0.1  # between two looks at the workers
WORD_S = 1.0  # between two words to the launcher, at most

# What a worker's program may depend on, and which is the same on each machine of a job.
FORWARDED = ("PYTHON", "TF_", "TFMULTI_", "KERAS_", "XLA_", "GRPC_", "NCCL_", "OMP_", "MKL_")


_NUMBERS = ("rank", "local_rank", "local_world", "attempt", "gpus")  # of an order


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the launcher's environment that goes to other machines."""
    return {name: value for name, value in env.items() if name.startswith(FORWARDED)}


def serve(
    link: AgentConnection,
    config: LaunchConfig | None,
    env: Mapping[str, str],
    first: dict[str, Any] | None = None,
) -> int | None:
    """Obeys a launcher until the job is done; returns its exit code, or None if it is gone.

    Args:
        link: the connection to the launcher.
        config: the configuration of the command that was started by hand here. None: the launcher
            sends it.
        env: the environment of this machine's workers.
        first: the launcher's first message, if it was received already.

    Raises:
        ConfigError: the launcher does not want this machine.
    """
    first = first or link.receive()
    if first is not None and "fails" in first:
        raise ConfigError(first["fails"])
    if first is not None and type(first.get("ended")) is int:
        return int(first["ended"])
    if first is None or "begin" not in first:
        return None
    begin = first["begin"]
    try:
        place = f"{begin['run_id']}-{begin['name']}"
        if config is None:
            os.chdir(begin["folder"])
            env = {**env, **{str(name): str(value) for name, value in begin["env"].items()}}
            config = _config(begin["config"])
    except OSError:
        link.send({"fails": f"no folder {begin['folder']}. Jobs need it on each machine."})
        return None
    except ConfigError as error:
        link.send({"fails": str(error)})
        return None
    except (AttributeError, KeyError, TypeError, ValueError):
        link.send({"fails": "the launcher there has another version of tfmulti."})
        return None
    with (
        _alone(place) as lock,
        tempfile.TemporaryDirectory(prefix="tfmulti-") as folder,
    ):
        here = LocalMachine(config, env, begin["name"], _sink(link))
        code = Agent(link, here, Path(folder)).run()
        if code is not None:
            lock.unlink(missing_ok=True)
        return code


def _config(values: dict[str, Any]) -> LaunchConfig:
    return LaunchConfig(**{**values, "program": tuple(values["program"])})


def sent_config(config: LaunchConfig) -> dict[str, Any]:
    """Returns what an agent must know of the job, as JSON."""
    names = ("program", "module", "python", "shutdown_grace_s", "standby")
    return {name: getattr(config, name) for name in names}


@contextlib.contextmanager
def _alone(name: str) -> Iterator[Path]:
    """Gives a lock file, once the agent that was cut off before and all its workers have ended.

    That one's guard holds the lock as long as one of them is there.
    """
    path = _own_folder() / (re.sub(r"[^\w.-]", "_", name)[:200] + ".lock")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


def _own_folder() -> Path:
    """Returns a folder on this machine that is this user's alone.

    Raises:
        ConfigError: somebody else has made it.
    """
    path = Path(tempfile.gettempdir()) / f"tfmulti-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{path} is not this user's own folder. Remove it, or set TMPDIR.")
    return path


def _sink(link: AgentConnection) -> Callable[[int, str, bytes], None]:
    def send(rank: int, stream: str, line: bytes) -> None:
        with contextlib.suppress(OSError):
            link.send({"line": [rank, stream, line.decode("latin-1")]})

    return send


class Agent:
    """Obeys the lines of a launcher."""

    def __init__(self, link: AgentConnection, here: LocalMachine, folder: Path) -> None:
        self._link, self._here, self._folder = link, here, folder
        self._orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard_s = time.monotonic()
        self._noted: int | None = None

    def run(self) -> int | None:
        """Returns the job's exit code; None leaves the workers to the guard.

        A signal to the agent is a notice that the machine goes: its workers are asked to stop,
        which saves what all have reached.
        """
        for number in STOPPING:
            signal.signal(number, self._note)
        self._link.send({"hello": {"cores": self._here.cores, "gpus": self._here.gpus}})
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        said: list[WorkerStatus] | None = None
        said_s = 0.0
        parent = os.getppid()
        while time.monotonic() - self._heard_s < LOST_S:
            if os.getppid() != parent:
                return None  # who started it was killed
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=LOOK_S)
                if order is None:
                    return None
                if order.get("do") == "close":
                    self._here.close()
                    code = order.get("code")
                    return code if type(code) is int else 1
                said = None  # what it brought about is told with the answer
                if not self._obey(order):
                    return None
            looks = self._here.look()
            if self._noted is not None and not any(seen.runs for seen in looks):
                self._say({})
                return 128 + self._noted
            if looks != said or time.monotonic() - said_s > WORD_S:
                said, said_s = looks, time.monotonic()
                if not self._say({}):
                    return None
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number
            self._here.stop()

    def _end_if_stuck(self) -> None:
        """Ends the process where the main thread waits to write to who does not read."""
        while time.monotonic() - self._heard_s < LOST_S + 2:
            time.sleep(0.5)
        os._exit(1)

    def _obey(self, order: dict[str, Any]) -> bool:
        verb = order.get("do")
        try:
            answer = {"gives": self._done(verb, order.get("with") or [])}
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            answer = {"fails": f"{verb}: {error}"}
        return self._say({"id": order.get("id"), **answer})

    def _done(self, verb: Any, given: list[Any]) -> Any:
        """Does what a launcher may ask for, and returns what that gives.

        Raises:
            LookupError, TypeError, ValueError: it is something else, or of another form.
        """
        here = self._here
        if verb in ("start", "prepare"):
            orders = [self._order(values) for values in given[0]]
            return here.start(orders) if verb == "start" else here.prepare(orders)
        if verb == "reserve":
            return here.reserve(operator.index(given[0]))
        if verb == "silent":
            return here.silent([str(address) for address in given[0]])
        return {"stacks": here.stacks, "stop": here.stop, "kill": here.kill}[verb]()

    def _order(self, values: dict[str, Any]) -> StartRequest:
        numbers = {name: operator.index(values[name]) for name in _NUMBERS}
        place = f"attempt_{numbers['attempt']}/worker_{numbers['rank']}"
        return StartRequest(
            **numbers,
            addresses=tuple(str(address) for address in values["addresses"]),
            run_id=str(values["run_id"]),
            saved={str(name): operator.index(step) for name, step in values["saved"].items()},
            folder=str(self._folder / place),
        )

    def _say(self, words: dict[str, Any]) -> bool:
        looks = [dataclasses.asdict(seen) for seen in self._here.look()]
        try:
            self._link.send({**words, "looks": looks, "now_s": time.monotonic()})
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            self._heard_s = time.monotonic()
            if message.get("do") != "ping":
                self._orders.put(message)
        self._orders.put(None)


def main() -> int:
    """Serves the launcher at the other end of standard input and output."""
    # The workers' and this program's own prints must not get between the lines.
    writer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(AgentConnection(sys.stdin.buffer, writer), None, os.environ)
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # the guard ends what is left
