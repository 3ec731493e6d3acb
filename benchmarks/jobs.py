"""A job of two workers that trains a small network, for the measurements of faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.result_files import ROOT

STEPS, EVERY, READY_S, LIMIT_S = 3000, 20, 8.0, 90.0


class Job:
    """A job that writes its steps, process ids and checkpoints to a folder.

    Args:
        command: the command, to which the folder, STEPS and EVERY are added. A checkpoint is made
            every EVERY steps.
        folder: the folder.
        env: additional environment variables.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._output = folder / f"output-{time.monotonic_ns()}"
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        self.began_s = time.monotonic()
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*command, str(folder), str(STEPS), str(EVERY)],
                cwd=folder,
                env={**os.environ, **quiet, **(env or {})},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def steps(self) -> list[tuple[int, float]]:
        """Returns the steps that worker 0 has finished, with their times."""
        path = self.folder / "steps-0"
        lines = path.read_text().splitlines() if path.exists() else []
        pairs = (line.split() for line in lines if " " in line)
        return [(int(step), float(ended_s)) for step, ended_s in pairs]

    def pid(self, rank: int) -> int:
        """Returns the id of a worker's process."""
        return int((self.folder / f"pid-{rank}").read_text())

    def wait(self, happened: Callable[[], bool]) -> float:
        """Waits until a condition holds, and returns the time.

        Raises:
            TimeoutError: the condition does not hold in time. The message is the end of the output.
            RuntimeError: the job has ended before. The message is the same.
        """
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            # The job may have written the awaited line just before its end, so look once more.
            if self.process.poll() is not None and not happened():
                end = self._output.read_text()[-3000:]
                raise RuntimeError(f"the job has ended with {self.process.returncode}:\n{end}")
            if time.monotonic() > deadline:
                raise TimeoutError(self._output.read_text()[-3000:])
            time.sleep(0.005)
        return time.monotonic()

    def says(self, text: str) -> float:
        """Waits until the launcher has printed a text, and returns the time."""
        return self.wait(lambda: text in self._output.read_text())

    def step_after(self, after_s: float) -> tuple[int, float]:
        """Waits for the first step that ends after a time, and returns it with its time."""
        count = sum(ended_s <= after_s for _, ended_s in self.steps())
        self.wait(lambda: len(self.steps()) > count)
        return self.steps()[count]

    def end(self) -> None:
        """Ends the job."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def running(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """Starts a job, and yields it once it trains and its standby processes are ready."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        job = Job(command, Path(name), env)
        try:
            job.wait(lambda: len(job.steps()) > EVERY)
            time.sleep(READY_S)
            yield job
        finally:
            job.end()
