"""Tests every parser of messages and files: it accepts, or raises its documented error.

Each parser gets any bytes, and its own format with bytes changed, cut off or repeated. Parsers of
JSON also get any JSON, and their own messages with one value replaced. No parser takes more than
MOST_BYTES of memory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import inspect
import io
import json
import math
import re
import socket
import struct
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.callers import START_REQUEST, StubMachine
from tests.support.records import framed, write_features, write_records
from tfmulti import prepare
from tfmulti.cluster import job_secret
from tfmulti.cluster.allocation import allocated_hosts
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import ENVIRONMENTS, described
from tfmulti.cluster.messages import MessageConnection
from tfmulti.config import json_values
from tfmulti.config.fit_config import FitConfig, read_config_file
from tfmulti.data.formats import pixels
from tfmulti.data.formats.csv_tables import read_csv
from tfmulti.data.formats.examples import parse_numbers_into
from tfmulti.data.formats.features import Feature, read_features
from tfmulti.data.formats.gzip_faults import fault_of
from tfmulti.data.formats.parquet_tables import read_parquet
from tfmulti.data.formats.record_index import index_of
from tfmulti.data.sources import npy, npz, tfds, tfrecord
from tfmulti.data.sources.text import TextFiles
from tfmulti.distribution import connections
from tfmulti.distribution.transport.channel import Channel, ChannelError
from tfmulti.distribution.transport.rendezvous import connect_workers
from tfmulti.errors import ClusterError, ConfigError, DataError, ResumeError
from tfmulti.launch import agent, heartbeat
from tfmulti.launch.agent import Agent
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.heartbeat import HeartbeatRecord, WorkerFailure
from tfmulti.launch.hosts import discover, parse_hosts, read_hostfile
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.remote_machine import RemoteMachine
from tfmulti.launch.workers import WorkerStatus
from tfmulti.run import report_page
from tfmulti.run.report import FitReport
from tfmulti.training import watchdog
from tfmulti.training.checkpoint import file_format, owner
from tfmulti.training.checkpoint.callback_states import CallbackStates
from tfmulti.training.checkpoint.file_format import DamagedCheckpointError, Record
from tfmulti.training.checkpoint.owner import Owner
from tfmulti.training.checkpoint.resume import _of_known_form as of_known_form
from tfmulti.training.state import run_state
from tfmulti.training.verification.result import Verification

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
    # The process may give back other memory at the same time, so it is tried up to three times.
    for _ in range(3):
        with _memory() as taken:
            np.ones(MOST_BYTES, np.uint8)
        if taken() > MOST_BYTES / 2:
            break
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
    connection = MessageConnection(io.BytesIO(b"".join(lines)), io.BytesIO(), most_bytes=1000)
    while (message := connection.receive()) is not None:
        assert type(message) is dict


def test_a_line_of_deep_brackets() -> None:
    connection = MessageConnection(io.BytesIO(NESTED.encode() + b"\n"), io.BytesIO())
    assert connection.receive() == {}


HEARTBEAT = HeartbeatRecord(3, "training", 1.5, 0.5, False, 2, "/f")
STATUS = asdict(
    WorkerStatus(
        0, 4, 1, 5.0, HEARTBEAT, WorkerFailure("m", "E", "t", 0, 4.0), frozen=True, idle_since_s=2.0
    )
)


def test_a_worker_status_as_an_agent_sends_it() -> None:
    status = json_values.build(WorkerStatus, json.loads(json.dumps(STATUS)))
    assert asdict(status) == STATUS
    assert json_values.build(
        WorkerStatus, json.loads(json.dumps(asdict(WorkerStatus(1, 2))))
    ) == WorkerStatus(1, 2)


def test_what_is_no_number_is_refused() -> None:
    text = json.dumps({**STATUS, "ended_s": float("nan")})
    with pytest.raises(ValueError, match="ended_s is not a number"):
        json_values.build(WorkerStatus, json_values.parse(text))


@fuzzed
@given(like(STATUS))
def test_worker_statuses_from_an_agent(values: Any) -> None:
    try:
        status = json_values.build(WorkerStatus, values)
    except ValueError:
        return
    assert [type(value) for value in (status.rank, status.pid, status.frozen)] == [int, int, bool]
    assert status.heartbeat is None or [
        type(value) for value in asdict(status.heartbeat).values()
    ] == [type(value) for value in asdict(HEARTBEAT).values()]
    assert status.shifted(1.0).rank == status.rank


HELLO = b'{"hello": {"cores": 2, "gpus": 0}}\n'


@settings(fuzzed, max_examples=60)
@given(
    st.lists(
        like(
            {"line": [0, "stdout", "words"]},
            {"statuses": [STATUS], "now_s": 3.0},
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
        machine.statuses()
    with only(Unreachable):
        machine.silent(["h:1"])
    machine.close()


@fuzzed
@given(
    message=like(
        {"do": "start", "id": 1, "with": [[START_REQUEST]]},
        {"do": "prepare", "id": 1, "with": [[START_REQUEST]]},
        {"do": "reserve", "id": 1, "with": [2]},
        {"do": "silent", "id": 1, "with": [["h:1"]]},
        {"do": "stacks", "id": 1},
        {"do": "stop"},
    ).filter(lambda value: isinstance(value, dict))
)
def test_requests_of_a_launcher(message: dict[str, Any]) -> None:
    said = io.BytesIO()
    machine: Any = StubMachine()
    agent_of_test = Agent(MessageConnection(io.BytesIO(), said), machine, Path("/nowhere"))
    assert agent_of_test._handle(message)
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


ENVIRONMENT: dict[str, dict[str, str]] = {
    "tf_config": {"TF_CONFIG": json.dumps(TF_CONFIG)},
    "mpi": {
        **{f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")},
        **{f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")},
        "SLURM_JOB_NODELIST": "n[1-2]",
    },
    "slurm": {
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    },
    "lsf": {
        "LSB_JOBID": "9",
        "LSB_DJOB_RANKFILE": "/nowhere",
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_LOCAL_RANK": "0",
    },
    "volcano": {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "a,b"},
    "kubernetes": {
        "TFMULTI_SUBDOMAIN": "fit",
        "JOB_COMPLETION_INDEX": "1",
        "HOSTNAME": "t-1",
        "TFMULTI_WORKERS": "2",
    },
    "sagemaker": {"SM_HOSTS": '["algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
    "vertex": {
        "CLUSTER_SPEC": json.dumps(
            {
                "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:2"]},
                "task": {"type": "workerpool1", "index": 0},
            }
        )
    },
    "azureml": {
        "AZUREML_RUN_ID": "r",
        "AZUREML_NODE_COUNT": "2",
        "MASTER_ADDR": "10.0.0.4",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "NODE_RANK": "1",
    },
}
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "²", "１", "65536", "999999999", "9" * 5000, ""])
TEXTS = st.sampled_from(["a,b", "n[1-65536]", "65536(x65536)", "h\0,i", "h\n,i", "[::1]", NESTED])


@st.composite
def variables(draw: Callable[[Any], Any], names: list[str]) -> tuple[str, dict[str, str]]:
    """Returns an environment's name, and its variables with some of them changed or left out."""
    name = draw(st.sampled_from(names))
    env = dict(ENVIRONMENT[name])
    for variable in draw(st.lists(st.sampled_from(sorted(env)), min_size=1, max_size=3)):
        text = ENVIRONMENT[name][variable]
        is_json = text.startswith(("{", "["))
        changed = like(json.loads(text)).map(json.dumps) if is_json else NUMBERS
        env[variable] = draw(changed | NUMBERS | TEXTS | st.text(max_size=20))
        if draw(st.integers(0, 9)) == 0:
            del env[variable]
    return name, env


