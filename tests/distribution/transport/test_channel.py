"""Tests messages between workers, here between threads over real connections."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tfmulti.cluster.job_secret import NONCE_BYTES, PROOF_BYTES
from tfmulti.cluster.listening import listen
from tfmulti.distribution.transport.channel import THREAD, WAKE_BYTES, Channel, ChannelError
from tfmulti.distribution.transport.rendezvous import connect_workers

KEY = b"0123456789abcdef"
LIMIT_S = 30


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the results of calls, each in its own thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        found: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.result(LIMIT_S) for future in found]


def addresses_of(listeners: Sequence[socket.socket]) -> list[tuple[str, int]]:
    return [("localhost", each.getsockname()[1]) for each in listeners]


class Patience:
    """A check that fails the test if an exchange waits too long."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> None:
        self.asked += 1
        assert self.asked < LIMIT_S, "an exchange never ends"


def connected(
    workers: int, check: Callable[[], None] | None = None
) -> tuple[list[Channel], list[dict[int, socket.socket]]]:
    listeners = [listen("localhost", ["localhost"]) for _ in range(workers)]
    where = addresses_of(listeners)
    made = at_once(
        *(
            lambda rank=rank: connect_workers(listeners[rank], rank, where, KEY)  # type: ignore[misc]
            for rank in range(workers)
        )
    )
    return [Channel(each, check or Patience()) for each in made], made


def text(found: list[np.ndarray]) -> list[str]:
    return [part.tobytes().decode() for part in found]


def of(word: str) -> np.ndarray:
    return np.frombuffer(word.encode(), np.uint8)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_each_worker_gets_its_own_messages_in_the_order_of_the_ranks(workers: int) -> None:
    channels, _ = connected(workers)

    def exchange(rank: int) -> list[str]:
        others = [other for other in range(workers) if other != rank]
        channels[rank].send(7, [of(f"{rank} to {other}") for other in others])
        return text(channels[rank].receive(7))

    for rank, found in enumerate(at_once(*(lambda r=r: exchange(r) for r in range(workers)))):  # type: ignore[misc]
        assert found == [f"{other} to {rank}" for other in range(workers) if other != rank]


def test_messages_are_matched_by_key_and_messages_of_one_key_by_order() -> None:
    """The second worker sends in another order, and receives in a third."""
    (first, second), _ = connected(2)
    for key, word in [(1, "a"), (2, "b"), (1, "c")]:
        first.send(key, [of(word)])
    for key, word in [(2, "x"), (1, "y"), (1, "z")]:
        second.send(key, [of(word)])
    assert [text(second.receive(key)) for key in (1, 1, 2)] == [["a"], ["c"], ["b"]]
    assert [text(first.receive(key)) for key in (2, 1, 1)] == [["x"], ["y"], ["z"]]


@pytest.mark.parametrize("size", [0, 1, 70_000, 30_000_000])
def test_messages_of_any_size_travel_in_both_directions_at_once(size: int) -> None:
    """A connection buffers less than 30 MB, so no worker may wait until the other receives."""
    (first, second), _ = connected(2)
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
    first.send(0, [given[0]])
    second.send(0, [given[1]])
    np.testing.assert_array_equal(first.receive(0)[0], given[1])
    (found,) = second.receive(0)
    np.testing.assert_array_equal(found, given[0])
    assert size == 0 or found.ctypes.data % 64 == 0


def test_many_open_exchanges_do_not_mix() -> None:
    (first, second), _ = connected(2)

    def work(channel: Channel, shift: int) -> list[int]:
        found = []
        for step in range(200):
            count = 1 + (step * 7919) % 50_000
            for key in (0, 1):
                channel.send(key, [np.full(count, step + key + shift, np.uint64)])
            for key in (1, 0):
                part = channel.receive(key)[0].view(np.uint64)
                assert len(part) == count
                assert part.min() == part.max()
                found.append(int(part[0]))
        return found

    ones, twos = at_once(lambda: work(first, 0), lambda: work(second, 1000))
    assert twos == [step + key for step in range(200) for key in (1, 0)]
    assert ones == [1000 + found for found in twos]


def test_an_exchange_fails_if_its_worker_ends() -> None:
    """Messages that the worker sent before its end still arrive."""
    (first, second), connections = connected(2)
    second.send(1, [of("last")])
    first.send(1, [of("")])
    first.send(2, [of("never asked for")])
    waits = threading.Thread(target=second.receive, args=(1,))
    waits.start()
    waits.join(LIMIT_S)
    connections[1][0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelError, match=r"worker 1 is lost: .*closed"):
        first.receive(2)
    first.send(3, [of("")])
    with pytest.raises(ChannelError, match="worker 1 is lost"):
        first.receive(3)
    assert text(first.receive(1)) == ["last"]


