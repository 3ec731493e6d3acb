"""A machine behind a connection: what `machine.Machine` asks goes to its agent, line by line.

Each line is a JSON object. The launcher sends `{"do": name, "id": n, "with": […]}`, of which a
`ping` a second has no id; the agent answers `{"id": n, "gives": …}` or `{"id": n, "fails":
words}`, and sends by itself `{"line": [rank, stream, text]}` and `{"looks": […], "now_s": s}`.
The first line of the launcher is `{"begin": {…}}`, that of the agent `{"hello": {…}}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from tfmulti.cluster.job_secret import MessageAuthenticator
from tfmulti.config import json_values
from tfmulti.errors import ConfigError
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.workers import Sink, StartRequest, WorkerStatus

PING_S = 1.0
LOST_S = 8.0  # without a word, after which the other side is taken for gone
ANSWER_S = 60.0  # for one thing that was asked, while words still come
HELLO_S = 30.0
STREAMS = ("stdout", "stderr")
_NO_AGENT = "what answers there is no agent of tfmulti's, or one of another version"
MOST_BYTES = 1 << 24  # of a line: a worker may write long ones


class AgentConnection:
    """Lines of JSON in both directions. Writing is safe from any thread.

    A line of more than `most_bytes` ends what is received, and so does one that does not pass the
    `seal`, where there is one: then each line begins with its proof.
    """

    def __init__(
        self,
        reader: IO[bytes],
        writer: IO[bytes],
        close: Callable[[], None] = lambda: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._reader, self._writer, self._close = reader, writer, close
        self.most_bytes = most_bytes
        self.seal: MessageAuthenticator | None = None
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message. Raises OSError where nobody reads any more."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                if self.seal is not None:
                    data = self.seal.signed(data) + b" " + data
                self._writer.write(data + b"\n")
                self._writer.flush()
        except ValueError as error:  # the file was closed
            raise OSError(str(error)) from None

    def receive(self) -> dict[str, Any] | None:
        """Returns the next message, or None at the end; empty where a line is none."""
        try:
            line = self._reader.readline(self.most_bytes + 1)
        except (OSError, ValueError):  # closed
            return None
        if not line or len(line) > self.most_bytes:
            return None
        if self.seal is not None:
            sign, _, line = line.removesuffix(b"\n").partition(b" ")
            if not self.seal.passes(sign, line):
                return None
        try:
            message = json_values.parse(line)
        except ValueError:
            return {}  # what a shell's start file prints
        return message if isinstance(message, dict) else {}

    def close(self) -> None:
        """Ends the connection."""
        self._close()


class RemoteMachine:
    """A machine whose agent is at the other end of a link.

    Args:
        why: returns what is known of a connection that has ended.

    Raises:
        ConfigError: the agent says that the job cannot run there.
        Unreachable: it does not say hello.
    """

    def __init__(
        self,
        name: str,
        link: AgentConnection,
        begin: dict[str, Any],
        sink: Sink,
        why: Callable[[], str],
    ) -> None:
        self.name = name
        self._link, self._sink, self._why = link, sink, why
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._looks: list[WorkerStatus] = []
        self._ranks: set[int] = set()  # of the workers there
        self._unseen = self._is_showing = False
        self._ended = False
        self._number = 0
        self._heard_s = time.monotonic()
        self._tell({"begin": begin})
        threading.Thread(target=self._listen, daemon=True).start()
        hello = self._answer(HELLO_S, HELLO_S)
        if "fails" in hello:
            self.close()
            raise ConfigError(f"{name}: {hello['fails']}")
        counts = hello.get("hello")
        found: list[Any] = []
        if type(counts) is dict:
            found = [counts.get(name) for name in ("cores", "gpus")]
        if len(found) != 2 or any(type(count) is not int or count < 0 for count in found):
            self.close()
            raise Unreachable(_NO_AGENT)
        self.cores: int = found[0]
        self.gpus: int = found[1]
        threading.Thread(target=self._ping, daemon=True).start()

    def reserve(self, count: int) -> list[str]:
        found = self._ask("reserve", count)
        if not _is_list(found, str) or len(found) != count:
            raise Unreachable(_NO_AGENT)
        return list(found)

    def start(self, orders: Sequence[StartRequest]) -> None:
        self._ranks = {order.rank for order in orders}
        self._ask("start", [dataclasses.asdict(order) for order in orders])

    def look(self) -> list[WorkerStatus]:
        if self._unseen:  # what it said before its connection ended
            self._unseen = False
            return self._looks
        self._check(LOST_S)
        return self._looks

    def silent(self, addresses: Sequence[str]) -> list[int]:
        found = self._ask("silent", list(addresses))
        if not _is_list(found, int) or not all(0 <= place < len(addresses) for place in found):
            raise Unreachable(_NO_AGENT)
        return list(found)

    def stacks(self) -> dict[int, str]:
        found = self._ask("stacks")
        try:
            return {int(rank): str(text) for rank, text in found.items()}
        except (AttributeError, ValueError):
            raise Unreachable(_NO_AGENT) from None

    def prepare(self, orders: Sequence[StartRequest]) -> None:
        self._ask("prepare", [dataclasses.asdict(order) for order in orders])

    def stop(self) -> None:
        self._ask("stop")

    def kill(self) -> None:
        self._ask("kill")

    def close(self, code: int = 0) -> None:
        """Ends what runs there, if it can still be reached; else its agent does so by itself."""
        with contextlib.suppress(OSError):
            self._link.send({"do": "close", "code": code})
        self._ended = True
        self._link.close()

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._link.send(message)
        except OSError:
            self._ended = True

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._check(LOST_S)
        self._number += 1
        self._tell({"do": name, "id": self._number, "with": arguments})
        while True:
            found = self._answer(ANSWER_S, LOST_S)
            if found.get("id") == self._number:
                break
        if "fails" in found:
            raise Unreachable(str(found["fails"]))
        return found.get("gives")

    def _answer(self, limit_s: float, lost_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            # What it said before its connection ended is still an answer.
            with contextlib.suppress(queue.Empty):
                if (found := self._answers.get(timeout=0 if self._ended else 0.2)) is not None:
                    return found
            self._check(lost_s)
        raise Unreachable(f"it has not answered for {limit_s:g} s")

    def _check(self, lost_s: float) -> None:
        if self._ended:
            why = self._why()
            raise Unreachable("its connection ended" + (f": {why}" if why else ""))
        if time.monotonic() - self._heard_s > lost_s and not self._is_showing:
            raise Unreachable(f"no word from it for {lost_s:g} s")

    def _ping(self) -> None:
        while not self._ended:
            self._tell({"do": "ping"})
            time.sleep(PING_S)

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            self._heard_s = time.monotonic()
            try:
                self._take(message)
            except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                break  # it is no agent of tfmulti's any more
        self._ended = True
        self._answers.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        if "line" in message:
            rank, stream, text = message["line"]
            if type(rank) is not int or rank not in self._ranks or stream not in STREAMS:
                raise ValueError("a line of no worker there")
            self._is_showing = True  # the terminal may be slow, or stopped
            self._sink(rank, stream, text.encode("latin-1"))
            self._is_showing = False
            self._heard_s = time.monotonic()
            return
        if "looks" in message:
            shift_s = time.monotonic() - float(message["now_s"])
            looks = [
                json_values.build(WorkerStatus, look).shifted(shift_s) for look in message["looks"]
            ]
            if not all(seen.rank in self._ranks for seen in looks):
                raise ValueError("a look at no worker there")
            self._looks = looks
            self._unseen = True
        if "id" in message or "hello" in message or "fails" in message:
            self._answers.put(message)


def _is_list(values: Any, kind: type) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)
