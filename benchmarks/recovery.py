"""Measures how long a job of two workers stops when one is killed, beside torchrun.

    python -m benchmarks.recovery [--rounds 3] [--torch PYTHON_WITH_TORCH]

The command kills worker 1 while a small network trains, with the sides in turns. It writes the
medians to benchmarks/results/recovery.json: the seconds from the signal to the first step that ends
in the restarted job, and the steps that are trained again. The side of PyTorch needs its CPU build,
and is left out without it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time

from benchmarks import result_files
from benchmarks.jobs import EVERY, LIMIT_S, running
from benchmarks.result_files import ROOT


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


def one_round(command: list[str]) -> tuple[float, int]:
    """Returns the seconds until training continues after a kill, and the steps done twice.

    Raises:
        TimeoutError: training does not continue.
    """
    with running(command) as job:
        killed_s = time.monotonic()
        os.kill(job.pid(1), signal.SIGKILL)
        # A step that had been computed may still end.
        time.sleep(0.3)
        last, _ = [step for step in job.steps() if step[1] <= killed_s + 0.3][-1]
        first, ended_s = job.step_after(killed_s + 0.3)
        return ended_s - killed_s, last - first + 1


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
            except TimeoutError as error:
                print(f"{error}\n{head} did not go on within {LIMIT_S:g} s", flush=True)
                continue
            rounds_of[name].append((seconds, lost))
            print(f"{head} {seconds:6.2f} s, {lost} steps again", flush=True)
    results = {
        "machine": result_files.MACHINE,
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
    result_files.write("recovery", results)


if __name__ == "__main__":
    main()
