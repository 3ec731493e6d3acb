"""Compares the losses of training with compressed gradients and of exact training.

    python -m benchmarks.curves [--seeds 3] [--epochs 8] [--only SIDE]

The command trains the digits' CNN on two workers, with each flag and from the same seeds. It writes
the losses and accuracies of each epoch to benchmarks/results/curves.json, docs/curves.png and
docs/slow-networks.md. A difference from exact training counts only if it is larger than the
differences between the seeds of exact training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import result_files
from benchmarks.result_files import ROOT
from benchmarks.table import write

PAGE, PICTURE = ROOT / "docs" / "slow-networks.md", ROOT / "docs" / "curves.png"
SIDES: dict[str, list[str]] = {
    "exact": [],
    "float16": ["--gradient_compression", "float16"],
    "bfloat16": ["--gradient_compression", "bfloat16"],
}
BATCH, STEPS_PER_EPOCH = 32, 100
WORKLOAD = ["--dataset", "digits", "--model", "cnn", "--global_batch_size", str(BATCH)]
WORKLOAD += ["--steps_per_epoch", str(STEPS_PER_EPOCH), "--steps_per_execution", "20"]
BEGIN, END = "<!-- curves: begin -->", "<!-- curves: end -->"
KEPT = ("loss", "accuracy", "val_loss", "val_accuracy")


def train(flags: list[str], seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Returns the history and the final metrics of one run of two workers."""
    run_dir = folder / f"{'_'.join(flags)}-{seed}"
    argv = [sys.executable, "-m", "tfmulti.launch", "--nproc-per-node", "2", "--no-standby"]
    argv += ["--log-dir", str(folder / "logs"), "-m", "tfmulti.fit", *WORKLOAD, *flags]
    argv += ["--seed", str(seed), "--epochs", str(epochs), "--run_dir", str(run_dir)]
    env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, timeout=900)
    report = json.loads((run_dir / "report.json").read_text())
    print(f"{' '.join(flags) or 'exact'}, seed {seed}: {report['metrics']}", file=sys.stderr)
    history = {name: [round(v, 6) for v in report["history"][name]] for name in KEPT}
    test = {name: v for name, v in report["metrics"].items() if name.startswith("test_")}
    return {"seed": seed, "parameters": report["parameters"], **history, **test}


def final(runs: list[dict[str, Any]], name: str) -> float:
    """Returns the mean over the seeds of a metric of the last epoch."""
    return statistics.fmean(run[name][-1] for run in runs)


def sent_kb(side: str, parameters: int) -> float:
    """Returns the KB of gradients that each of two workers sends in a step."""
    return parameters * (2 if "--gradient_compression" in SIDES[side] else 4) / 1000


def table(sides: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the table of docs/slow-networks.md: the last epoch, means of the seeds."""
    heads = ["", "training loss", "from exact", "validation loss", "validation accuracy"]
    heads += ["test accuracy", "sent a step"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    exact = final(sides["exact"], "loss")
    for side, runs in sides.items():
        loss = final(runs, "loss")
        cells = [
            f"`{' '.join(SIDES[side])}`" if SIDES[side] else "exact",
            f"{loss:.4f}",
            "" if side == "exact" else f"{loss - exact:+.4f}",
            f"{final(runs, 'val_loss'):.4f}",
            f"{final(runs, 'val_accuracy'):.4f}",
            f"{statistics.fmean(run['test_accuracy'] for run in runs):.4f}",
            f"{sent_kb(side, runs[0]['parameters']):.0f} KB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    losses = [run["loss"][-1] for run in sides["exact"]]
    spread = f"{min(losses):.4f} to {max(losses):.4f}"
    count, epochs = len(losses), len(sides["exact"][0]["loss"])
    return (
        f"The digits' CNN, two workers, {epochs} epochs of {STEPS_PER_EPOCH} steps of {BATCH} "
        f"rows, means of {count} seeds; exact training's loss is {spread}, by seed "
        "(`python -m benchmarks.curves`).\n\n" + "\n".join(lines)
    )


def draw(sides: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws training loss and validation loss by epoch: the seeds' mean, and all between them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = {"loss": "training loss", "val_loss": "validation loss"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for number, (side, runs) in enumerate(sides.items()):
            values = np.array([run[name] for run in runs])
            epochs = np.arange(1, values.shape[1] + 1)
            style = {"color": f"C{number}", "zorder": 3 - 0.1 * number}
            dashes = "--" if "--gradient_compression" in SIDES[side] else "-"
            axis.plot(epochs, values.mean(0), dashes, label=side, **style)
            axis.fill_between(epochs, values.min(0), values.max(0), alpha=0.12, lw=0, **style)
        axis.set(title=title, xlabel=f"epoch of {STEPS_PER_EPOCH} steps", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    count = len(next(iter(sides.values())))
    figure.suptitle(f"digits, cnn, two workers; means of {count} seeds, shaded from least to most")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", choices=SIDES, help="measure this side; the others stay")
    args = parser.parse_args()
    sides: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    if args.only:
        sides = result_files.read("curves")["sides"] | {args.only: []}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name in [args.only] if args.only else SIDES:
                sides[name].append(train(SIDES[name], seed, args.epochs, Path(folder)))
        results = {
            "machine": result_files.MACHINE,
            "versions": result_files.versions(),
            "workload": " ".join(WORKLOAD),
            "sides": sides,
        }
        result_files.write("curves", results)
        draw(sides, PICTURE)
        write(BEGIN, END, table(sides), PAGE)


if __name__ == "__main__":
    main()
