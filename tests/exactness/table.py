"""Makes the table of docs/exactness.md: the largest difference of each row at each place."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cases import CASES, PLACES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "exactness.json"
PAGE = ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- exactness: begin -->", "<!-- exactness: end -->"

PROMISES = {
    1: "even, uneven, one-row and empty shares; all kinds of models",
    2: "losses: reductions, functions, `add_loss`, several outputs, weights, masks, dicts, ragged",
    3: "optimizers, clipping, averages, accumulation, microbatches",
    4: "batch normalization (`sync_batch_norm`), group and layer normalization",
    5: "dropout, noise, augmentation",
    6: "mixed_bfloat16 (within its rounding, 4e-3)",
    7: "AUC, F1, top-k, weighted and own metrics",
    8: "3, 7 and 20 steps an execution",
    10: "Dataset, PyDataset, repeated and of unknown length",
}
HEADS = {
    "mirrored-2": "2 replicas",
    "mirrored-3": "3 replicas",
    "mirrored-8": "8 replicas",
    "workers-2": "2 workers",
    "workers-3": "3 workers",
}

# The largest difference of each case at each place.
Found = dict[str, dict[str, float]]


def is_whole(found: Found) -> bool:
    """Whether every case was measured at every one of its places."""
    return all(set(case.places) <= found.get(name, {}).keys() for name, case in CASES.items())


def of_promises(found: Found) -> str:
    """Returns the table in Markdown: for each row, the worst case at each place."""
    lines = ["| | " + " | ".join(HEADS.values()) + " |", "|---" * (len(HEADS) + 1) + "|"]
    for row, words in PROMISES.items():
        cells = []
        for place in HEADS:
            values = [
                found[n][place] for n, c in CASES.items() if c.row == row and place in found[n]
            ]
            cells.append(f"{max(values):.1e}")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(measured: Found) -> None:
    """Writes each case's differences, and the page's table of the largest ones.

    Cases that were not measured this time keep their earlier differences.
    """
    before = json.loads(FILE.read_text())
    found = {name: {**before.get(name, {}), **measured.get(name, {})} for name in CASES}
    assert is_whole(found), "--write-table has no figures of some cases: run tests/exactness whole"
    ordered = {name: {p: found[name][p] for p in PLACES if p in found[name]} for name in CASES}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n")
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{head}{BEGIN}\n{of_promises(found)}\n{END}{after}")
