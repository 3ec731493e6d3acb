"""Tests every parser of messages and files: it accepts, or raises its documented error.

Each parser gets any bytes, and its own format with bytes changed, cut off or repeated. Parsers of
JSON also get any JSON, and their own messages with one value replaced. No parser takes more than
MOST_BYTES of memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import re
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.records import write_records
from tfmulti.cluster import job_secret
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.messages import MessageConnection
from tfmulti.config import json_values
from tfmulti.config.fit_config import FitConfig, read_config_file
from tfmulti.data.formats.csv_tables import read_csv
from tfmulti.data.formats.examples import parse_numbers_into
from tfmulti.data.formats.features import Feature, read_features
from tfmulti.data.formats.parquet_tables import read_parquet
from tfmulti.data.formats.record_index import index_of
from tfmulti.data.sources import npy, npz
from tfmulti.distribution.transport.channel import ChannelError
from tfmulti.distribution.transport.rendezvous import connect_workers
from tfmulti.errors import ClusterError, ConfigError, DataError
from tfmulti.launch import agent, heartbeat
from tfmulti.launch.agent import Agent
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.heartbeat import HeartbeatRecord, WorkerFailure
from tfmulti.launch.hosts import parse_hosts, read_hostfile
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.remote_machine import RemoteMachine
from tfmulti.launch.workers import WorkerStatus
from tfmulti.training.checkpoint import file_format, owner
from tfmulti.training.checkpoint.file_format import DamagedCheckpointError, Record
from tfmulti.training.checkpoint.owner import Owner

# A parser may take this much memory in addition, for inputs of some KB.
MOST_BYTES = 64 << 20
TRIED = 200

fuzzed = settings(
    max_examples=TRIED,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(autouse=True)
def little_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a test takes at most MOST_BYTES; the kernel counts the memory of all libraries.

    The count includes memory that threads of earlier tests take at the same time. A parser takes
    the same memory each time, so a test with too much memory is repeated once.
    """
    with _memory() as taken:
        yield
    if taken() > MOST_BYTES:
        given_to_it = inspect.signature(request.function).parameters
        with _memory() as taken:
            request.function(**{name: request.node.funcargs[name] for name in given_to_it})
        assert taken() < MOST_BYTES


