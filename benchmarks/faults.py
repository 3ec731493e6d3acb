"""Measures how soon faults of a job of two workers are noticed, and how soon training continues.

    python -m benchmarks.faults [--rounds 3] [--only WORDS]

The command trains a small network under the launcher and causes each fault. It writes the medians
to benchmarks/results/faults.json and to the table of docs/faults.md. The faults of networks need
root, iproute2 and an OpenSSH server; without these they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import result_files, table
from benchmarks.jobs import LIMIT_S, Job, running
from benchmarks.result_files import ROOT
from tests.support import networks

PAGE = ROOT / "docs" / "faults.md"
PROGRAM = ROOT / "benchmarks" / "peers" / "recovery_tfmulti.py"


@dataclass(frozen=True)
class Measured:
    """Seconds from a fault until it was noticed, and until the next step ended; None if neither."""

    noticed_s: float | None
    on_s: float | None = None


def command(*flags: str) -> list[str]:
    """Returns the command of a job under the launcher; by default it has two workers."""
    flags = flags or ("--nproc-per-node", "2")
    return [sys.executable, "-m", "tfmulti.launch", *flags, str(PROGRAM)]


def guard_of(job: Job) -> int | None:
    """Returns the launcher's guard: its child with the same command line or with its own module."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command_line = (entry / "cmdline").read_text()
            if parent == job.process.pid and (
                "tfmulti.launch\0--" in command_line or "tfmulti.launch.guard" in command_line
            ):
                return int(entry.name)
    return None


def a_worker_is_killed() -> Measured:
    with running(command()) as job:
        return of_worker(job, signal.SIGKILL, "worker 1 was killed by SIGKILL")


def a_worker_is_frozen() -> Measured:
    with running(command()) as job:
        return of_worker(job, signal.SIGSTOP, "worker 1 is frozen")


def of_worker(job: Job, number: int, text: str) -> Measured:
    fault_s = time.monotonic()
    os.kill(job.pid(1), number)
    noticed_s = job.says(text)
    # A step that had been computed may still end.
    return Measured(noticed_s - fault_s, job.step_after(noticed_s)[1] - fault_s)


def the_guard_is_killed() -> Measured:
    with running(command()) as job:
        guard = guard_of(job)
        assert guard is not None
        fault_s = time.monotonic()
        os.kill(guard, signal.SIGKILL)
        noticed_s = job.wait(lambda: guard_of(job) not in (None, guard))
        return Measured(noticed_s - fault_s, job.step_after(fault_s)[1] - fault_s)


def launcher_and_guard_are_killed() -> Measured:
    """The fault counts as noticed once no worker exists any more."""
    with running(command()) as job:
        workers = [job.pid(0), job.pid(1)]
        guard = guard_of(job)
        assert guard is not None
        fault_s = time.monotonic()
        for pid in (guard, job.process.pid):
            os.kill(pid, signal.SIGKILL)
        gone_s = job.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        return Measured(gone_s - fault_s)


def a_proxy_is_set() -> Measured:
    """The time from the start of the job to the end of its first step."""
    proxy = "http://127.0.0.1:9"
    with running(command(), {"http_proxy": proxy, "grpc_proxy": proxy}) as job:
        return Measured(None, job.steps()[0][1] - job.began_s)


def a_second_start_in_one_folder() -> Measured:
    """The fault counts as noticed once the second job has ended with exit code 2."""
    with running(command()) as job:
        fault_s = time.monotonic()
        second = Job(command(), job.folder)
        try:
            code = second.process.wait(LIMIT_S)
        finally:
            second.end()
        assert code == 2
        return Measured(time.monotonic() - fault_s, job.step_after(fault_s)[1] - fault_s)


def a_folder_of_a_dead_owner_elsewhere() -> Measured:
    """A machine has lost power, and the job starts on another one with the same folder."""
    with running(command()) as job:
        owner = job.folder / "checkpoints" / "owner.json"
        left = {**json.loads(owner.read_text()), "machine": "another one"}
        for rank in (0, 1):
            os.kill(job.pid(rank), signal.SIGKILL)
        job.process.kill()
        job.process.wait()
        owner.write_text(json.dumps(left))
        fault_s = time.monotonic()
        again = Job(command(), job.folder)
        try:
            return Measured(None, again.step_after(fault_s)[1] - fault_s)
        finally:
            again.end()


def a_machine_is_cut_off(*, chief: bool) -> Measured:
    """The launcher is on the first machine. The other one is cut off, with the chief or not."""
    with tempfile.TemporaryDirectory() as name, networks.hosts(2, Path(name)) as two:
        order = (2, 1) if chief else (1, 2)
        named = ",".join(f"{two.address(host)}:1" for host in order)
        flags = ["--hosts", named, "--nnodes", "1:2", "--ssh", two.ssh()]
        with running([*two.inside(1), *command(*flags)]) as job:
            fault_s = time.monotonic()
            two.cut_off(2)
            noticed_s = job.says("does not answer any more")
            return Measured(noticed_s - fault_s, job.step_after(noticed_s)[1] - fault_s)


FAULTS: dict[str, Callable[[], Measured]] = {
    "a worker is killed": a_worker_is_killed,
    "a worker is frozen (SIGSTOP)": a_worker_is_frozen,
    "the guard is killed": the_guard_is_killed,
    "launcher and guard are killed at once": launcher_and_guard_are_killed,
    "a job is started while a proxy is set": a_proxy_is_set,
    "a second start in one folder": a_second_start_in_one_folder,
    "a start in the folder of an owner on another machine that died": (
        a_folder_of_a_dead_owner_elsewhere
    ),
}
NETWORK_FAULTS: dict[str, Callable[[], Measured]] = {
    "a machine is cut off": lambda: a_machine_is_cut_off(chief=False),
    "the chief's machine is cut off": lambda: a_machine_is_cut_off(chief=True),
}


def lines_of(results: Mapping[str, Mapping[str, float | None]]) -> str:
    """Returns the table in Markdown."""
    lines = ["| fault | noticed after | a step ends after |", "|---|---|---|"]
    for name, seconds in results.items():
        figures = [
            "" if seconds[key] is None else f"{seconds[key]:.2f} s" for key in ("noticed_s", "on_s")
        ]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _median(seconds: Sequence[float | None]) -> float | None:
    """Returns the median of the known seconds; None without any."""
    known = [value for value in seconds if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="faults with these words in their names")
    args = parser.parse_args()
    faults, reason = dict(FAULTS), networks.why_not()
    if reason is None:
        faults |= NETWORK_FAULTS
    else:
        print(f"left out: {', '.join(NETWORK_FAULTS)}: {reason}")
    faults = {name: fault for name, fault in faults.items() if args.only in name}
    results_of: dict[str, list[Measured]] = {name: [] for name in faults}
    for number in range(args.rounds):
        for name, fault in faults.items():
            results_of[name].append(fault())
            print(f"round {number + 1}  {name:<64} {results_of[name][-1]}", flush=True)
    before = result_files.read("faults")["faults"] if args.only else {}
    results = before | {
        name: {
            key: _median([getattr(measured, key) for measured in rounds])
            for key in ("noticed_s", "on_s")
        }
        for name, rounds in results_of.items()
    }
    result_files.write("faults", {"machine": result_files.MACHINE, "faults": results})
    table.write("<!-- faults: begin -->", "<!-- faults: end -->", lines_of(results), PAGE)


if __name__ == "__main__":
    main()