def test_a_lost_worker_ends_the_exchanges_of_all_other_workers() -> None:
    channels, connections = connected(3)
    for rank in range(3):
        channels[rank].send(1, [of(str(rank))] * 2)
    assert [text(channels[rank].receive(1)) for rank in range(3)] == [
        ["1", "2"],
        ["0", "2"],
        ["0", "1"],
    ]
    for connection in connections[2].values():
        connection.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        channels[rank].send(2, [of("")] * 2)
        with pytest.raises(ChannelError, match="worker 2 is lost"):
            channels[rank].receive(2)


def test_a_wait_checks_again_and_again_whether_the_workers_are_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tfmulti.distribution.transport.channel.CHECK_EVERY_S", 0.01)
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise TimeoutError("frozen")

    (first, second), _ = connected(2, check)
    first.send(0, [of("")])
    with pytest.raises(TimeoutError, match="frozen"):
        first.receive(0)
    second.send(0, [of("late")])


def test_a_message_of_a_worker_that_has_ended_since_is_still_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with much to do, TensorFlow may find that worker dead before it is read."""
    monkeypatch.setattr("tfmulti.distribution.transport.channel.CHECK_EVERY_S", 0.2)
    sender: list[Channel] = []

    def check() -> None:
        sender[0].send(0, [of("last words")])
        raise TimeoutError("worker 1 is dead")

    (first, second), _ = connected(2, check)
    sender.append(second)
    first.send(0, [of("")])
    assert text(first.receive(0)) == ["last words"]


def test_records_of_exchanges_list_the_workers_whose_messages_are_missing() -> None:
    channels, connections = connected(3)
    for key in range(40):
        for channel in channels:
            channel.send(key, [of("")] * 2)
        for channel in channels:
            channel.receive(key)
    channels[0].send(100, [of("")] * 2)
    channels[2].send(100, [of("")] * 2)
    *ended, is_open = channels[0].last()
    assert [each.key for each in ended] == list(range(8, 40))
    assert all(each.began_s <= (each.ended_s or 0.0) and not each.missing for each in ended)
    assert (is_open.key, is_open.ended_s) == (100, None)
    assert 1 in is_open.missing
    for connection in connections[1].values():
        connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelError, match="worker 1 is lost"):
        channels[0].receive(100)
    failed = channels[0].last()[-1]
    assert failed.key == 100
    assert 1 in failed.missing
    assert failed.ended_s is not None


def test_strangers_do_not_prevent_the_workers_from_connecting() -> None:
    """They have another key, send nothing, hang up, or claim a wrong rank."""
    listeners = [listen("localhost", ["localhost"]) for _ in range(2)]
    where = addresses_of(listeners)
    silent = socket.create_connection(where[0])
    hung_up = socket.create_connection(where[0])
    hung_up.close()
    wrong = socket.create_connection(where[0])
    wrong.sendall(b"another program!" + b"\1\0\0\0" + bytes(32))
    same = socket.create_connection(where[0])
    same.sendall(bytes(16) + b"\0\0\0\0")  # claims to be the worker that it calls
    met = at_once(*(lambda r=r: connect_workers(listeners[r], r, where, KEY) for r in range(2)))  # type: ignore[misc]
    assert [list(each) for each in met] == [[1], [0]]
    assert met[0][1].getpeername() == met[1][0].getsockname()  # each other, and no stranger
    for stranger, answered in ((wrong, NONCE_BYTES + 4 + PROOF_BYTES), (same, 0)):
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError), stranger.makefile("rb") as answer:
            assert len(answer.read()) == answered
    silent.close()


def test_another_program_at_the_address_is_an_error() -> None:
    listener, other = listen("localhost", ["localhost"]), socket.create_server(("localhost", 0))

    def answer() -> None:
        connection, _ = other.accept()
        connection.sendall(b"220 mail server! Welcome")
        connection.recv(100)

    def reach() -> str:
        where = [("localhost", other.getsockname()[1]), *addresses_of([listener])]
        with pytest.raises(ChannelError) as error:
            connect_workers(listener, 1, where, KEY)
        return str(error.value)

    _, errors = at_once(answer, reach)
    assert "another program answers at localhost:" in errors
    other.close()


def test_workers_with_different_secrets_do_not_connect() -> None:
    listeners = [listen("localhost", ["localhost"]) for _ in range(2)]
    where = addresses_of(listeners)

    def meet(rank: int) -> str:
        with pytest.raises(ChannelError) as error:
            connect_workers(listeners[rank], rank, where, KEY + bytes([rank]), timeout_s=1.0)
        return str(error.value)

    errors = at_once(*(lambda r=r: meet(r) for r in range(2)))  # type: ignore[misc]
    assert "another secret" in errors[1]
    assert "timed out" in errors[0]


def test_silent_strangers_do_not_delay_the_workers() -> None:
    """There is no time to answer so many strangers one after the other."""
    listeners = [listen("localhost", ["localhost"]) for _ in range(2)]
    where = addresses_of(listeners)
    strangers = [socket.create_connection(where[0]) for _ in range(20)]
    join_in = [
        lambda r=r: connect_workers(listeners[r], r, where, KEY, timeout_s=10.0)  # type: ignore[misc]
        for r in range(2)
    ]
    assert [list(each) for each in at_once(*join_in)] == [[1], [0]]
    for stranger in strangers:
        stranger.close()


def test_a_missing_worker_is_an_error_after_the_timeout() -> None:
    listener = listen("localhost", ["localhost"])
    with pytest.raises(ChannelError, match="worker 0 does not reach all others: timed out"):
        connect_workers(listener, 0, [("localhost", 1), ("localhost", 2)], KEY, timeout_s=0.2)


def test_a_worker_with_swapped_addresses_notices_the_wrong_ranks() -> None:
    """The last of three workers has the addresses of the other two in the wrong order."""
    listeners = [listen("localhost", ["localhost"]) for _ in range(3)]
    right = addresses_of(listeners)
    told = [right, right, [right[1], right[0], right[2]]]

    def meet(rank: int) -> str:
        try:
            met = connect_workers(listeners[rank], rank, told[rank], KEY, timeout_s=1.0)
            return f"met {list(met)}"
        except ChannelError as error:
            return str(error)

    errors = at_once(*(lambda r=r: meet(r) for r in range(3)))  # type: ignore[misc]
    assert "another program answers" in errors[2]
    assert "timed out" in errors[0]


def test_closing_a_channel_ends_open_exchanges_on_all_workers() -> None:
    """Later exchanges with the same key must not get the messages of the failed step."""
    channels, _ = connected(3)
    for channel in channels:
        channel.send(1, [of("of the step that failed")] * 2)
    channels[0].close()
    for channel in channels:
        channel.send(1, [of("of another step")] * 2)
    with pytest.raises(ChannelError, match="an error ended the exchanges"):
        [channels[0].receive(1) for _ in range(2)]
    for channel in channels[1:]:
        with pytest.raises(ChannelError, match="worker 0 is lost"):
            [channel.receive(1) for _ in range(2)]


def test_a_closed_channel_leaves_no_thread_and_no_connection() -> None:
    """This holds on the closing worker and on the other one."""
    before = {thread for thread in threading.enumerate() if thread.name == THREAD}
    descriptors = len(os.listdir("/proc/self/fd"))
    (first, other), _ = connected(2)
    threads = {t for t in threading.enumerate() if t.name == THREAD} - before
    first.close()
    for thread in threads:
        thread.join(10)
    first.close()  # again
    assert [thread for thread in threads if thread.is_alive()] == []
    assert len(threads) == 2
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    other.send(1, [np.zeros(1)])
    with pytest.raises(ChannelError):
        other.receive(1)


def test_a_child_process_keeps_no_connection_open() -> None:
    (first, second), connections = connected(2)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)  # until the parent has closed its own, and the test is over
        os._exit(0)
    try:
        connections[1][0].close()  # as when the process ends; its child still lives
        first.send(0, [of("")])
        with pytest.raises(ChannelError, match="worker 1 is lost"):
            first.receive(0)
    finally:
        os.write(writes, b".")
        os.waitpid(child, 0)
        for end in (reads, writes):
            os.close(end)
    assert second is not None


def test_a_waiting_caller_reads_small_messages_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver thread reads large messages while no caller waits."""
    (first, second), _ = connected(2)
    readers: list[str] = []
    read = Channel._read

    def noted(channel: Channel, peer: Any) -> None:
        if channel is first:
            readers.append(threading.current_thread().name)
        read(channel, peer)

    monkeypatch.setattr(Channel, "_read", noted)
    second.send(1, [of("small")])
    first.send(1, [of("")])
    assert text(first.receive(1)) == ["small"]
    assert set(readers) == {threading.current_thread().name}
    readers.clear()
    second.send(2, [np.zeros(1_000_000, np.uint8)])  # while nobody waits
    for _ in range(1000):
        if readers:  # the last bytes may be left for the waiting caller
            break
        threading.Event().wait(0.01)
    assert set(readers) == {THREAD}


def test_a_late_message_wakes_the_waiting_caller() -> None:
    """The caller then resets the number of bytes that wake the receiver thread."""
    (first, second), connections = connected(2)
    first.send(1, [of("")])
    late = threading.Timer(0.2, second.send, (1, [of("x")]))
    late.start()
    assert text(first.receive(1)) == ["x"]
    connection = connections[0][1]
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == WAKE_BYTES
    late.join(LIMIT_S)


def test_a_lost_worker_is_noticed_without_a_waiting_caller() -> None:
    (first, _), connections = connected(2)
    connections[1][0].shutdown(socket.SHUT_RDWR)
    for _ in range(1000):
        if first._peers[0].lost is not None:
            break
        threading.Event().wait(0.01)
    assert first._peers[0].lost is not None
