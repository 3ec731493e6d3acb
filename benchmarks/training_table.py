"""README's tables of `benchmarks.compare`, out of its results.

    python -m benchmarks.training_table

writes them again; `benchmarks.compare` does so at its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.table import write

RESULTS = Path(__file__).parent / "results" / "compare.json"
BEGIN, END = "<!-- training: begin -->", "<!-- training: end -->"

OURS = "tfmulti"
PLACES = {"one": "one worker", "workers": "two workers", "mirrored": "two replicas, mirrored"}


def is_ours(side: str) -> bool:
    """Whether a side is tfmulti, with whatever flags."""
    return side.startswith(OURS)


def table(workloads: dict[str, Any]) -> str:
    """Returns the tables in Markdown: milliseconds a step, and what follows from them."""
    return "\n\n".join([_steps(workloads), _scaling(workloads)])


def _steps(workloads: dict[str, Any]) -> str:
    sides = list(dict.fromkeys(s for w in workloads.values() for k in w.values() for s in k))
    lines = ["| ms a step | " + " | ".join(sides) + " | best peer ÷ tfmulti |"]
    lines.append("|---" * (len(sides) + 2) + "|")
    for place, words in PLACES.items():
        for work, kinds in workloads.items():
            found = kinds.get(place, {})
            figures = [f"{found[s]['step_ms']:.1f}" if s in found else "" for s in sides]
            ratio = f"{gain(found):.2f}" if gain(found) else ""
            lines.append(f"| {work}, {words} | " + " | ".join([*figures, ratio]) + " |")
    return "\n".join(lines)


def gain(found: dict[str, Any]) -> float | None:
    """Returns how many times as fast tfmulti's exact steps are as the best peer's."""
    peers = [figures["step_ms"] for side, figures in found.items() if not is_ours(side)]
    return min(peers) / found[OURS]["step_ms"] if peers and OURS in found else None


def _scaling(workloads: dict[str, Any]) -> str:
    lines = [
        "| tfmulti | of linear, one to two workers | `fit`'s first step | after its last |",
        "|---|---|---|---|",
    ]
    for work, kinds in workloads.items():
        if not all(OURS in kinds.get(place, {}) for place in ("one", "workers")):
            continue
        one, two = kinds["one"][OURS], kinds["workers"][OURS]
        part = one["step_ms"] / two["step_ms"] / 2
        first, after = f"{one['first_s']:.1f} s", f"{1000 * two['after_s']:.0f} ms"
        lines.append(f"| {work} | {100 * part:.0f} % | {first} | {after} |")
    return "\n".join(lines)


def main() -> None:
    write(BEGIN, END, table(json.loads(RESULTS.read_text())["workloads"]))


if __name__ == "__main__":
    main()
