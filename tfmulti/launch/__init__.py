"""Starts the workers of a job, watches them, and starts them again after a fault.

1. `flags` turns the command line into a `LaunchConfig`. `supervisor.run` makes attempts to run
   that job, until it is done or `policy` stops it.
2. Before each attempt, `HostManager` finds the machines, and `membership` chooses among them.
3. A `WorkerGroup` starts the workers of the attempt through a `Machine` for each host.
   `LocalMachine` starts them as child processes. `RemoteMachine` asks the `Agent` on the other
   machine, over SSH or TCP (`connect`), and the agent has a `LocalMachine` of its own.
4. Each worker process runs `shim`, which runs the user's program. The program reports its step
   through `heartbeat`, and `shim` writes error.json if the program fails.
5. `Watch` reads these reports until all workers have ended or one has failed. Then `policy` decides
   whether the supervisor makes another attempt.
6. `supervisor.report` prints which worker has failed. The words come from `Watch` and from
   `policy.describe_exit`.

On each machine a `Guard` process ends the workers if the launcher or the agent dies. The package
needs nothing but the standard library, so that the launcher starts fast.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the launcher at the first use of `run`, because a worker needs only the heartbeat."""
    if name != "run":
        raise AttributeError(f"module 'tfmulti.launch' has no attribute {name!r}")
    from tfmulti.launch.supervisor import run

    return run
