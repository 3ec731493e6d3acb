"""Tests the result of `make_strategy`, and its errors."""

from __future__ import annotations

import signal
import socket
import textwrap
from pathlib import Path

import pytest

from tests.support.forked import run
from tests.support.processes import tf_config
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.distribution.strategies import threads_of
from tfmulti.launch.addresses import reserved

pytestmark = pytest.mark.mirrored

HEAD = """
import tensorflow as tf
from tfmulti import make_strategy
from tfmulti.distribution.strategies import device_names, placement_of
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            """
            one = make_strategy("auto", env={})
            print(type(one).__name__, device_names(one), placement_of(one))
            """,
            "OneDeviceStrategy ('CPU:0',) Placement(rank=0, workers=1, local_replicas=1)",
        ),
        (
            """
            two = make_strategy("mirrored", replicas=2, env={})
            print(two is make_strategy("auto", replicas=2, env={}), device_names(two))
            """,
            "True ('CPU:0', 'CPU:1')",
        ),
        (
            """
            make_strategy("mirrored", replicas=2, env={})
            make_strategy("mirrored", replicas=1, env={})
            """,
            "DeviceError: a mirrored strategy over 1 devices was asked for, but this process made",
        ),
        (
            """
            tf.constant(1)
            make_strategy("mirrored", replicas=3, env={})
            """,
            "DeviceError: 3 logical CPU devices are needed, but TensorFlow has started with 1.",
        ),
        (
            """
            tf.constant(1)
            config = '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker"}}'
            make_strategy("auto", env={"TF_CONFIG": config})
            """,
            "DeviceError: multi_worker_mirrored cannot start: ",
        ),
    ],
)
def test_make_strategy(tmp_path: Path, code: str, expected: str) -> None:
    done = run(["-c", HEAD + textwrap.dedent(code)], tmp_path, limit_s=60)
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "code", "start"),
    [
        (["-c", HEAD + "make_strategy()"], 1, "tfmulti.errors.ClusterError"),
        (["-m", "tfmulti.fit"], 2, "tfmulti"),
    ],
    ids=["script", "command"],
)
def test_a_port_that_another_program_uses_is_named(
    tmp_path: Path, argv: list[str], code: int, start: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        env = {"TF_CONFIG": tf_config([address, "127.0.0.1:1"], 0)}
        done = run(argv, tmp_path, env=env, cwd=here, limit_s=60)
    assert done.returncode == code
    line = done.stderr.strip().rpartition("\n")[2]
    assert line.startswith(f"{start}: this worker cannot listen at {address}: ")
    assert "Is the port in use, or the address another machine's? End the program" in line
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("workers", "allowed", "cores", "threads"),
    [
        (["a:1", "a:2"], 8, 8, 4),
        (["a:1", "a:2", "a:3"], 2, 2, 1),
        # Each worker has its own machine.
        (["a:1", "b:1"], 8, 8, None),
        (["a:1", "b:1", "a:2"], 9, 9, 4),
        # Each worker may use only 4 of 8 cores, so somebody has divided the cores already.
        (["a:1", "a:2"], 4, 8, None),
        (["[::1]:1", "[::1]:2"], 8, 8, 4),
    ],
)
def test_workers_of_one_host_share_its_cores(
    workers: list[str], allowed: int, cores: int, threads: int | None
) -> None:
    assert threads_of(Cluster(tuple(workers), Task("worker", 0)), allowed, cores) == threads


def test_a_given_number_of_threads_is_kept(tmp_path: Path) -> None:
    code = """
    from tfmulti.cluster.cluster import Cluster, Task
    from tfmulti.distribution.strategies import _share_cores
    tf.config.threading.set_inter_op_parallelism_threads(7)
    _share_cores(Cluster(("a:1", "a:2"), Task("worker", 0)))
    threads = tf.config.threading
    print(threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads())
    """
    command = ["-c", HEAD + textwrap.dedent(code)]
    done = run(command, tmp_path, limit_s=60, env={"TF_NUM_INTRAOP_THREADS": "5"})
    assert "0 7" in done.stdout


SIGNALLED = """
import os, signal, time
from tfmulti import make_strategy
config = '{"cluster": {"worker": ["%s"]}, "task": {"type": "worker"}}'
make_strategy("auto", env={"TF_CONFIG": config})
print("made", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
print("lives")
"""


def test_sigterm_between_the_strategy_and_the_training_is_not_lost(tmp_path: Path) -> None:
    """TensorFlow's own handler would ignore the signal."""
    with reserved(1) as (address,):
        done = run(["-c", SIGNALLED % address], tmp_path, limit_s=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "made\n")
