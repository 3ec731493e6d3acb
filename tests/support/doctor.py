"""The doctor on several hosts of this machine, and the faults that its tests make."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.networks import Hosts
from tests.support.processes import Finished, processes, slowed, tf_config

PORT = 29400
SECRET = "known to all workers"


@dataclass
class Worker:
    """How a worker is started, apart from the others."""

    index: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    python: str | None = None
    starts: bool = True
    is_slowed: bool = False


def examine(
    hosts: Hosts,
    folder: Path,
    *flags: str,
    workers: Mapping[int, Worker] | None = None,
    addresses: Sequence[str] = (),
    limit_s: float = 60,
    env: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Runs the doctor with one worker on each host, and returns what each has left by rank.

    Args:
        hosts: the hosts; the worker of rank 0 is on host 1.
        folder: a folder for the logs.
        *flags: the flags of all workers.
        workers: how the workers of some ranks differ.
        addresses: the `host:port` of each worker. None given: the numbers of the hosts.
        limit_s: the time limit.
        env: more environment variables of all workers.
    """
    named = addresses or [f"{hosts.address(host)}:{PORT}" for host in range(1, hosts.count + 1)]
    with processes(folder / "logs") as group, contextlib.ExitStack() as slow:
        for rank in range(len(named)):
            worker = (workers or {}).get(rank, Worker())
            if not worker.starts:
                continue
            index = rank if worker.index is None else worker.index
            process = group.start(
                ["-m", "tfmulti.doctor", "--json", *flags],
                {
                    "TF_CONFIG": tf_config(named, index),
                    "TFMULTI_SECRET": SECRET,
                    **(env or {}),
                    **worker.env,
                },
                before=[*hosts.inside(rank + 1), *worker.before],
                **({} if worker.python is None else {"python": worker.python}),
            )
            if worker.is_slowed:
                slow.enter_context(slowed(process))
        return group.wait(limit_s)


def report_of(done: Finished) -> dict[str, Any]:
    """Returns the report that the chief has printed."""
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wrong(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the findings that are not ok, without those that are the same in all of these tests.

    The load depends on other tests, and TensorFlow's ports are open to all machines of a network.
    """
    left_out = ("cores", "memory", "gRPC ports")
    return [f for f in report["findings"] if f["status"] != "ok" and f["check"] not in left_out]


def on(hosts: Hosts, host: int, *command: str) -> None:
    """Runs a command in the network of a host."""
    subprocess.run([*hosts.inside(host), *command], check=True, capture_output=True)
