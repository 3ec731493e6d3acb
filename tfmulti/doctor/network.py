"""Lets every worker call every other one, measures the links, and brings the results to the chief.

Each worker listens at its own address, where TensorFlow will listen later, and calls all others. On
each connection both sides prove that they belong to the job. Then the caller sends lines of JSON
and gets a line of JSON for each:

    {"ask": "ping"}                     {"time": seconds since 1970}
    {"ask": "load", "bytes": n}         after n more bytes: {}
    {"ask": "result"}                   {"result": …}, when the worker called has it
    {"ask": "take", "result": …}        {}; the chief keeps the caller's result
    {"ask": "verdict"}                  {"verdict": …}, when the chief has it
    {"ask": "decide", "verdict": …}     {}; the chief tells its verdict

The chief gets each result over whichever connection works: its own, or the worker's. So a firewall
before one of them is found and named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import psutil

from tfmulti.cluster.cluster import Cluster, host_of
from tfmulti.cluster.job_secret import is_proof, proof, secret_of
from tfmulti.cluster.listening import listen
from tfmulti.config import json_values

# A worker that answers at all does so in this time.
_CALL_S, _AGAIN_S = 5.0, 0.2
# How long measuring the bandwidths may take, beyond the waiting for others.
_MORE_S = 20.0
_PINGS = 20
# The bytes of the first measurement, and of a second one if the first was fast.
_FEW_BYTES, _MANY_BYTES, _FAST_S = 1 << 20, 1 << 25, 0.05
_MOST_LINE, _MOST_WORKERS_AT_ONCE = 1 << 20, 256


@dataclass
class Result:
    """What one worker has found.

    Attributes:
        facts: the versions, the number of GPUs and the like, by name.
        findings: the findings about the worker's machine, as JSON objects.
        rtt_ms: the round-trip time to each other worker by rank.
        mb_s: the megabytes that reach each other worker in a second.
        clock_s: how many seconds the clock of each other worker is ahead of this one's.
        errors: why a worker could not be reached, by rank.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Any] = field(default_factory=list)
    rtt_ms: dict[str, float] = field(default_factory=dict)
    mb_s: dict[str, float] = field(default_factory=dict)
    clock_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Network:
    """The doctor's connections of one worker, as a context.

    Args:
        cluster: the cluster with this worker's task.
        env: the environment, which may hold the job's secret.
        wait_s: the seconds in which the other workers must have come.

    Raises:
        OSError: this worker cannot listen at its address.
    """

    def __init__(self, cluster: Cluster, env: Mapping[str, str], wait_s: float) -> None:
        self._cluster = cluster
        text = f"doctor {secret_of(env)} {' '.join(cluster.addresses)}"
        self._key = hashlib.sha256(text.encode()).digest()
        self._deadline_s = time.monotonic() + wait_s
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._result: Result | None = None
        self._results: dict[int, Result] = {}
        # The ranks for which several processes have sent results, on the chief.
        self.twice: set[int] = set()
        self._verdict: Any = None
        self._lines: dict[int, _Line] = {}
        self._places = threading.BoundedSemaphore(_MOST_WORKERS_AT_ONCE)
        host, _, port = cluster.addresses[cluster.rank].rpartition(":")
        self._server = listen(host.strip("[]"), cluster.hosts, int(port))

    def __enter__(self) -> Network:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        # `shutdown` ends the wait of `accept`, so that the port is free at once.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for line in self._lines.values():
            line.close()

    def measure(self) -> Result:
        """Returns the links to all other workers. It waits for those that have not come yet."""
        result = Result()
        others = [rank for rank in range(self._cluster.size) if rank != self._cluster.rank]
        callers = [threading.Thread(target=self._call, args=(rank, result)) for rank in others]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        # Each worker begins with its next neighbour, so that at any time one sends to each.
        own = self._cluster.rank
        for rank in sorted(others, key=lambda rank: (rank - own) % self._cluster.size):
            if rank in self._lines:
                with self._noting(result, rank):
                    result.mb_s[str(rank)] = self._lines[rank].bandwidth()
        return result

    def exchange(self, result: Result, decide: Callable[[Mapping[int, Result]], Any] | None) -> Any:
        """Sends a worker's result to the chief, and returns the chief's verdict.

        Args:
            result: the result of this worker.
            decide: makes the verdict of the results by rank; given on the chief alone.

        Returns:
            The verdict, or None if the chief could not be reached in time.
        """
        with self._changed:
            self._result = result
            self._changed.notify_all()
        if decide is None:
            if 0 in self._lines:
                self._in_background(self._tell_chief, result)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._verdict is not None, 2 * self._wait_s + _MORE_S
                )
            return self._verdict
        for rank in self._lines:
            self._in_background(self._fetch, rank)
        size = self._cluster.size
        with self._changed:
            self._results[0] = result
            self._changed.wait_for(lambda: len(self._results) == size, self._wait_s)
            results = dict(self._results)
        verdict = decide(results)
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()
        told = [self._in_background(self._tell_verdict, rank, verdict) for rank in self._lines]
        for thread in told:
            thread.join(_CALL_S)
        # A worker that only asks gets its answer from a thread of this process.
        time.sleep(_AGAIN_S)
        return verdict

    def _in_background(self, work: Callable[..., None], *arguments: Any) -> threading.Thread:
        """Starts a thread that ends silently if its connection ends."""

        def run() -> None:
            with contextlib.suppress(OSError, ValueError):
                work(*arguments)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _tell_chief(self, result: Result) -> None:
        """Sends this worker's result to the chief, and takes the verdict."""
        line = self._lines[0]
        line.ask("take", result=dataclasses.asdict(result))
        self._take_verdict(line.ask("verdict", wait_s=2 * self._wait_s + _MORE_S).get("verdict"))

    def _fetch(self, rank: int) -> None:
        """Takes the result of a worker that the chief reaches."""
        answer = self._lines[rank].ask("result", wait_s=self._wait_s)
        self._take_result(rank, answer.get("result"))

    def _tell_verdict(self, rank: int, verdict: Any) -> None:
        """Sends the verdict to a worker that the chief reaches."""
        self._lines[rank].ask("decide", verdict=verdict)

    def _take_result(self, rank: int, values: Any) -> None:
        """Keeps the result of a worker; raises ValueError if it has another form."""
        found = json_values.build(Result, values)
        with self._changed:
            if self._results.setdefault(rank, found) != found:
                self.twice.add(rank)
            self._changed.notify_all()

    def _take_verdict(self, verdict: Any) -> None:
        """Keeps the verdict of the chief."""
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    @contextlib.contextmanager
    def _noting(self, result: Result, rank: int) -> Any:
        """Notes why a worker cannot be reached, if the block finds out."""
        try:
            yield
        except (OSError, ValueError) as error:
            result.errors[str(rank)] = _words(error)

    def _call(self, rank: int, result: Result) -> None:
        """Calls a worker until it answers, and measures the round-trip time."""
        address = self._cluster.addresses[rank]
        host, port = host_of(address), int(address.rpartition(":")[2])
        while True:
            with self._noting(result, rank):
                connection = socket.create_connection((host, port), _CALL_S)
                self._lines[rank] = line = _Line(connection)
                line.prove(self._key, self._cluster.rank, rank)
                result.rtt_ms[str(rank)], result.clock_s[str(rank)] = line.ping()
                result.errors.pop(str(rank), None)
                return
            if rank in self._lines:
                self._lines.pop(rank).close()
            if time.monotonic() > self._deadline_s:
                return
            time.sleep(_AGAIN_S)

    def _accept(self) -> None:
        """Answers the callers until the socket is closed."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if self._places.acquire(blocking=False):
                self._in_background(self._serve, connection)
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answers one caller until it ends."""
        line = _Line(connection)
        try:
            rank = line.check(self._key, self._cluster)
            connection.settimeout(2 * self._wait_s + _MORE_S)
            while True:
                line.send(self._answer(rank, line, line.receive()))
        finally:
            line.close()
            self._places.release()

    def _answer(self, rank: int, line: _Line, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to what a worker asks."""
        what, is_chief = asked.get("ask"), self._cluster.is_chief
        if what == "ping":
            return {"time": time.time()}
        if what == "load":
            line.skip(asked.get("bytes"))
            return {}
        if what == "result" and rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._result is not None, self._wait_s)
                found = self._result
            return {"result": None if found is None else dataclasses.asdict(found)}
        if what == "take" and is_chief:
            self._take_result(rank, asked.get("result"))
            return {}
        if what == "verdict" and is_chief:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._verdict is not None, 2 * self._wait_s + _MORE_S
                )
                return {"verdict": self._verdict}
        if what == "decide" and rank == 0:
            self._take_verdict(asked.get("verdict"))
            return {}
        raise ValueError("an unknown question")


class _Line:
    """A connection on which each message is a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_CALL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader: BinaryIO = connection.makefile("rb")

    def close(self) -> None:
        """Ends the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._reader.close()
        self._connection.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Returns the next message; raises ValueError if it is none."""
        text = self._reader.readline(_MOST_LINE)
        if not text:
            raise ConnectionError(errno.ECONNRESET, "the other side closed the connection")
        found = json_values.parse(text)
        if not isinstance(found, dict):
            raise ValueError("another program or job answers there")
        return found

    def ask(self, what: str, *, wait_s: float = _CALL_S, **values: Any) -> dict[str, Any]:
        """Returns the answer to a question."""
        self._connection.settimeout(wait_s + _CALL_S)
        self.send({"ask": what, **values})
        return self.receive()

    def prove(self, key: bytes, own: int, other: int) -> None:
        """Proves to the worker called that this one belongs to the job, and checks its proof."""
        nonce = secrets.token_hex()
        self.send({"hello": nonce, "rank": own})
        answer = self.receive()
        parts = (f"{own} {other}".encode(), nonce.encode(), str(answer.get("hello")).encode())
        if not is_proof(_hexadecimal(answer.get("proof")), key, b"answers", *parts):
            raise ValueError("another program or job answers there")
        self.send({"proof": proof(key, b"calls", *parts).hex()})

    def check(self, key: bytes, cluster: Cluster) -> int:
        """Returns the rank of a caller that has proved to belong to the job.

        Raises:
            ValueError: it has not.
        """
        hello, nonce = self.receive(), secrets.token_hex()
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < cluster.size:
            raise ValueError("no rank of the job")
        name = f"{rank} {cluster.rank}".encode()
        parts = (name, str(hello.get("hello")).encode(), nonce.encode())
        self.send({"hello": nonce, "proof": proof(key, b"answers", *parts).hex()})
        given = _hexadecimal(self.receive().get("proof"))
        if not is_proof(given, key, b"calls", *parts):
            raise ValueError("no proof")
        return rank

    def ping(self) -> tuple[float, float]:
        """Returns the shortest round-trip time in ms, and how far ahead the other clock is in s."""
        best_s, ahead_s = float("inf"), 0.0
        for _ in range(_PINGS):
            sent, began = time.time(), time.perf_counter()
            answer = self.ask("ping").get("time")
            took_s = time.perf_counter() - began
            if not isinstance(answer, float):
                raise ValueError("another program or job answers there")
            if took_s < best_s:
                best_s, ahead_s = took_s, answer - (sent + took_s / 2)
        return 1000 * best_s, ahead_s

    def bandwidth(self) -> float:
        """Returns how many megabytes reach the other side in a second."""
        took_s = self._load(_FEW_BYTES)
        if took_s > _FAST_S:
            return _FEW_BYTES / 1e6 / took_s
        return _MANY_BYTES / 1e6 / self._load(_MANY_BYTES)

    def _load(self, size: int) -> float:
        """Returns the seconds that so many bytes take until the other side has them all."""
        # A slow link may take long.
        self._connection.settimeout(60)
        block = bytes(1 << 16)
        began = time.perf_counter()
        self.send({"ask": "load", "bytes": size})
        for _ in range(size // len(block)):
            self._connection.sendall(block)
        self.receive()
        return time.perf_counter() - began

    def skip(self, size: Any) -> None:
        """Reads so many bytes and forgets them."""
        if not isinstance(size, int) or not 0 <= size <= _MANY_BYTES:
            raise ValueError("not a number of bytes")
        while size:
            got = len(self._reader.read(min(size, 1 << 16)))
            if not got:
                raise ConnectionError(errno.ECONNRESET, "the other side closed the connection")
            size -= got


def _hexadecimal(text: Any) -> bytes:
    """Returns the bytes of a hexadecimal text; empty for anything else."""
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        return b""


TIMED_OUT, REFUSED, NO_ROUTE, NO_NAME = "timed out", "refused", "no route", "no name"


def _words(error: Exception) -> str:
    """Returns the kind of an error of a connection, or its message."""
    if isinstance(error, socket.gaierror):
        return NO_NAME
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return TIMED_OUT
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if getattr(error, "errno", None) in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return NO_ROUTE
    return (getattr(error, "strerror", None) or str(error))[:200]


def holder_of(port: int) -> str:
    """Returns the program that listens at a port of this machine, in words."""
    try:
        listening = [
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
        ]
        pid = next(filter(None, listening), None)
        if pid is not None:
            return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        pass
    return "a program of another user"
