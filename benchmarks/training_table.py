"""Writes the training tables of docs/performance.md from the results of `benchmarks.compare`.

    python -m benchmarks.training_table

`benchmarks.compare` does the same at its end.
"""

from __future__ import annotations

from typing import Any

from benchmarks.result_files import read
from benchmarks.table import write
from benchmarks.workloads import WORKLOADS, Workload

BEGIN, END = "<!-- training: begin -->", "<!-- training: end -->"

# In float32, with the statistics of the global batch.
OURS = "tfmulti"
IN_HALVES = "tfmulti, float16 between workers"
PLACES = {"one": "one worker", "workers": "two workers", "mirrored": "two replicas, mirrored"}

# The goals for the speed of exact steps, relative to the best peer (two workers) or to Keras 3.
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
    """Returns the tables in Markdown: milliseconds of a step at each place, and the scaling."""
    steps = [
        _steps(workloads, place) for place in PLACES if any(place in w for w in workloads.values())
    ]
    return "\n\n".join([*steps, _scaling(workloads)])


def _steps(workloads: dict[str, Any], place: str) -> str:
    """Returns the table of a place, with a row for each workload and a column for each side."""
    kinds = {work: places[place] for work, places in workloads.items() if place in places}
    sides = list(dict.fromkeys(side for figures in kinds.values() for side in figures))
    peer = "best peer" if place == "workers" else "Keras 3"
    lines = [f"| ms a step, {PLACES[place]} | {' | '.join(sides)} | {peer} ÷ tfmulti | goal |"]
    lines.append("|---" * (len(sides) + 3) + "|")
    for work, figures in kinds.items():
        cells = [f"{figures[side]['step_ms']:.1f}" if side in figures else "" for side in sides]
        faster = gain(figures, place)
        ratio = f"{faster:.2f}" if faster else ""
        goal = GOALS[place][work]
        lines.append(f"| {work} | {' | '.join([*cells, ratio])} | {goal} |")
    if place == "workers":
        lines += _in_halves(kinds)
    return "\n".join(lines)


def _in_halves(kinds: dict[str, Any]) -> list[str]:
    """Returns the sentence about float16 between two workers."""
    ratios = [
        f"{faster:.2f} × the best peer on the {work} (goal {goal})"
        for work, goal in GOALS_IN_HALVES.items()
        if (faster := gain(kinds.get(work, {}), ours=IN_HALVES))
    ]
    return ["", f"With float16 between workers tfmulti is {', '.join(ratios)}."] if ratios else []


def gain(sides: dict[str, Any], place: str = "workers", ours: str = OURS) -> float | None:
    """Returns how many times as fast our steps are as those of the best peer.

    This is the fastest peer with two workers, and otherwise Keras 3, which computes the same.
    """
    peers = [
        figures["step_ms"]
        for side, figures in sides.items()
        if not is_ours(side) and (place == "workers" or side == "Keras 3")
    ]
    return min(peers) / sides[ours]["step_ms"] if peers and ours in sides else None


def _scaling(workloads: dict[str, Any]) -> str:
    """Returns the table of tfmulti's scaling, and of the time that its runs take besides steps."""
    lines = [
        "| tfmulti | speed of two workers, of twice the speed of one (goal: 90 %) | from process "
        "start to the end of the first step (more than Keras 3; goal: at most 1.5 s) | time after "
        "the last step | part of a run that is neither start nor steps (goal: at most 3 %) |",
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
    write(BEGIN, END, table(read("compare")["workloads"]))


if __name__ == "__main__":
    main()
