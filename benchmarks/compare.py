"""Measures the milliseconds of a step of four networks, with tfmulti and its peers.

    python -m benchmarks.compare [--rounds 3] [--workloads mlp,cnn] [--kinds one,workers,mirrored]

Each side runs in its own processes, and the sides run in turns. A worker has one core, and
`mirrored` has two. The medians go to benchmarks/results/compare.json and to docs/performance.md.
The command needs the extra `benchmarks`. It prints the peers that are not installed, and leaves
them out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import result_files, training_table
from benchmarks.result_files import ROOT
from benchmarks.workloads import WORKLOADS

LIMIT_S = 300.0


@dataclass(frozen=True)
class Side:
    """A program under `peers/`, its arguments, and where it runs.

    `needs` is a package besides TensorFlow that the program imports. `workloads` are the workloads
    that it trains; without any, it trains all.
    """

    module: str
    kinds: tuple[str, ...]
    options: tuple[str, ...] = ()
    needs: str | None = None
    workloads: tuple[str, ...] = ()

    def runs(self, work: str, kind: str) -> bool:
        return kind in self.kinds and (not self.workloads or work in self.workloads)


SIDES = {
    "tfmulti": Side("training_tfmulti", ("one", "mirrored", "workers")),
    "tfmulti, float16 between workers": Side(
        "training_tfmulti", ("workers",), ("gradient_compression=float16",)
    ),
    "tfmulti, each its own batch statistics": Side(
        "training_tfmulti", ("workers",), ("sync_batch_norm=False",), workloads=("resnet20",)
    ),
    "Keras 3": Side("training_keras", ("one", "mirrored"), ("keras",)),
    "tf_keras": Side("training_keras", ("one", "workers"), ("tf_keras",), needs="tf_keras"),
    "tf_keras, ten steps a call": Side(
        "training_keras",
        ("workers",),
        ("tf_keras", "10"),
        needs="tf_keras",
        workloads=("mlp", "cnn"),
    ),
    "loop of TensorFlow's guide": Side("training_loop", ("one", "workers")),
    "PyTorch DDP": Side("training_torch", ("one", "workers"), needs="torch"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--kinds", default="one,workers,mirrored")
    parser.add_argument("--sides", default=";".join(SIDES), help="separated by semicolons")
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args(arguments)
    kinds, chosen = args.kinds.split(","), args.sides.split(";")
    for names, known in (
        (args.workloads.split(","), WORKLOADS),
        (kinds, training_table.PLACES),
        (chosen, SIDES),
    ):
        for name in names:
            if name not in known:
                parser.error(f"{name!r} is none of {', '.join(known)}")
    sides = [side for side in SIDES if side in chosen and _is_installed(side)]
    figures_of: dict[str, dict[str, dict[str, list[Any]]]] = {}
    medians: dict[str, Any] = {}
    for number in range(args.rounds):
        for work in args.workloads.split(","):
            for kind in kinds:
                for side in sides[:: -1 if number % 2 else 1]:
                    if SIDES[side].runs(work, kind):
                        figures = run(work, side, kind)
                        figures_of.setdefault(work, {}).setdefault(kind, {}).setdefault(side, [])
                        figures_of[work][kind][side].append(figures)
                        print(f"{number} {work:12} {kind:9} {side:30} {figures}", flush=True)
        medians = {
            work: {
                kind: {side: _medians(rounds) for side, rounds in of_sides.items()}
                for kind, of_sides in of_kinds.items()
            }
            for work, of_kinds in figures_of.items()
        }
        if not args.dry:
            # A round that fails later does not lose the rounds before it.
            _write(medians)
    _show(medians)
    return 0


def run(work: str, side: str, kind: str) -> dict[str, float]:
    """Returns the figures of one run of a side; with two workers, those of the slower one."""
    module, options = SIDES[side].module, SIDES[side].options
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", work, kind, *options]
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        processes = []
        for rank, (env, cores) in enumerate(_workers(kind)):
            out, err = (logs / f"out-{rank}").open("w"), (logs / f"err-{rank}").open("w")
            pinned = ["taskset", "-c", cores, *command]
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
            processes.append(
                subprocess.Popen(pinned, stdout=out, stderr=err, env=environment | env, cwd=ROOT)
            )
        until = time.monotonic() + LIMIT_S
        try:
            while None in (codes := [process.poll() for process in processes]):
                # The other processes would wait for the one that failed.
                if any(codes) or time.monotonic() > until:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        if any(code != 0 for code in codes):
            texts = [path.read_text()[-2000:] for path in sorted(logs.glob("err-*"))]
            raise RuntimeError(f"{' '.join(command)} failed: {' | '.join(texts)}")
        figures = [json.loads(path.read_text().splitlines()[-1]) for path in logs.glob("out-*")]
    return {name: round(max(worker[name] for worker in figures), 3) for name in figures[0]}


def _workers(kind: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yields the environment of each worker, and its cores."""
    if kind != "workers":
        yield {}, "0,1" if kind == "mirrored" else "0"
        return
    ports = [str(port) for port in free_ports(3)]
    for rank in range(2):
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:2]]}
        task = {"type": "worker", "index": rank}
        yield (
            {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": ports[2],
                "GLOO_SOCKET_IFNAME": "lo",
            },
            str(rank),
        )


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that no program uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


def _is_installed(side: str) -> bool:
    package = SIDES[side].needs
    if package is None or importlib.util.find_spec(package):
        return True
    print(f"left out: {side} ({package} is not installed)")
    return False


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the median of each figure, and the steps' milliseconds in each round."""
    medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    return medians | {"rounds_step_ms": [r["step_ms"] for r in rounds]}


def _show(medians: dict[str, Any]) -> None:
    for work, of_kinds in medians.items():
        for kind, sides in of_kinds.items():
            steps = ", ".join(f"{side} {figures['step_ms']:.1f}" for side, figures in sides.items())
            print(f"{work} {kind}: {steps} ms a step")


def _write(medians: dict[str, Any]) -> None:
    """Writes the medians beside earlier ones of other sides.

    Earlier results of another machine or of other versions are dropped.
    """
    environment = {"machine": _machine(), "versions": _versions()}
    before = result_files.read("compare")
    same = all(before.get(name) == value for name, value in environment.items())
    workloads = before["workloads"] if same else {}
    for work, of_kinds in medians.items():
        for kind, sides in of_kinds.items():
            workloads.setdefault(work, {}).setdefault(kind, {}).update(sides)
    result_files.write("compare", {**environment, "workloads": workloads})
    training_table.main()
    print("written benchmarks/results/compare.json")


def _machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    simd = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_bf16") if name in flags]
    return {"cpus": os.cpu_count(), "system": platform.platform(), "simd": simd, "device": "CPU"}


def _versions() -> dict[str, str]:
    names = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "torch")
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed} | {
        "python": platform.python_version()
    }


if __name__ == "__main__":
    sys.exit(main())