@contextlib.contextmanager
def _memory() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the largest additional memory of the process, in bytes."""
    # This resets the peak of the process to its current memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = _kb("VmRSS")
    peak = [0]
    yield lambda: (peak[0] - before) * 1024
    peak[0] = _kb("VmHWM")


def _kb(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_the_memory_of_a_test_is_seen() -> None:
    with _memory() as taken:
        np.ones(MOST_BYTES, np.uint8)
    assert taken() > MOST_BYTES / 2
    Path("/proc/self/clear_refs").write_text("5")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, "9" * 5000, "../../x", "\0", "\ud800", [[]] * 100])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NESTED = "[" * 100_000


@st.composite
def like(draw: Callable[[Any], Any], *messages: Any) -> Any:
    """Returns any JSON, or one of these with a value replaced, left out or added."""
    value = draw(st.sampled_from([None, *messages]))
    if value is None:
        return draw(JSON)
    whole = json.loads(json.dumps(value))
    at: Any = whole
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return whole
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and draw(st.booleans()):
            at = at[key]
            continue
        change = draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "replace" or isinstance(at, list):
            at[key] = draw(JSON)
        elif change == "remove":
            del at[key]
        else:
            at[draw(st.text(max_size=8))] = draw(JSON)
        return whole


@st.composite
def damaged(draw: Callable[[Any], Any], *contents: bytes) -> bytes:
    """Returns any bytes, or one of these with some bytes changed, cut off, or repeated."""
    content = draw(st.sampled_from([b"", *contents]))
    if not content:
        return bytes(draw(st.binary(max_size=300)))
    data = bytearray(content)
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=6)):
        data[place] = draw(st.integers(0, 255))
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    change = draw(st.sampled_from(["none", "cut off", "twice", "without"]))
    if change == "cut off":
        del data[end:]
    elif change == "twice":
        data[end:end] = data[start:end]
    elif change == "without":
        del data[start:end]
    return bytes(data)


@contextlib.contextmanager
def only(*errors: type[Exception]) -> Iterator[None]:
    """Allows these errors in the context, if their messages have one line."""
    words = ""
    try:
        yield
    except errors as error:
        words = str(error).strip()
    assert "\n" not in words


# Parsers of messages from sockets.


@fuzzed
@given(st.lists(damaged(b'{"id": 1, "gives": null}\n', b'{"line": [0, "stdout", "x"]}\n')))
def test_lines_of_a_connection(lines: list[bytes]) -> None:
    link = MessageConnection(io.BytesIO(b"".join(lines)), io.BytesIO(), most_bytes=1000)
    while (message := link.receive()) is not None:
        assert type(message) is dict


def test_a_line_of_deep_brackets() -> None:
    link = MessageConnection(io.BytesIO(NESTED.encode() + b"\n"), io.BytesIO())
    assert link.receive() == {}


TOLD = HeartbeatRecord(3, "training", 1.5, 0.5, False, 2, "/f")
LOOK = asdict(
    WorkerStatus(
        0, 4, 1, 5.0, TOLD, WorkerFailure("m", "E", "t", 0, 4.0), frozen=True, idle_since_s=2.0
    )
)


def test_a_worker_status_as_an_agent_sends_it() -> None:
    seen = json_values.build(WorkerStatus, json.loads(json.dumps(LOOK)))
    assert asdict(seen) == LOOK
    assert json_values.build(
        WorkerStatus, json.loads(json.dumps(asdict(WorkerStatus(1, 2))))
    ) == WorkerStatus(1, 2)


def test_what_is_no_number_is_refused() -> None:
    text = json.dumps({**LOOK, "ended_s": float("nan")})
    with pytest.raises(ValueError, match="ended_s is no number"):
        json_values.build(WorkerStatus, json_values.parse(text))


@fuzzed
@given(like(LOOK))
def test_worker_statuses_from_an_agent(values: Any) -> None:
    try:
        seen = json_values.build(WorkerStatus, values)
    except ValueError:
        return
    assert [type(value) for value in (seen.rank, seen.pid, seen.frozen)] == [int, int, bool]
    assert seen.told is None or [type(value) for value in asdict(seen.told).values()] == [
        type(value) for value in asdict(TOLD).values()
    ]
    assert seen.shifted(1.0).rank == seen.rank


HELLO = b'{"hello": {"cores": 2, "gpus": 0}}\n'


@settings(fuzzed, max_examples=60)
@given(
    st.lists(
        like(
            {"line": [0, "stdout", "words"]},
            {"looks": [LOOK], "now_s": 3.0},
            {"id": 1, "gives": [0]},
            {"id": 1, "fails": "words"},
            {"hello": {"cores": 1, "gpus": 0}},
        ),
        max_size=4,
    )
)
def test_messages_of_an_agent(messages: list[Any]) -> None:
    data = HELLO + b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    machine = RemoteMachine(
        "h", MessageConnection(io.BytesIO(data), io.BytesIO()), {}, lambda *a: None, lambda: ""
    )
    with only(Unreachable):
        machine.look()
    with only(Unreachable):
        machine.silent(["h:1"])
    machine.close()


class LocalMachine:
    """A machine that does nothing."""

    cores, gpus, name = 1, 0, "h"

    def start(self, orders: Any) -> None:
        pass

    prepare = start

    def reserve(self, count: int) -> list[str]:
        return ["h:1"] * min(count, 3)

    def silent(self, addresses: Any) -> list[int]:
        return []

    def stacks(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        pass

    kill = stop

    def look(self) -> list[WorkerStatus]:
        return []


ORDER = {
    **{name: 0 for name in agent._NUMBERS},
    "addresses": ["h:1"],
    "run_id": "r",
    "saved": {"/f": 1},
}


@fuzzed
@given(
    order=like(
        {"do": "start", "id": 1, "with": [[ORDER]]},
        {"do": "prepare", "id": 1, "with": [[ORDER]]},
        {"do": "reserve", "id": 1, "with": [2]},
        {"do": "silent", "id": 1, "with": [["h:1"]]},
        {"do": "stacks", "id": 1},
        {"do": "stop"},
    ).filter(lambda value: isinstance(value, dict))
)
def test_orders_of_a_launcher(order: dict[str, Any]) -> None:
    said = io.BytesIO()
    obeying: Any = LocalMachine()
    obeyed = Agent(MessageConnection(io.BytesIO(), said), obeying, Path("/nowhere"))
    assert obeyed._obey(order)
    answer = json.loads(said.getvalue())
    assert ("gives" in answer) != ("fails" in answer)


CONFIG = agent.sent_config(LaunchConfig(program=("x",), module=True))
BEGIN = {"name": "h", "run_id": "r", "folder": "/nowhere", "env": {"A": "b"}, "config": CONFIG}


@fuzzed
@given(first=like({"begin": BEGIN}, {"ended": 3}, {"fails": "words"}))
def test_the_first_message_to_an_agent(first: Any) -> None:
    """The folder does not exist, so a valid message starts nothing."""
    hypothesis.assume(
        not isinstance(first, dict) or "/nowhere" in str(first) or "begin" not in first
    )
    first = first if isinstance(first, dict) else {}
    said = io.BytesIO()
    with only(ConfigError):
        code = agent.serve(MessageConnection(io.BytesIO(), said), None, {}, first)
        assert code is None or type(code) is int
    assert said.getvalue() == b"" or "fails" in json.loads(said.getvalue())


@settings(fuzzed, max_examples=60)
@given(st.binary(max_size=80))
def test_callers_of_a_worker(data: bytes) -> None:
    """A caller that sends anything but the handshake is not accepted as a worker."""
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(connect_workers(listener, 0, [place, place], b"key", timeout_s=0.3))
        except ChannelError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with contextlib.suppress(OSError), socket.create_connection(place) as caller:
        caller.sendall(data)
        caller.shutdown(socket.SHUT_WR)
        waiting.join(10)
    waiting.join(10)
    assert isinstance(found[0], ChannelError)


# Parsers of the environment and of small files.


TF_CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:2", "[::1]:3"]},
    "task": {"type": "worker", "index": 0},
}


@fuzzed
@given(like(TF_CONFIG).map(json.dumps) | st.text(max_size=60) | st.just(NESTED))
def test_tf_config(text: str) -> None:
    with only(ClusterError):
        cluster = Cluster.from_tf_config(text)
        assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster


@fuzzed
@given(st.text(max_size=40) | st.text("h1:,[]-. ", max_size=20))
def test_hosts(text: str) -> None:
    with only(ConfigError):
        for host in parse_hosts(text):
            assert not host.name.startswith("-")
            assert host.slots is None or host.slots > 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


@fuzzed
@given(data=damaged(b"h1 slots=2\n# words\n[::1] slots=1\nh3\n"))
def test_hostfiles(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with only(ConfigError):
        assert read_hostfile(file)


@fuzzed
@given(data=damaged(b"0123456789abcdef0123456789abcdef\n"))
def test_files_of_a_secret(file: Path, data: bytes) -> None:
    file.touch(0o600)
    file.write_bytes(data)
    with only(ConfigError):
        found = job_secret.secret_of({}, file)
        assert job_secret.LEAST <= len(found) <= job_secret.MOST


OWNER = json.dumps(
    {
        "run_id": "r",
        "attempt": 1,
        "host": "h",
        "since": "2026-01-01T00:00:00",
        "machine": "m",
        "pid": 2,
        "began": 3,
        "token": "t",
    }
)


@fuzzed
@given(data=damaged(OWNER.encode()) | like(json.loads(OWNER)).map(lambda v: json.dumps(v).encode()))
def test_records_of_an_owner(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    found = owner._read(file)
    assert found is None or isinstance(found, Owner)
    assert found is None or "\n" not in found.in_words()


@fuzzed
@given(data=damaged(b"              3 training                  1.500        0.500 0 -1 /f\n"))
def test_the_progress_of_a_worker(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    found = heartbeat.read_progress(file)
    assert found is None or type(found.step) is int


ERROR = {"message": "m", "type": "E", "traceback": "t", "rank": 0, "time_s": 1.0}


@fuzzed
@given(like(ERROR).map(json.dumps) | st.text(max_size=40) | st.just(NESTED))
def test_the_error_of_a_worker(file: Path, text: str) -> None:
    file.write_text(text, errors="surrogatepass")
    found = heartbeat.read_error(file)
    assert found is None or [type(value) for value in asdict(found).values()] == [
        type(value) for value in ERROR.values()
    ]


@fuzzed
@given(like(json.loads(FitConfig().to_json())).map(json.dumps) | st.just(NESTED))
def test_configurations(file: Path, text: str) -> None:
    file.write_text(text)
    with only(ConfigError):
        FitConfig(**read_config_file(str(file)))


FEATURES = {
    "features": {
        "image": {"type": "image", "shape": [8, 8, 3]},
        "bits": {"type": "raw", "shape": [2], "dtype": "float32"},
        "label": {"type": "int64", "shape": []},
        "w": {"type": "float32", "shape": []},
    },
    "x": ["image", "bits"],
    "y": "label",
    "weight": "w",
    "classes": 3,
}


@fuzzed
@given(like(FEATURES).map(lambda value: json.dumps(value).encode()) | st.just(NESTED.encode()))
def test_descriptions_of_records(data: bytes) -> None:
    with only(DataError):
        read_features("features.json", data)


# Parsers of data and checkpoints.


def bytes_of_npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros((4, 3), np.float32), y=np.arange(4))
    return out.getvalue()


@fuzzed
@given(data=damaged(bytes_of_npz()))
def test_npz_files(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with only(DataError):
        npz.load(str(file), 0)


def bytes_of_npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.zeros((4, 3), np.float32))
    return out.getvalue()


@fuzzed
@given(data=damaged(bytes_of_npy()))
def test_npy_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    np.save(tmp_path / "y.npy", np.arange(4))
    with only(DataError):
        npy.load(str(tmp_path), 0)


BACKUP = file_format.to_bytes(
    Record(3, {"weights": [np.ones(3, np.float32)], "names": {"a": (1, "b")}, "seed": None})
)


@fuzzed
@given(damaged(BACKUP))
def test_checkpoints(data: bytes) -> None:
    with only(DamagedCheckpointError):
        assert type(file_format.from_bytes(data).step) is int


def parts_of(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the description of a checkpoint, and the files of its arrays."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        head = json.loads(json.loads(archive.read("record.json"))["text"])
        return head, [archive.read(f"{number}.npy") for number in range(len(head["types"]))]


def sealed(head: Any, blobs: list[bytes]) -> bytes:
    """Returns a checkpoint with correct checksums and any description."""
    text, out = json.dumps(head), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        seal = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
        archive.writestr("record.json", json.dumps(seal))
        for number, blob in enumerate(blobs):
            archive.writestr(f"{number}.npy", blob)
    return out.getvalue()


@fuzzed
@given(like(parts_of(BACKUP)[0]), st.data())
def test_checkpoints_that_somebody_made(head: Any, data: st.DataObject) -> None:
    blobs = [data.draw(st.just(blob) | damaged(blob)) for blob in parts_of(BACKUP)[1]]
    if isinstance(head, dict) and isinstance(head.get("sha256"), list):
        head["sha256"] = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    with only(DamagedCheckpointError):
        assert type(file_format.from_bytes(sealed(head, blobs)).step) is int


def test_records_are_found(tmp_path: Path) -> None:
    assert len(index_of(str(write_records(tmp_path / "r", [b"a", b"bc"])))) == 2


@fuzzed
@given(data=st.data())
def test_tfrecord_files(tmp_path: Path, data: st.DataObject) -> None:
    whole = write_records(tmp_path / "whole", [b"x" * 20, b"y" * 5]).read_bytes()
    path = tmp_path / "r"
    path.write_bytes(data.draw(damaged(whole)))
    (tmp_path / ".r.tfmulti-index.npy").unlink(missing_ok=True)
    with only(DataError):
        assert index_of(str(path), {"TFMULTI_CACHE": str(tmp_path)}).shape[1:] == (2,)


@fuzzed
@given(data=st.data())
def test_kept_indices_of_records(tmp_path: Path, data: st.DataObject) -> None:
    """An index that does not fit its file is made again, whatever its content."""
    path = write_records(tmp_path / "r", [b"x" * 20, b"y" * 5])
    kept = tmp_path / ".r.tfmulti-index.npy"
    kept.unlink(missing_ok=True)
    expected = index_of(str(path), {"TFMULTI_CACHE": str(tmp_path)})
    kept.write_bytes(data.draw(damaged(kept.read_bytes())))
    np.testing.assert_array_equal(index_of(str(path), {"TFMULTI_CACHE": str(tmp_path)}), expected)


FORM = {"n": Feature("int64", (2,), "int64"), "raw": Feature("raw", (1,), "float32")}


@fuzzed
@given(st.data())
def test_examples_of_records(data: st.DataObject) -> None:
    whole = tf.train.Example()
    whole.features.feature["n"].int64_list.value.extend([1, 2])
    whole.features.feature["raw"].bytes_list.value.append(struct.pack("<f", 1.0))
    out = {"n": np.zeros((1, 2), np.int64), "raw": np.zeros((1, 1), np.float32)}
    with only(DataError):
        parse_numbers_into([data.draw(damaged(whole.SerializeToString()))], FORM, out)


CSV = b'a,b\n1,2\n"x,\n""y""",\n,3\n'


@fuzzed
@given(damaged(CSV), st.booleans())
def test_csv_files(data: bytes, packed: bool) -> None:
    with only(ValueError, OSError):
        read_csv(data, packed)


def bytes_of_parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2, 3], "b": ["x", "y", "z"]}), out)
    return out.getvalue()


@fuzzed
@given(damaged(bytes_of_parquet()))
def test_parquet_files(data: bytes) -> None:
    with only(ValueError, OSError):
        read_parquet(data)
