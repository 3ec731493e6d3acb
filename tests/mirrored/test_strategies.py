"""What make_strategy gives, and what it says where a process cannot have it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.processes import run

HEAD = """
import tensorflow as tf
from tfmulti import make_strategy
from tfmulti.strategies import device_names, placement_of
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
