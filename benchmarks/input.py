"""Measures how fast data is read, beside tf.data, Keras' PyDataset, PyTorch's DataLoader and grain.

    pip install '.[benchmarks]'
    python -m benchmarks.input [--rounds 3] [--only arrays,images]

The command makes arrays (60,000 of 28×28), 2,000 JPEG files of 256×256 in class folders, and the
same images in TFRecord files. Each side reads them in shuffled batches, with images resized to
224×224. The sides run in turns, each in a new process, and the medians go to
benchmarks/results/input.json.

The command measures the examples per second, the memory that reading adds (with worker processes),
and the time to the first batch, also if a run resumes at 90 % of an epoch. It also measures how
long it takes to end the reading. `decoding` only reads and decodes. `plan` is the time to plan a
step of 10^9 examples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks import result_files

SIDES = {
    "arrays": ["tfmulti", "tfdata", "pydataset", "torch", "grain"],
    "images": ["tfmulti", "tfdata", "pydataset", "torch", "grain", "decoding"],
    "tfrecord": ["tfmulti", "tfdata"],
}
NAMES = {
    "tfmulti": "tfmulti",
    "tfdata": "tf.data",
    "pydataset": "PyDataset",
    "torch": "DataLoader",
    "grain": "grain",
    "decoding": "decoding alone",
}


def memory_mb(pid: int) -> float:
    """Returns the memory of a process and its children; shared pages count in proportion."""
    total = 0.0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) / 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        # The process has ended.
        return total
    return total + sum(memory_mb(int(child)) for child in children)


def run(side: str, task: str, folder: str) -> dict[str, float]:
    """Returns what one side measures of one task, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.peers.input_{side}", task, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    over, peak = Event(), [0.0]

    def watch() -> None:
        while not over.wait(0.1):
            peak[0] = max(peak[0], memory_mb(process.pid))

    try:
        _until(process.stdout, "READY")
        before = memory_mb(process.pid)
        watcher = Thread(target=watch)
        watcher.start()
        _go_on(process)
        _until(process.stdout, "READ")
        over.set()
        watcher.join()
        _go_on(process)
        figures: dict[str, float] = json.loads(process.stdout.readline())
        process.wait(60)
    finally:
        over.set()
        process.kill()
        process.wait()
    return {**figures, "memory_mb": max(0.0, peak[0] - before)}


def _until(stream: Any, word: str) -> None:
    for line in stream:
        if line.strip() == word:
            return
    raise RuntimeError("a program has ended before it measured; run it alone to see why")


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def plan_us() -> float:
    """Returns the microseconds to plan a step of 256 out of 10^9 examples."""
    from tfmulti.data.batch_plan import BatchPlan

    plan = BatchPlan(10**9, 256, seed=1)
    for step in range(20):
        plan.examples_of(plan.part(step, 0, 1, 1))
    began = time.perf_counter()
    for step in range(1000):
        plan.examples_of(plan.part(step * 3907 % plan.steps_per_epoch, 0, 1, 1))
    return (time.perf_counter() - began) * 1e3


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    return {
        key: None if runs[0][key] is None else statistics.median(run[key] for run in runs)
        for key in runs[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(SIDES), help="tasks, with commas between")
    args = parser.parse_args()
    from benchmarks.input_data import make

    tasks = args.only.split(",")
    figures_of: dict[str, dict[str, list[dict[str, Any]]]] = {t: {} for t in tasks}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for task in tasks:
            for turn in range(args.rounds):
                sides = SIDES[task] if turn % 2 == 0 else SIDES[task][::-1]
                for side in sides:
                    figures = run(side, task, folder)
                    figures_of[task].setdefault(NAMES[side], []).append(figures)
                    print(task, NAMES[side], json.dumps(figures), flush=True)
    results = {
        "machine": result_files.MACHINE,
        "python": platform.python_version(),
        "rounds": args.rounds,
        "plan_us": plan_us(),
        "tasks": result_files.read("input").get("tasks", {})
        | {t: {n: medians(r) for n, r in sides.items()} for t, sides in figures_of.items()},
    }
    result_files.write("input", results)


if __name__ == "__main__":
    main()
