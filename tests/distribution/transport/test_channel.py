"""Messages between workers, here between threads over real connections."""

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
    """Returns what calls in threads of their own returned."""
    with ThreadPoolExecutor(len(calls)) as pool:
        found: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.result(LIMIT_S) for future in found]


def addresses_of(listeners: Sequence[socket.socket]) -> list[tuple[str, int]]:
    return [("localhost", each.getsockname()[1]) for each in listeners]


class Patience:
    """A check that fails the test where an exchange waits too long."""

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
def test_each_gets_what_is_meant_for_it_in_the_order_of_the_workers(workers: int) -> None:
    links, _ = connected(workers)

    def exchange(rank: int) -> list[str]:
        others = [other for other in range(workers) if other != rank]
        links[rank].send(7, [of(f"{rank} to {other}") for other in others])
        return text(links[rank].receive(7))

    for rank, found in enumerate(at_once(*(lambda r=r: exchange(r) for r in range(workers)))):  # type: ignore[misc]
        assert found == [f"{other} to {rank}" for other in range(workers) if other != rank]


def test_messages_are_matched_by_key_and_those_of_one_by_order() -> None:
    """The first worker sends all before the second asks; and takes them in another order."""
    (one, two), _ = connected(2)
    for key, word in [(1, "a"), (2, "b"), (1, "c")]:
        one.send(key, [of(word)])
    for key, word in [(2, "x"), (1, "y"), (1, "z")]:
        two.send(key, [of(word)])
    assert [text(two.receive(key)) for key in (1, 1, 2)] == [["a"], ["c"], ["b"]]
    assert [text(one.receive(key)) for key in (2, 1, 1)] == [["x"], ["y"], ["z"]]


@pytest.mark.parametrize("size", [0, 1, 70_000, 30_000_000])
def test_any_size_travels_both_ways_at_once(size: int) -> None:
    """30 MB are more than connections hold: neither worker may wait for the other to receive."""
    (one, two), _ = connected(2)
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
    one.send(0, [given[0]])
    two.send(0, [given[1]])
    np.testing.assert_array_equal(one.receive(0)[0], given[1])
    (found,) = two.receive(0)
    np.testing.assert_array_equal(found, given[0])
    assert size == 0 or found.ctypes.data % 64 == 0


def test_many_messages_under_way_stay_apart() -> None:
    (one, two), _ = connected(2)

    def work(links: Channel, shift: int) -> list[int]:
        found = []
        for step in range(200):
            count = 1 + (step * 7919) % 50_000
            for key in (0, 1):
                links.send(key, [np.full(count, step + key + shift, np.uint64)])
            for key in (1, 0):
                part = links.receive(key)[0].view(np.uint64)
                assert len(part) == count
                assert part.min() == part.max()
                found.append(int(part[0]))
        return found

    ones, twos = at_once(lambda: work(one, 0), lambda: work(two, 1000))
    assert twos == [step + key for step in range(200) for key in (1, 0)]
    assert ones == [1000 + found for found in twos]


def test_who_waits_for_a_worker_that_ends_is_told() -> None:
    """Messages that it sent before its end still arrive, for exchanges that wait and later ones."""
    (one, two), connections = connected(2)
    two.send(1, [of("last")])
    one.send(1, [of("")])
    one.send(2, [of("never asked for")])
    waits = threading.Thread(target=two.receive, args=(1,))
    waits.start()
    waits.join(LIMIT_S)
    connections[1][0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelError, match=r"worker 1 is lost: .*closed"):
        one.receive(2)
    one.send(3, [of("")])
    with pytest.raises(ChannelError, match="worker 1 is lost"):
        one.receive(3)
    assert text(one.receive(1)) == ["last"]


def test_a_third_worker_hears_of_it_only_where_it_needs_the_lost_one() -> None:
    links, connections = connected(3)
    for rank in range(3):
        links[rank].send(1, [of(str(rank))] * 2)
    assert [text(links[rank].receive(1)) for rank in range(3)] == [
        ["1", "2"],
        ["0", "2"],
        ["0", "1"],
    ]
    for link in connections[2].values():
        link.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        links[rank].send(2, [of("")] * 2)
        with pytest.raises(ChannelError, match="worker 2 is lost"):
            links[rank].receive(2)


def test_a_wait_asks_each_second_whether_the_others_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmulti.distribution.transport.channel.CHECK_EVERY_S", 0.01)
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise TimeoutError("frozen")

    (one, two), _ = connected(2, check)
    one.send(0, [of("")])
    with pytest.raises(TimeoutError, match="frozen"):
        one.receive(0)
    two.send(0, [of("late")])


def test_the_last_exchanges_tell_whose_messages_are_missing() -> None:
    links, connections = connected(3)
    for key in range(40):
        for link in links:
            link.send(key, [of("")] * 2)
        for link in links:
            link.receive(key)
    links[0].send(100, [of("")] * 2)
    links[2].send(100, [of("")] * 2)
    *ended, is_open = links[0].last()
    assert [each.key for each in ended] == list(range(8, 40))
    assert all(each.began_s <= (each.ended_s or 0.0) and not each.missing for each in ended)
    assert (is_open.key, is_open.ended_s) == (100, None)
    assert 1 in is_open.missing
    for link in connections[1].values():
        link.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelError, match="worker 1 is lost"):
        links[0].receive(100)
    failed = links[0].last()[-1]
    assert failed.key == 100
    assert 1 in failed.missing
    assert failed.ended_s is not None


def test_strangers_are_turned_away() -> None:
    """Who has another key, says nothing or hangs up keeps nobody from meeting."""
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