def test_the_environments_are_read() -> None:
    assert set(ENVIRONMENT) == set(ENVIRONMENTS)
    for name, env in ENVIRONMENT.items():
        if name != "lsf":
            found = described(env)
            assert found is not None
            assert found.name == name


@settings(fuzzed, max_examples=4 * TRIED)
@given(variables(sorted(ENVIRONMENT)))
def test_environments(case: tuple[str, dict[str, str]]) -> None:
    name, env = case
    with only(ClusterError):
        found = described(env)
        assert found is None or 0 <= found.job.rank < found.job.size <= 1 << 16
    with only(ClusterError):
        described(env, name)


@fuzzed
@given(data=damaged(b"login1\nc1\nc1\nc2\nc2\n") | st.just(b"h\0\nh2\n"))
def test_host_files_of_schedulers(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    env = {**ENVIRONMENT["lsf"], "LSB_DJOB_RANKFILE": str(file)}
    with only(ClusterError):
        assert described(env) is not None
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        with only(ClusterError):
            assert allocated_hosts({name: str(file)})


@fuzzed
@given(
    st.text(max_size=40)
    | st.text("h1:,[]-. ", max_size=20)
    | st.sampled_from(["h\0", "a\nb:1", "h\\x", "h:１", "h:" + "9" * 5000, "h\u2028", "h" * 300])
)
def test_hosts(text: str) -> None:
    with only(ConfigError):
        for host in parse_hosts(text):
            assert not host.name.startswith("-")
            assert host.name.isprintable()
            assert not set(host.name) & set(" \\/'\"$`")
            assert host.slots is None or 0 < host.slots <= 1 << 16


@settings(fuzzed, max_examples=40)
@given(data=damaged(b"h1:2\nh2\n[::1]:1\n") | st.just(b"h\\0:2\n"))
def test_answers_of_a_discovery_script(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with only(ConfigError):
        discover(f"cat {file}")


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
@given(like({"/f": 3}).map(json.dumps) | st.text(max_size=40) | st.just(NESTED))
def test_the_steps_that_earlier_attempts_have_saved(text: str) -> None:
    assert type(heartbeat.saved_before("/f", {heartbeat.SAVED: text})) is int


HANG = {"at": "f (x.py:3)", "pid": 3, "host": "h", "time": 1.5, "stacks": {"MainThread": ["f"]}}


@fuzzed
@given(data=damaged(json.dumps(HANG).encode()) | like(HANG).map(lambda v: json.dumps(v).encode()))
def test_the_file_of_a_worker_that_hangs(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    found = watchdog.read(file)
    assert found is None or (type(found["pid"]), type(found["time"])) == (int, float)
    assert found is None or f"{found['at']}{found['host']}".isprintable()


REPORT = FitReport(
    **{name: 2 for name in ("workers", "replicas", "global_batch_size", "per_replica_batch_size")},
    **{name: 4 for name in ("epochs", "steps", "examples", "parameters")},
    **{name: 0.5 for name in ("seconds", "examples_per_second", "waiting_share")},
    strategy="mirrored",
    why="two devices",
    devices=("CPU:0", "CPU:1"),
    metrics={"loss": math.nan},
    history={"loss": [0.5, math.nan]},
    weights_sha256="0" * 64,
    straggler={"cause": "data", "worker": 1, "address": "b:1", "slowdown": 2.0, "share": 0.5},
    verification=Verification(verdict="same"),
)


def test_a_report_as_it_was_written() -> None:
    again = FitReport.from_json(REPORT.to_json())
    assert repr(again) == repr(REPORT)
    assert repr(again.history) == repr(REPORT.history)


@fuzzed
@example(REPORT.to_json().replace('"cause": "data"', '"cause": "x"'))
@given(like(json.loads(REPORT.to_json())).map(json.dumps) | st.sampled_from(["[]", "3", NESTED]))
def test_reports(text: str) -> None:
    with only(ValueError):
        assert report_page.page(FitReport.from_json(text), "x")


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
        parse_numbers_into(FORM, [data.draw(damaged(whole.SerializeToString()))], out)


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


def encoded_images() -> list[bytes]:
    image = np.arange(12 * 10 * 3, dtype=np.uint8).reshape(12, 10, 3)
    return [cv2.imencode(kind, image)[1].tobytes() for kind in (".png", ".jpg", ".bmp", ".webp")]


@fuzzed
@given(damaged(*encoded_images()))
def test_images(data: bytes) -> None:
    try:
        pixels.limit_pixels(4)
        with only(DataError):
            pixels.decode_into(data, np.zeros((8, 8, 3), np.uint8))
    finally:
        pixels.limit_pixels(pixels.MEGAPIXELS)


@fuzzed
@given(data=damaged("words, ÄÖÜ and ∑\0\r\n".encode()))
def test_texts(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with only(DataError):
        texts, _ = TextFiles([str(file)], np.zeros(1, np.int32)).read(np.zeros(1, np.int64))
        assert isinstance(texts[0], (str, bytes))


CLASSES = "tensorflow_datasets.core.features"
PREPARED = {
    "features.json": {
        "pythonClassName": f"{CLASSES}.features_dict.FeaturesDict",
        "featuresDict": {
            "features": {
                "image": {
                    "pythonClassName": f"{CLASSES}.image_feature.Image",
                    "image": {"shape": {"dimensions": ["8", "8", "3"]}, "dtype": "uint8"},
                },
                "label": {
                    "pythonClassName": f"{CLASSES}.class_label_feature.ClassLabel",
                    "classLabel": {"numClasses": "4"},
                },
            }
        },
    },
    "dataset_info.json": {
        "name": "made",
        "version": "1.0.0",
        "fileFormat": "tfrecord",
        "splits": [
            {
                "name": "train",
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "shardLengths": ["2"],
                "numBytes": "20",
            }
        ],
        "supervisedKeys": {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}},
    },
}


def prepared(folder: Path, contents: dict[str, str]) -> str:
    """Writes a data set as tensorflow-datasets does, and returns the options that read it."""
    made = folder / "made" / "1.0.0"
    made.mkdir(parents=True, exist_ok=True)
    write_records(made / "made-train.tfrecord-00000-of-00001", [b"a", b"b"])
    for name, text in contents.items():
        (made / name).write_text(text)
    return f"made,data_dir={folder},size=8x8"


def test_a_prepared_data_set_is_read(tmp_path: Path) -> None:
    texts = {name: json.dumps(content) for name, content in PREPARED.items()}
    assert len(tfds.load(prepared(tmp_path, texts), 0).train) == 2


@fuzzed
@given(
    name=st.sampled_from(sorted(PREPARED)),
    data=st.data(),
    crafted=st.none() | st.sampled_from(["crafted.Class", "os.path", "antigravity.Class"]),
)
def test_prepared_data_sets(
    tmp_path: Path, name: str, data: st.DataObject, crafted: str | None
) -> None:
    texts = {each: json.dumps(content) for each, content in PREPARED.items()}
    texts[name] = data.draw(like(PREPARED[name]).map(json.dumps) | st.just(NESTED))
    if crafted is not None:
        names = re.findall(rf"{re.escape(CLASSES)}[.a-zA-Z_]+", texts["features.json"])
        if names:
            texts["features.json"] = texts["features.json"].replace(
                data.draw(st.sampled_from(names)), crafted, 1
            )
    with only(DataError, ConfigError):
        tfds.load(prepared(tmp_path, texts), 0)
    assert "antigravity" not in sys.modules


def bytes_of_example() -> bytes:
    example = tf.train.Example()
    example.features.feature["image"].bytes_list.value.append(encoded_images()[0])
    example.features.feature["label"].int64_list.value.append(1)
    return bytes(example.SerializeToString())


@settings(fuzzed, max_examples=15)
@example(data=gzip.compress(framed(b"\x80")))
@given(
    data=damaged(gzip.compress(framed(bytes_of_example()) * 2))
    | damaged(bytes_of_example()).map(lambda example: gzip.compress(framed(example)))
)
def test_streams_of_packed_records(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(data)
    write_features(tmp_path)
    try:
        pixels.limit_pixels(4)
        with only(DataError):
            data_set = tfrecord.load(f"{tmp_path}/a.gz", 0)
            if data_set.finish is None:
                return
            stream = data_set.finish(2).train
            try:
                assert sum(len(y) for _, y in stream) >= 0
            except (tf.errors.OpError, UnicodeDecodeError):
                assert "\n" not in (fault_of(stream) or "")
    finally:
        pixels.limit_pixels(pixels.MEGAPIXELS)


class Counts(keras.callbacks.Callback):
    """Has attributes of some types."""

    def __init__(self) -> None:
        super().__init__()
        self.path = "/f"
        self.count, self.best, self.status = 0, 1.5, ["a"]
        self.weights: Any = None


@fuzzed
@given(like({"count": 1, "best": 0.5, "seen": ["b"], "weights": [1.0], "path": "/g"}))
def test_states_of_callbacks_from_a_checkpoint(state: Any) -> None:
    callback = Counts()
    states = CallbackStates([callback])
    with only(ResumeError), of_known_form():
        states.restore({"Counts 1": state})
    assert callback.path == "/f"
    assert type(callback.count) in (int, float, type(None))


@pytest.fixture(scope="module")
def saved() -> tuple[Any, dict[str, Any]]:
    """Returns a model, and what a checkpoint holds of it."""
    model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("adam", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    untrained = run_state.capture(model)
    return model, {"model": untrained, "trained": run_state.capture_trained(model)}


@st.composite
def other_trees(draw: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a tree of a checkpoint with one part replaced or left out."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = draw(st.sampled_from(keys))
    inner = tree[key]
    found: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if isinstance(inner, (dict, list)) and inner and draw(st.integers(0, 3)):
        found[key] = draw(other_trees(inner))
    elif isinstance(tree, dict) and draw(st.booleans()):
        del found[key]
    else:
        arrays = [np.zeros(3, np.float32), np.zeros((4, 1), "S8"), np.array(None), np.zeros(0)]
        found[key] = draw(JSON | st.sampled_from(arrays))
    return found


@settings(fuzzed, max_examples=100)
@given(data=st.data())
def test_models_from_a_checkpoint(saved: tuple[Any, dict[str, Any]], data: st.DataObject) -> None:
    model, tree = saved
    changed = data.draw(other_trees(tree))
    with only(ResumeError), of_known_form():
        run_state.restore(model, changed["model"], changed["trained"])
    run_state.restore(model, tree["model"], tree["trained"])


@settings(fuzzed, max_examples=60)
@given(
    st.integers(0, 3),
    st.one_of(st.integers(0, 70), st.integers(0, 2**64 - 1)),
    st.binary(max_size=64),
)
def test_messages_on_the_workers_channel(key: int, length: int, data: bytes) -> None:
    """A header may tell any length, but memory is used only for the bytes that come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        own, _ = server.accept()
    own.setblocking(False)
    channel = Channel({1: own}, lambda: None)
    try:
        channel.send(1, [np.zeros(1, np.uint8)])
        other.sendall(struct.pack("<QQ", key, length) + data)
        other.shutdown(socket.SHUT_WR)
        [message] = channel.receive(1)
        assert (key, message.tobytes()) == (1, data[:length])
    except ChannelError:
        assert key != 1 or length > len(data)
    finally:
        channel.close()
        other.close()


@fuzzed
@given(st.binary(max_size=40))
def test_names_of_exchanges(data: bytes) -> None:
    message = np.frombuffer(data, np.uint8)
    try:
        assert connections._unnamed(message, "name", 1).tobytes() == data.removeprefix(b"name\0")
        assert data.startswith(b"name\0")
    except tf.errors.UnavailableError:
        assert not data.startswith(b"name\0")
