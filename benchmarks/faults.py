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
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import table
from tests.support import networks

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "faults.json"
PAGE = ROOT / "docs" / "faults.md"
PROGRAM = ROOT / "benchmarks" / "peers" / "recovery_tfmulti.py"
STEPS, EVERY, READY_S, LIMIT_S = 3000, 20, 8.0, 120.0


@dataclass(frozen=True)
class Measured:
    """Seconds from a fault until it was noticed, and until the next step ended; None if neither."""

    noticed_s: float | None
    on_s: float | None = None


class Job:
    """A job under the launcher that has made its first checkpoint. It is ended with the context."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._output = folder / f"output-{time.monotonic_ns()}"
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        flags = flags or ("--nproc-per-node", "2")
        launch = [*before, sys.executable, "-m", "tfmulti.launch", *flags]
        self.began_s = time.monotonic()
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*launch, str(PROGRAM), str(folder), str(STEPS), str(EVERY)],
                cwd=folder,
                env={**os.environ, **quiet, **(env or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def steps(self) -> list[float]:
        """Returns when the steps of worker 0 ended."""
        path = self.folder / "steps-0"
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line.split()[1]) for line in lines if " " in line]

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def begun(self) -> Job:
        """Returns this job once it trains and its standby processes are ready."""
        self.wait(lambda: len(self.steps()) > EVERY)
        time.sleep(READY_S)
        return self

    def wait(self, happened: Callable[[], bool]) -> float:
        """Waits until a condition holds, and returns the time."""
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(self._output.read_text()[-3000:])
            time.sleep(0.005)
        return time.monotonic()

    def says(self, text: str) -> float:
        """Waits until the launcher has printed a text, and returns the time."""
        return self.wait(lambda: text in self._output.read_text())

    def goes_on(self, after_s: float) -> float:
        """Returns when the first step of the restarted job ended."""
        count = sum(ended_s <= after_s for ended_s in self.steps())
        self.wait(lambda: len(self.steps()) > count)
        return self.steps()[count]

    def guard(self) -> int | None:
        """Returns the launcher's guard: its child with its command line, or one of its own."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command_line = (entry / "cmdline").read_text()
                if parent == self.process.pid and (
                    "tfmulti.launch\0--" in command_line or "tfmulti.launch.guard" in command_line
                ):
                    return int(entry.name)
        return None

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def job(
    *flags: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        begun = Job(Path(name), *flags, env=env, before=before)
        try:
            yield begun.begun()
        finally:
            begun.end()


def a_worker_is_killed() -> Measured:
    with job() as one:
        return of_worker(one, signal.SIGKILL, "worker 1 was killed by SIGKILL")


def a_worker_is_frozen() -> Measured:
    with job() as one:
        return of_worker(one, signal.SIGSTOP, "worker 1 is frozen")


def of_worker(one: Job, number: int, text: str) -> Measured:
    fault_s = time.monotonic()
    os.kill(one.pid(1), number)
    noticed_s = one.says(text)
    # A step that had been computed may still end.
    return Measured(noticed_s - fault_s, one.goes_on(noticed_s) - fault_s)


def the_guard_is_killed() -> Measured:
    with job() as one:
        guard = one.guard()
        assert guard is not None
        fault_s = time.monotonic()
        os.kill(guard, signal.SIGKILL)
        noticed_s = one.wait(lambda: one.guard() not in (None, guard))
        return Measured(noticed_s - fault_s, one.goes_on(fault_s) - fault_s)


def launcher_and_guard_are_killed() -> Measured:
    """The fault counts as noticed once no worker exists any more."""
    with job() as one:
        workers = [one.pid(0), one.pid(1)]
        guard = one.guard()
        assert guard is not None
        fault_s = time.monotonic()
        for pid in (guard, one.process.pid):
            os.kill(pid, signal.SIGKILL)
        gone_s = one.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        return Measured(gone_s - fault_s)


def a_proxy_is_set() -> Measured:
    """The time from the start of the job to the end of its first step."""
    proxy = "http://127.0.0.1:9"
    with job(env={"http_proxy": proxy, "grpc_proxy": proxy}) as one:
        return Measured(None, one.steps()[0] - one.began_s)


def a_second_start_in_one_folder() -> Measured:
    """The fault counts as noticed once the second job has ended with exit code 2."""
    with job() as one:
        fault_s = time.monotonic()
        second = Job(one.folder)
        try:
            code = second.process.wait(LIMIT_S)
        finally:
            second.end()
        assert code == 2
        return Measured(time.monotonic() - fault_s, one.goes_on(fault_s) - fault_s)


def a_folder_of_a_dead_owner_elsewhere() -> Measured:
    """A machine has lost power, and the job starts on another one with the same folder."""
    with job() as one:
        owner = one.folder / "checkpoints" / "owner.json"
        left = {**json.loads(owner.read_text()), "machine": "another one"}
        for rank in (0, 1):
            os.kill(one.pid(rank), signal.SIGKILL)
        one.process.kill()
        one.process.wait()
        owner.write_text(json.dumps(left))
        fault_s = time.monotonic()
        again = Job(one.folder)
        try:
            return Measured(None, again.goes_on(fault_s) - fault_s)
        finally:
            again.end()


def a_machine_is_cut_off(*, chief: bool) -> Measured:
    """The launcher is on the first machine. The other one is cut off, with the chief or not."""
    with tempfile.TemporaryDirectory() as name, networks.hosts(2, Path(name)) as two:
        order = (2, 1) if chief else (1, 2)
        named = ",".join(f"{two.address(host)}:1" for host in order)
        flags = ["--hosts", named, "--nnodes", "1:2", "--ssh", two.ssh()]
        with job(*flags, before=two.inside(1)) as one:
            fault_s = time.monotonic()
            two.cut_off(2)
            noticed_s = one.says("does not answer any more")
            return Measured(noticed_s - fault_s, one.goes_on(noticed_s) - fault_s)


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
    known = [each for each in seconds if each is not None]
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
    measured: dict[str, list[Measured]] = {name: [] for name in faults}
    for number in range(args.rounds):
        for name, fault in faults.items():
            measured[name].append(fault())
            print(f"round {number + 1}  {name:<64} {measured[name][-1]}", flush=True)
    before = json.loads(RESULTS.read_text())["faults"] if args.only else {}
    results = before | {
        name: {key: _median([getattr(one, key) for one in rounds]) for key in ("noticed_s", "on_s")}
        for name, rounds in measured.items()
    }
    machine = f"{os.cpu_count()} cores, no GPU, {platform.machine()}"
    RESULTS.write_text(json.dumps({"machine": machine, "faults": results}, indent=1) + "\n")
    table.write("<!-- faults: begin -->", "<!-- faults: end -->", lines_of(results), PAGE)


if __name__ == "__main__":
    main()
