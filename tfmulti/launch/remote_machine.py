"""Controls a machine behind a connection, through the agent that runs there.

The protocol is one JSON object a line. The launcher sends:

    {"begin": {…}}                                 first: the job, and where it runs
    {"do": name, "id": n, "with": [arguments]}     a request: a method of `machine.Machine`
    {"do": "ping"}                                 a heartbeat, once a second, without an answer
    {"do": "close", "code": n}                     last: the exit code of the job, no answer

The agent sends:

    {"hello": {"cores": n, "gpus": n}}             first, or {"fails": words}
    {"id": n, "gives": result}                     the answer to request n
    {"id": n, "fails": words}                      the answer to a request that failed
    {"line": [rank, stream, text]}                 a line of a worker's output
    {"statuses": [status, …], "now_s": s}          the status of all workers, by its clock

An answer also has `statuses` and `now_s`. A side that receives nothing for `LOST_S` seconds counts
the other side as gone. `now_s` lets the launcher convert times of the agent's clock to its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfmulti.cluster.messages import MessageConnection
from tfmulti.config import json_values
from tfmulti.errors import ConfigError
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.workers import Sink, StartRequest, WorkerStatus

PING_S = 1.0

# After this time without a message the other side counts as gone.
LOST_S = 8.0

# The time limit for the answer to one request, while other messages still arrive.
ANSWER_S = 60.0

# The time limit for the agent's first message.
HELLO_S = 30.0

STREAMS = ("stdout", "stderr")
_NO_AGENT = "the program that answers there is not an agent of tfmulti, or has another version"


class RemoteMachine:
    """A machine whose agent is at the other end of a connection.

    The receiver thread takes the agent's messages, and another thread sends the heartbeats. All
    methods that `machine.Machine` declares, except `close`, raise `Unreachable` if the connection
    has ended or the agent is silent for too long.

    Args:
        name: the host name.
        connection: the connection to the agent.
        begin: the content of the first message to the agent.
        sink: takes each line that a worker there writes.
        reason: returns what is known about the end of the connection, or an empty text.

    Raises:
        ConfigError: the agent says that the job cannot run there.
        Unreachable: the agent does not send a valid hello in time.
    """

    def __init__(
        self,
        name: str,
        connection: MessageConnection,
        begin: dict[str, Any],
        sink: Sink,
        reason: Callable[[], str],
    ) -> None:
        self.name = name
        self._connection, self._sink, self._reason = connection, sink, reason
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._statuses: list[WorkerStatus] = []
        # The ranks of the workers there.
        self._ranks: set[int] = set()
        # Whether the last status was not returned by `statuses` yet; whether a line is being shown.
        self._has_new_status = self._is_showing_line = False
        self._ended = False
        self._number = 0
        self._last_message_s = time.monotonic()
        self._send({"begin": begin})
        threading.Thread(target=self._listen, daemon=True).start()
        hello = self._answer(HELLO_S, HELLO_S)
        if "fails" in hello:
            self.close()
            raise ConfigError(f"{name}: {hello['fails']}")
        counts = hello.get("hello")
        devices: list[Any] = []
        if type(counts) is dict:
            devices = [counts.get(name) for name in ("cores", "gpus")]
        if len(devices) != 2 or any(type(count) is not int or count < 0 for count in devices):
            self.close()
            raise Unreachable(_NO_AGENT)
        self.cores: int = devices[0]
        self.gpus: int = devices[1]
        threading.Thread(target=self._ping, daemon=True).start()

    def reserve(self, count: int) -> list[str]:
        """Returns addresses for `count` workers, reserved for this job until `kill`."""
        addresses = self._ask("reserve", count)
        if not _is_list(addresses, str) or len(addresses) != count:
            raise Unreachable(_NO_AGENT)
        return list(addresses)

    def start(self, requests: Sequence[StartRequest]) -> None:
        """Starts workers there."""
        self._ranks = {request.rank for request in requests}
        self._ask("start", [dataclasses.asdict(request) for request in requests])

    def statuses(self) -> list[WorkerStatus]:
        """Returns the status of each worker, as the agent's last message has it."""
        # A new status is returned even if the connection has ended since, because it may show the
        # cause.
        if self._has_new_status:
            self._has_new_status = False
            return self._statuses
        self._check(LOST_S)
        return self._statuses

    def silent(self, addresses: Sequence[str]) -> list[int]:
        """Returns the indices of the addresses at which, seen from there, nobody listens."""
        indices = self._ask("silent", list(addresses))
        if not _is_list(indices, int) or not all(0 <= index < len(addresses) for index in indices):
            raise Unreachable(_NO_AGENT)
        return list(indices)

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of the running workers there, by rank."""
        stacks_by_rank = self._ask("stacks")
        try:
            return {int(rank): str(text) for rank, text in stacks_by_rank.items()}
        except (AttributeError, ValueError):
            raise Unreachable(_NO_AGENT) from None

    def prepare(self, requests: Sequence[StartRequest]) -> None:
        """Starts standby processes there that can become these workers in another attempt."""
        self._ask("prepare", [dataclasses.asdict(request) for request in requests])

    def stop(self) -> None:
        """Asks the workers there to stop by SIGTERM, and wakes frozen workers."""
        self._ask("stop")

    def kill(self) -> None:
        """Kills all workers there, and gives up the reserved addresses."""
        self._ask("kill")

    def close(self, code: int = 0) -> None:
        """Asks the agent to end every process there, and closes the connection.

        An agent that cannot be reached does the same by itself.

        Args:
            code: the exit code of the job.
        """
        with contextlib.suppress(OSError):
            self._connection.send({"do": "close", "code": code})
        self._ended = True
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Sends a message; notes the end of the connection instead of raising."""
        try:
            self._connection.send(message)
        except OSError:
            self._ended = True

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Sends a request and returns the result; raises Unreachable if it failed."""
        self._check(LOST_S)
        self._number += 1
        self._send({"do": name, "id": self._number, "with": arguments})
        while True:
            answer = self._answer(ANSWER_S, LOST_S)
            if answer.get("id") == self._number:
                break
        if "fails" in answer:
            raise Unreachable(str(answer["fails"]))
        return answer.get("gives")

    def _answer(self, limit_s: float, lost_s: float) -> dict[str, Any]:
        """Returns the next answer that the receiver thread has taken, within `limit_s`.

        The agent counts as gone after `lost_s` without any message.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # An answer that arrived before the end of the connection is still valid.
            with contextlib.suppress(queue.Empty):
                if (answer := self._answers.get(timeout=0 if self._ended else 0.2)) is not None:
                    return answer
            self._check(lost_s)
        raise Unreachable(f"it has not answered for {limit_s:g} s")

    def _check(self, lost_s: float) -> None:
        """Raises Unreachable if the connection has ended or is silent for more than `lost_s`."""
        if self._ended:
            reason = self._reason()
            raise Unreachable("its connection ended" + (f": {reason}" if reason else ""))
        if time.monotonic() - self._last_message_s > lost_s and not self._is_showing_line:
            raise Unreachable(f"no message from it for {lost_s:g} s")

    def _ping(self) -> None:
        """Sends a heartbeat every second, in a thread of its own."""
        while not self._ended:
            self._send({"do": "ping"})
            time.sleep(PING_S)

    def _listen(self) -> None:
        """Takes all messages until the connection ends, in the receiver thread."""
        while (message := self._connection.receive()) is not None:
            self._last_message_s = time.monotonic()
            try:
                self._handle(message)
            except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                # The message has another form than an agent of tfmulti sends.
                break
        self._ended = True
        self._answers.put(None)

    def _handle(self, message: dict[str, Any]) -> None:
        """Shows a line, notes a status or queues an answer; raises if the form is wrong."""
        if "line" in message:
            rank, stream, text = message["line"]
            if type(rank) is not int or rank not in self._ranks or stream not in STREAMS:
                raise ValueError("a line of a worker that is not on that machine")
            # A slow or stopped terminal keeps this thread from reading. The agent does not count
            # as silent meanwhile.
            self._is_showing_line = True
            self._sink(rank, stream, text.encode("latin-1"))
            self._is_showing_line = False
            self._last_message_s = time.monotonic()
            return
        if "statuses" in message:
            shift_s = time.monotonic() - float(message["now_s"])
            statuses = [
                json_values.build(WorkerStatus, values).shifted(shift_s)
                for values in message["statuses"]
            ]
            if not all(status.rank in self._ranks for status in statuses):
                raise ValueError("the status of a worker that is not on that machine")
            self._statuses = statuses
            self._has_new_status = True
        if "id" in message or "hello" in message or "fails" in message:
            self._answers.put(message)


def _is_list(values: Any, kind: type) -> bool:
    """Returns whether a received value is a list whose items are all of one type."""
    return type(values) is list and all(type(value) is kind for value in values)
