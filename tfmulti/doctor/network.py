"""Lets every worker call every other one, measures the links, and brings the results to the chief.

Each worker listens at its own address, where TensorFlow will listen later, and calls all others. On
each connection both sides prove that they belong to the job, and sign their messages
(`tfmulti.cluster.handshake`). The name of the caller is its rank. It sends messages, and gets an
answer to each:

    {"ask": "ping"}                     {"time": seconds since 1970}
    {"ask": "load", "bytes": n}         after n more bytes: {}
    {"ask": "port"}                     {"port": another port at which the worker listens}
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
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from tfmulti.cluster.cluster import Cluster, host_of
from tfmulti.cluster.handshake import HandshakeServer, authenticate
from tfmulti.cluster.job_secret import proof, secret_of
from tfmulti.cluster.listening import listen
from tfmulti.cluster.messages import TcpMessageConnection
from tfmulti.doctor.finding import FAILED, WARNING, Finding
from tfmulti.doctor.result import Result, result_of
from tfmulti.launch.addresses import reason

# A worker that answers at all does so in this time.
_CALL_S, _AGAIN_S = 5.0, 0.2
# How long the measurements of a worker may take, besides the wait for other workers.
_MORE_S = 20.0
# How long a call at a free port may take.
_FREE_S = 3.0
# How long a worker waits at most until the chief has printed the report.
_REPORT_S = 10.0
_PINGS = 20
# The bytes of the first measurement, and of a second one if the first was fast.
_FEW_BYTES, _MANY_BYTES, _FAST_S = 1 << 20, 1 << 25, 0.05
# A measurement is repeated within this time, until there are so many and the two shortest ones
# differ by at most this factor.
_REPEAT_S, _TIMES, _AGREEING = 1.0, 3, 1.25
# The time limit for a measurement, and the longest message.
_LOAD_S, _MOST_BYTES = 60.0, 1 << 20
# The connections of each worker that are served at once: one, and one that has broken.
_SERVED_AT_ONCE = 2


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
        self._secret = f"doctor {secret_of(env)} {' '.join(cluster.addresses)}".encode()
        self._deadline_s = time.monotonic() + wait_s
        self._wait_s = wait_s
        # A worker has its result after it has waited for the others and measured.
        self._result_wait_s = wait_s + _MORE_S
        self._verdict_wait_s = 2 * self._result_wait_s
        self._changed = threading.Condition()
        self._result: Result | None = None
        self._results: dict[int, Result] = {}
        # The ranks for which several processes have sent results, on the chief.
        self.duplicate_ranks: set[int] = set()
        self._verdict: Any = None
        self._connections: dict[int, _Connection] = {}
        self._callers: set[int] = set()
        self._slots = threading.BoundedSemaphore(_SERVED_AT_ONCE * cluster.size)
        address = cluster.addresses[cluster.rank]
        listener = listen(host_of(address), cluster.hosts, int(address.rpartition(":")[2]))
        # tfmulti's own collectives listen at such a port.
        self._free_listener = listen(host_of(address), cluster.hosts)
        self._server = HandshakeServer(
            listener,
            self.key_of(cluster.rank),
            self._serve,
            is_known={str(rank) for rank in range(cluster.size)}.__contains__,
            most_bytes=_MOST_BYTES,
        )

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        # The port is free at once, so that TensorFlow can listen there.
        self._server.close()
        self._free_listener.close()
        for connection in self._connections.values():
            connection.close()

    def key_of(self, rank: int) -> bytes:
        """Returns the key by which the worker of a rank proves that it is this worker of the job.

        Each rank has its own key, so the doctor finds a worker that uses the rank of another one.
        """
        return proof(self._secret, b"rank", str(rank).encode())

    def measure(self) -> Result:
        """Returns the links to all other workers. It waits for those that have not come yet."""
        result = Result()
        others = [rank for rank in range(self._cluster.size) if rank != self._cluster.rank]
        callers = [threading.Thread(target=self._call, args=(rank, result)) for rank in others]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        # Each worker begins with the next rank, so that at any time one worker sends to each.
        own = self._cluster.rank
        for rank in sorted(others, key=lambda rank: (rank - own) % self._cluster.size):
            if rank in self._connections:
                with self._noting(result, rank):
                    result.mb_s[str(rank)] = self._connections[rank].bandwidth()
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
            if 0 in self._connections:
                self._in_background(self._send_to_chief, result)
            with self._changed:
                self._changed.wait_for(lambda: self._has_come(0), self._wait_s)
                if self._has_come(0):
                    self._changed.wait_for(lambda: self._verdict is not None, self._verdict_wait_s)
            return self._verdict
        for rank in self._connections:
            self._in_background(self._fetch, rank)
        size = self._cluster.size
        with self._changed:
            self._results[0] = result
            self._changed.wait_for(lambda: len(self._results) == size, self._wait_s)
            # A worker that has come may have begun its own wait later.
            expected = {rank for rank in range(size) if self._has_come(rank)}
            self._changed.wait_for(lambda: expected <= set(self._results), _MORE_S)
            results = dict(self._results)
        verdict = decide(results)
        self._take_verdict(verdict)
        senders = [
            self._in_background(connection.ask, "decide", verdict=verdict)
            for connection in self._connections.values()
        ]
        for thread in senders:
            thread.join(_CALL_S)
        # A thread of this process still answers the workers that have asked for the verdict.
        time.sleep(_AGAIN_S)
        return verdict

    def _has_come(self, rank: int) -> bool:
        """Returns whether a worker has answered, or has called this one."""
        return rank in self._connections or rank in self._callers

    def check_free_ports(self) -> list[Finding]:
        """Returns the workers that are reached at their own port, but not at a free one.

        tfmulti's own collectives connect the workers at ports that the system chooses.
        """
        findings: dict[int, Finding] = {}

        def call(rank: int, connection: _Connection) -> None:
            port, host = connection.ask("port").get("port"), host_of(self._cluster.addresses[rank])
            try:
                if type(port) is not int or not 0 < port < 65536:
                    raise ValueError("another program or job answers there")
                socket.create_connection((host, port), _FREE_S).close()
            except (OSError, ValueError) as error:
                findings[rank] = free_port_finding(rank, f"{host}:{port}", reason(error))

        threads = [self._in_background(call, *item) for item in self._connections.items()]
        for thread in threads:
            thread.join(_FREE_S + _CALL_S)
        return [findings[rank] for rank in sorted(findings)]

    def wait_for_chief(self) -> None:
        """Waits until the chief has ended its part, but only for some time.

        A launcher may end the chief, before it prints the report, once another worker has failed.
        """
        until = time.monotonic() + _REPORT_S
        with contextlib.suppress(OSError, ValueError):
            while 0 in self._connections and time.monotonic() < until:
                self._connections[0].ask("ping")
                time.sleep(_AGAIN_S)

    def _in_background(
        self, work: Callable[..., Any], *arguments: Any, **options: Any
    ) -> threading.Thread:
        """Starts a thread that ends silently if its connection ends."""

        def run() -> None:
            with contextlib.suppress(OSError, ValueError):
                work(*arguments, **options)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _send_to_chief(self, result: Result) -> None:
        """Sends this worker's result to the chief, and takes the verdict."""
        connection = self._connections[0]
        connection.ask("take", result=dataclasses.asdict(result))
        answer = connection.ask("verdict", wait_s=self._verdict_wait_s)
        self._take_verdict(answer.get("verdict"))

    def _fetch(self, rank: int) -> None:
        """Takes the result of a worker that the chief reaches."""
        answer = self._connections[rank].ask("result", wait_s=self._result_wait_s)
        self._take_result(rank, answer.get("result"))

    def _take_result(self, rank: int, values: Any) -> None:
        """Keeps the result of a worker, or that it cannot be read."""
        try:
            result = result_of(values, self._cluster.size)
        except ValueError as error:
            unreadable = Finding("result", FAILED, f"it cannot be read: {error}")
            result = Result(findings=[dataclasses.asdict(unreadable)])
        with self._changed:
            if self._results.setdefault(rank, result) != result:
                self.duplicate_ranks.add(rank)
            self._changed.notify_all()

    def _take_verdict(self, verdict: Any) -> None:
        """Keeps the verdict of the chief."""
        with self._changed:
            self._verdict = verdict
            self._changed.notify_all()

    @contextlib.contextmanager
    def _noting(self, result: Result, rank: int) -> Any:
        """A context that notes its error as the reason why a worker cannot be reached."""
        try:
            yield
        except (OSError, ValueError) as error:
            result.errors[str(rank)] = reason(error)

    def _call(self, rank: int, result: Result) -> None:
        """Calls a worker until it answers, and measures the round-trip time."""
        address = self._cluster.addresses[rank]
        host, port = host_of(address), int(address.rpartition(":")[2])
        while True:
            with self._noting(result, rank):
                connected = socket.create_connection((host, port), _CALL_S)
                connection = _Connection(TcpMessageConnection(connected))
                self._connections[rank] = connection
                connection.authenticate(self.key_of(rank), str(self._cluster.rank))
                result.rtt_ms[str(rank)], result.clock_s[str(rank)] = connection.ping()
                result.errors.pop(str(rank), None)
                return
            if rank in self._connections:
                self._connections.pop(rank).close()
            if time.monotonic() > self._deadline_s:
                return
            time.sleep(_AGAIN_S)

    def _serve(self, name: str, first: dict[str, Any], messages: TcpMessageConnection) -> None:
        """Answers one caller until it ends."""
        rank, asked = int(name), first
        with self._changed:
            self._callers.add(rank)
            self._changed.notify_all()
        if not self._slots.acquire(blocking=False):
            messages.close()
            return
        try:
            while True:
                answer = self._answer(rank, messages, asked)
                messages.limit(self._verdict_wait_s)
                messages.send(answer)
                asked = messages.expect()
        finally:
            messages.close()
            self._slots.release()

    def _answer(
        self, rank: int, messages: TcpMessageConnection, asked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the answer to what a worker asks."""
        what, is_chief = asked.get("ask"), self._cluster.is_chief
        if what == "ping":
            return {"time": time.time()}
        if what == "port":
            return {"port": self._free_listener.getsockname()[1]}
        if what == "load":
            size = asked.get("bytes")
            if type(size) is not int or not 0 <= size <= _MANY_BYTES:
                raise ValueError("not a number of bytes")
            messages.limit(_LOAD_S)
            messages.skip(size)
            return {}
        if what == "result" and rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._result is not None, self._result_wait_s)
                result = self._result
            return {"result": None if result is None else dataclasses.asdict(result)}
        if what == "take" and is_chief:
            self._take_result(rank, asked.get("result"))
            return {}
        if what == "verdict" and is_chief:
            with self._changed:
                self._changed.wait_for(lambda: self._verdict is not None, self._verdict_wait_s)
                return {"verdict": self._verdict}
        if what == "decide" and rank == 0:
            self._take_verdict(asked.get("verdict"))
            return {}
        raise ValueError("an unknown question")


class _Connection:
    """The connection to a worker that was called."""

    def __init__(self, messages: TcpMessageConnection) -> None:
        self._messages = messages
        # Each answer belongs to the question before it.
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the connection, also for a thread that waits on it."""
        self._messages.close()

    def authenticate(self, key: bytes, name: str) -> None:
        """Proves that this worker belongs to the job, and checks that the other one does."""
        authenticate(self._messages, key, name, _MOST_BYTES)

    def ask(self, what: str, *, wait_s: float = _CALL_S, **values: Any) -> dict[str, Any]:
        """Returns the answer to a question."""
        with self._lock:
            self._messages.limit(wait_s + _CALL_S)
            self._messages.send({"ask": what, **values})
            return self._messages.expect()

    def ping(self) -> tuple[float, float]:
        """Returns the shortest round-trip time in ms, and how far ahead the other clock is in s."""
        best_s, ahead_s = float("inf"), 0.0
        for _ in range(_PINGS):
            sent, began = time.time(), time.perf_counter()
            answer = self.ask("ping").get("time")
            took_s = time.perf_counter() - began
            if not isinstance(answer, float) or not math.isfinite(answer):
                raise ValueError("another program or job answers there")
            if took_s < best_s:
                best_s, ahead_s = took_s, answer - (sent + took_s / 2)
        return 1000 * best_s, ahead_s

    def bandwidth(self) -> float:
        """Returns how many megabytes reach the other side in a second."""
        took_s = self._shortest(_FEW_BYTES)
        if took_s > _FAST_S:
            return _FEW_BYTES / 1e6 / took_s
        return _MANY_BYTES / 1e6 / self._shortest(_MANY_BYTES)

    def _shortest(self, size: int) -> float:
        """Returns the shortest time in s that so many bytes took.

        A busy machine delays some of them, which says nothing about the link. Two that take equally
        long were hardly delayed.
        """
        until, took_s = time.perf_counter() + _REPEAT_S, [self._load(size)]
        while time.perf_counter() < until:
            shortest = sorted(took_s)[:2]
            if len(took_s) >= _TIMES and shortest[1] <= _AGREEING * shortest[0]:
                break
            took_s.append(self._load(size))
        return min(took_s)

    def _load(self, size: int) -> float:
        """Returns the seconds that so many bytes take until the other side has them all."""
        block = bytes(1 << 16)
        with self._lock:
            # A slow link may take long.
            self._messages.limit(_LOAD_S)
            began = time.perf_counter()
            self._messages.send({"ask": "load", "bytes": size})
            for _ in range(size // len(block)):
                self._messages.send_bytes(block)
            self._messages.expect()
            return time.perf_counter() - began


def free_port_finding(rank: int, address: str, why: str) -> Finding:
    """Returns the finding about a worker that is not reached at a free port.

    Args:
        rank: the rank of the worker that was called.
        address: its address with that port.
        why: why the call has failed.
    """
    return Finding(
        "free ports",
        WARNING,
        f"worker {rank} is not reached at {address}, a port that its system has chosen: {why}",
        "the workers connect at free ports, too: without them gradients travel by gRPC, which is "
        "slower, and NCCL does not start",
        "Open the ports of net.ipv4.ip_local_port_range (sysctl) for the machines of the job.",
    )


def holder_of(port: int) -> str:
    """Returns the program that listens at a port of this machine, in words."""
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ]
        pid = next(filter(None, listening), None)
        if pid is not None:
            return f"{psutil.Process(pid).name()} (process {pid})"
    except psutil.Error:
        pass
    return "a program of another user"
