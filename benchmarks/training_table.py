"""Writes the training tables of docs/performance.md from the results of `benchmarks.compare`.

    python -m benchmarks.training_table

`benchmarks.compare` does the same at its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import write
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results" / "compare.json"
BEGIN, END = "<!-- training: begin -->", "<!-- training: end -->"

# In float32, with the statistics of the global batch.
OURS = "tfmulti"
IN_HALVES = "tfmulti, float16 between workers"
PLACES = {"one": "one worker", "workers": "two workers", "mirrored": "two replicas, mirrored"}

# How many times as fast as the best peer (two workers) or as Keras 3 exact steps shall be.
GOALS = {
    "one": {"mlp": 0.98, "cnn": 0.98, "resnet20": 1.3, "transformer": 1.0},
    "workers": {"mlp": 0.85, "cnn": 1.3, "resnet20": 1.1, "transformer": 1.2},
    "mirrored": {"mlp": 1.0, "cnn": 1.0, "resnet20": 1.0, "transformer": 1.0},
}
GOALS_IN_HALVES = {"mlp": 1.0}


def is_ours(side: str) -> bool:
    """Returns whether a side is tfmulti, with any flags."""
    return side.startswith(OURS)


def table(workloads: dict[str, Any]) -> str:
    """Returns the tables in Markdown: milliseconds a step at each place, and what follows."""
    steps = [
        _steps(workloads, place) for place in PLACES if any(place in w for w in workloads.values())
    ]
    return "\n\n".join([*steps, _scaling(workloads)])


def _steps(workloads: dict[str, Any], place: str) -> str:
    kinds = {work: found[place] for work, found in workloads.items() if place in found}
    sides = list(dict.fromkeys(side for found in kinds.values() for side in found))
    peer = "best peer" if place == "workers" else "Keras 3"
    lines = [f"| ms a step, {PLACES[place]} | {' | '.join(sides)} | {peer} ÷ tfmulti | goal |"]
    lines.append("|---" * (len(sides) + 3) + "|")
    for work, found in kinds.items():
        figures = [f"{found[s]['step_ms']:.1f}" if s in found else "" for s in sides]
        faster = gain(found, place)
        ratio = f"{faster:.2f}" if faster else ""
        goal = GOALS[place][work]
        lines.append(f"| {work} | {' | '.join([*figures, ratio])} | {goal} |")
    if place == "workers":
        lines += _in_halves(kinds)
    return "\n".join(lines)


def _in_halves(kinds: dict[str, Any]) -> list[str]:
    ratios = [
        f"{faster:.2f} × the best peer on the {work} (goal {goal})"
        for work, goal in GOALS_IN_HALVES.items()
        if (faster := gain(kinds.get(work, {}), ours=IN_HALVES))
    ]
    return ["", f"With float16 between workers tfmulti is {', '.join(ratios)}."] if ratios else []


def gain(found: dict[str, Any], place: str = "workers", ours: str = OURS) -> float | None:
    """Returns how many times as fast our steps are as those of the best peer.

    This is the fastest peer with two workers, and otherwise Keras 3, which computes the same.
    """
    peers = [
        figures["step_ms"]
        for side, figures in found.items()
        if not is_ours(side) and (place == "workers" or side == "Keras 3")
    ]
    return min(peers) / found[ours]["step_ms"] if peers and ours in found else None


def _scaling(workloads: dict[str, Any]) -> str:
    lines = [
        "| tfmulti | of linear, one to two workers (goal 90 %) | process start to the first step's "
        "end (against Keras 3; goal: at most 1.5 s more) | after the last step | of a run neither "
        "start nor steps (goal: at most 3 %) |",
        "|---|---|---|---|---|",
    ]
    for work, kinds in workloads.items():
        if not all(OURS in kinds.get(place, {}) for place in PLACES):
            continue
        part = kinds["one"][OURS]["step_ms"] / kinds["workers"][OURS]["step_ms"] / 2
        after = max(kinds[place][OURS]["after_s"] for place in PLACES)
        rest = max(beyond(kinds[place][OURS], WORKLOADS[work]) for place in PLACES)
        lines.append(
            f"| {work} | {100 * part:.0f} % | {_starts(kinds)} | {1000 * after:.0f} ms at most "
            f"| {100 * rest:.1f} % at most |"
        )
    return "\n".join(lines)


def beyond(figures: dict[str, Any], work: Workload) -> float:
    """Returns the part of a run that neither its start nor steps of the median length take."""
    step_s, mean_s = figures["step_ms"] / 1000, figures["mean_ms"] / 1000
    known_s = figures["start_s"] + (work.warm_up + work.steps - 1) * step_s
    rest_s = work.steps * (mean_s - step_s) + figures["after_s"]
    return float(rest_s / (known_s + rest_s))


def _starts(kinds: dict[str, Any]) -> str:
    """Returns the seconds of tfmulti's start, and how many more these are than those of Keras 3.

    Keras 3 cannot train on two workers, so its start with one worker is compared.
    """
    starts = []
    for place, name in PLACES.items():
        ours = kinds[place][OURS]["start_s"]
        keras = kinds[place].get("Keras 3", kinds["one"].get("Keras 3"))
        more = f" ({ours - keras['start_s']:+.1f})" if keras else ""
        starts.append(f"{name} {ours:.1f} s{more}")
    return ", ".join(starts)


def main() -> None:
    write(BEGIN, END, table(json.loads(RESULTS.read_text())["workloads"]))


if __name__ == "__main__":
    main()
