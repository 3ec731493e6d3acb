"""Measures how long a job of two workers stops when one is killed, beside torchrun.

    python -m benchmarks.recovery [--rounds 3] [--torch PYTHON_WITH_TORCH]

The command kills worker 1 while a small network trains, with the sides in turns. It writes the
medians to benchmarks/results/recovery.json: the seconds from the signal to the first step that ends
in the restarted job, and the steps that are trained again. The side of PyTorch needs its CPU build,
and is left out without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "recovery.json"
STEPS, EVERY, KILL_AFTER_S, LIMIT_S = 3000, 20, 8.0, 90.0


def commands(torch: str | None) -> dict[str, list[str]]:
    """Returns each side's command, without its arguments."""
    peers = ROOT / "benchmarks" / "peers"
    launch = [sys.executable, "-m", "tfmulti.launch", "--nproc-per-node", "2"]
    sides = {
        "tfmulti": [*launch, str(peers / "recovery_tfmulti.py")],
        "tfmulti --no-standby": [*launch, "--no-standby", str(peers / "recovery_tfmulti.py")],
    }
    if torch:
        run = [torch, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sides["torchrun"] = [
            *run,
            "--standalone",
            "--max-restarts",
            "3",
            str(peers / "recovery_torch.py"),
        ]
    return sides


def finished_steps(folder: Path) -> list[tuple[int, float]]:
    """Returns the steps that worker 0 has finished, with their times."""
    lines = (folder / "steps-0").read_text().splitlines() if (folder / "steps-0").exists() else []
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines if " " in line]


class Stuck(Exception):
    """Raised if a job does not continue in time. The message is the end of its output."""


def one_round(command: list[str]) -> tuple[float, int]:
    """Returns the seconds until training continues after a kill, and the steps done twice.

    Raises:
        Stuck: training does not continue.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOO_SOCKET_IFNAME": "lo"}
        env = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
        argv = [*command, str(folder), str(STEPS), str(EVERY)]
        with open(folder / "output", "wb") as output:
            job = subprocess.Popen(
                argv, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
            )
        try:
            wait_for(lambda: len(finished_steps(folder)) > EVERY, job, folder)
            # The standby processes are ready by then.
            time.sleep(KILL_AFTER_S)
            killed_s = time.monotonic()
            os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
            time.sleep(0.3)
            before = [step for step, ended_s in finished_steps(folder) if ended_s <= killed_s + 0.3]
            wait_for(lambda: finished_steps(folder)[-1][1] > killed_s + 0.3, job, folder)
            first = next(entry for entry in finished_steps(folder) if entry[1] > killed_s + 0.3)
            return first[1] - killed_s, before[-1] - first[0] + 1
        finally:
            job.send_signal(signal.SIGTERM)
            try:
                job.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)


def wait_for(happened: object, job: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    assert callable(happened)
    while not happened():
        if time.monotonic() > deadline or job.poll() is not None:
            raise Stuck((folder / "output").read_text()[-3000:])
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch", help="a Python that has PyTorch")
    args = parser.parse_args()
    rounds_of: dict[str, list[tuple[float, int]]] = {}
    for number in range(args.rounds):
        for name, command in commands(args.torch).items():
            head = f"round {number + 1}  {name:<22}"
            rounds_of.setdefault(name, [])
            try:
                seconds, lost = one_round(command)
            except Stuck as stuck:
                print(f"{stuck}\n{head} did not go on within {LIMIT_S:g} s", flush=True)
                continue
            rounds_of[name].append((seconds, lost))
            print(f"{head} {seconds:6.2f} s, {lost} steps again", flush=True)
    results = {
        "machine": f"{os.cpu_count()} cores, no GPU, {platform.machine()}",
        "a checkpoint every": f"{EVERY} steps",
        "sides": {
            name: {
                "seconds": round(statistics.median(s for s, _ in rounds), 2),
                "steps_again": statistics.median(n for _, n in rounds),
                "rounds": len(rounds),
                "rounds that did not go on": args.rounds - len(rounds),
            }
            for name, rounds in rounds_of.items()
            if rounds
        },
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
