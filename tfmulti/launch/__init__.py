"""The launcher: starts a job's workers, watches them, and starts them again after a fault.

`config.LaunchConfig` says what to start, and `run(config)` does it (`supervisor`): attempt after
attempt, until the job is done or `policy` says stop. `host_manager` keeps the machines that can be
used, `membership` chooses those of the next attempt, `worker_group` is the attempt's workers on all
machines, and `watch` looks after them. A machine is `machine.LocalMachine`, or
`remote_machine.RemoteMachine`, whose `agent` does the same work at the other end of an SSH or TCP
connection (`connect`). `shim` runs a worker's program, `guard` ends the workers when the launcher
dies, and `heartbeat` is what a worker tells the launcher.

The package uses the standard library alone.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the launcher when it is first used: a worker needs its heartbeat alone."""
    if name != "run":
        raise AttributeError(f"module 'tfmulti.launch' has no attribute {name!r}")
    from tfmulti.launch.supervisor import run

    return run