def test_another_program_at_the_address_is_noticed() -> None:
    listener, other = listen("localhost", ["localhost"]), socket.create_server(("localhost", 0))

    def answer() -> None:
        link, _ = other.accept()
        link.sendall(b"220 mail server! Welcome")
        link.recv(100)

    def reach() -> str:
        where = [("localhost", other.getsockname()[1]), *addresses_of([listener])]
        with pytest.raises(ChannelError) as error:
            connect_workers(listener, 1, where, KEY)
        return str(error.value)

    _, said = at_once(answer, reach)
    assert "another program answers at localhost:" in said
    other.close()


def test_workers_of_another_secret_do_not_meet() -> None:
    """And no key goes over the network."""
    listeners = [listen("localhost", ["localhost"]) for _ in range(2)]
    where = addresses_of(listeners)

    def meet(rank: int) -> str:
        with pytest.raises(ChannelError) as error:
            connect_workers(listeners[rank], rank, where, KEY + bytes([rank]), timeout_s=1.0)
        return str(error.value)

    said = at_once(*(lambda r=r: meet(r) for r in range(2)))  # type: ignore[misc]
    assert "another secret" in said[1]
    assert "timed out" in said[0]


def test_silent_strangers_keep_no_worker_waiting() -> None:
    """More than could be listened to one after the other."""
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


def test_who_never_comes_is_waited_for_so_long() -> None:
    listener = listen("localhost", ["localhost"])
    with pytest.raises(ChannelError, match="worker 0 does not reach all others: timed out"):
        connect_workers(listener, 0, [("localhost", 1), ("localhost", 2)], KEY, timeout_s=0.2)


def test_who_is_told_wrong_addresses_takes_nobody_for_another() -> None:
    """The last of three is told the others' the wrong way round; all of them know the key."""
    listeners = [listen("localhost", ["localhost"]) for _ in range(3)]
    right = addresses_of(listeners)
    told = [right, right, [right[1], right[0], right[2]]]

    def meet(rank: int) -> str:
        try:
            met = connect_workers(listeners[rank], rank, told[rank], KEY, timeout_s=1.0)
            return f"met {list(met)}"
        except ChannelError as error:
            return str(error)

    said = at_once(*(lambda r=r: meet(r) for r in range(3)))  # type: ignore[misc]
    assert "another program answers" in said[2]
    assert "timed out" in said[0]


def test_closed_links_end_who_waits_everywhere() -> None:
    """On this and all other workers. A message that was only partly received is given to nobody."""
    links, _ = connected(3)
    for each in links:
        each.send(1, [of("of the step that failed")] * 2)
    links[0].close()
    for each in links:
        each.send(1, [of("of another step")] * 2)
    with pytest.raises(ChannelError, match="an error ended the exchanges"):
        [links[0].receive(1) for _ in range(2)]
    for each in links[1:]:
        with pytest.raises(ChannelError, match="worker 0 is lost"):
            [each.receive(1) for _ in range(2)]


def test_closed_links_leave_no_thread_and_no_connection() -> None:
    """On either side: when all others have ended, there is nobody to listen to."""
    before = {thread for thread in threading.enumerate() if thread.name == THREAD}
    descriptors = len(os.listdir("/proc/self/fd"))
    (one, other), _ = connected(2)
    threads = {t for t in threading.enumerate() if t.name == THREAD} - before
    one.close()
    for thread in threads:
        thread.join(10)
    one.close()  # again
    assert [thread for thread in threads if thread.is_alive()] == []
    assert len(threads) == 2
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    other.send(1, [np.zeros(1)])
    with pytest.raises(ChannelError):
        other.receive(1)


def test_a_child_process_keeps_no_connection_open() -> None:
    (one, two), connections = connected(2)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)  # until the parent has closed its own, and the test is over
        os._exit(0)
    try:
        connections[1][0].close()  # as when the process ends; its child still lives
        one.send(0, [of("")])
        with pytest.raises(ChannelError, match="worker 1 is lost"):
            one.receive(0)
    finally:
        os.write(writes, b".")
        os.waitpid(child, 0)
        for end in (reads, writes):
            os.close(end)
    assert two is not None


def test_who_waits_reads_what_is_there_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving thread, which must be woken, reads large and late messages."""
    (one, two), _ = connected(2)
    readers: list[str] = []
    read = Channel._read

    def noted(links: Channel, peer: Any) -> None:
        if links is one:
            readers.append(threading.current_thread().name)
        read(links, peer)

    monkeypatch.setattr(Channel, "_read", noted)
    two.send(1, [of("small")])
    one.send(1, [of("")])
    assert text(one.receive(1)) == ["small"]
    assert set(readers) == {threading.current_thread().name}
    readers.clear()
    two.send(2, [np.zeros(1_000_000, np.uint8)])  # while nobody waits
    for _ in range(1000):
        if readers:  # the last bytes may be left for the waiting caller
            break
        threading.Event().wait(0.01)
    assert set(readers) == {THREAD}


def test_what_comes_late_wakes_who_waits() -> None:
    """One byte wakes it; a waiting caller reads the bytes after it."""
    (one, two), connections = connected(2)
    one.send(1, [of("")])
    late = threading.Timer(0.2, two.send, (1, [of("x")]))
    late.start()
    assert text(one.receive(1)) == ["x"]
    link = connections[0][1]
    assert link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == WAKE_BYTES
    late.join(LIMIT_S)


def test_the_end_of_a_worker_is_seen_where_nobody_waits() -> None:
    (one, _), connections = connected(2)
    connections[1][0].shutdown(socket.SHUT_RDWR)
    for _ in range(1000):
        if one._peers[0].lost is not None:
            break
        threading.Event().wait(0.01)
    assert one._peers[0].lost is not None
