"""Writes the table of docs/performance.md from the results of the benchmarks.

python -m benchmarks.table
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.result_files import ROOT, read

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def rows() -> list[tuple[str, str, str]]:
    """Returns what was measured, the figure, and the command that measures it again."""
    lines = []
    for name, side in read("recovery")["sides"].items():
        stuck = side["rounds that did not go on"]
        rest = f"; {stuck} of {stuck + side['rounds']} did not go on within 90 s" if stuck else ""
        lines.append(
            (
                f"one of two workers is killed: until the next step, {name}",
                f"{side['seconds']:.1f} s{rest}",
                "recovery",
            )
        )
    for name, size in read("checkpoints")["sizes"].items():
        share = size["percent_at_the_default_of_60_s"]
        lines.append(
            (
                f"a checkpoint of {name} with Adam",
                f"{size['added_s']:.2f} s, {share:.1f} %",
                "checkpoints",
            )
        )
    pair = read("exactness")["places"]["2 replicas"]["all of it (without: Keras alone)"]
    lines.append(
        (
            "a step of a small network on two replicas, Keras alone and exact",
            f"{pair['without_ms']:.1f} ms and {pair['with_ms']:.1f} ms",
            "exactness",
        )
    )
    for name, sides in read("turns").items():
        figures = ", ".join(f"{side} {ms:.1f} ms" for side, ms in sides.items())
        lines.append(
            (f"a step of the {name} on one core, in turns in one process", figures, "turns")
        )
    return lines + input_rows()


def input_rows() -> list[tuple[str, str, str]]:
    """Returns the figures of data: each task beside its best peer."""
    lines = []
    description = {
        "arrays": "60,000 images of 28×28 in memory, shuffled",
        "images": "2,000 JPEG files of 256×256, shuffled and resized",
        "tfrecord": "the same images in TFRecord files",
    }
    for task, sides in read("input")["tasks"].items():
        figures = [
            f"{name} {side['examples_per_s']:,.0f}"
            for name, side in sorted(
                sides.items(), key=lambda item: item[1]["examples_per_s"], reverse=True
            )
        ]
        lines.append((f"{description[task]}, examples/s", ", ".join(figures), "input"))
    for task, sides in read("input")["tasks"].items():
        figures = [
            f"{name} {1000 * side['resume_s']:,.0f} ms"
            for name, side in sides.items()
            if side["resume_s"] is not None
        ]
        lines.append((f"{task}: first batch from 90 % of an epoch on", ", ".join(figures), "input"))
    return lines


def table() -> str:
    """Returns the table in Markdown."""
    lines = ["| what | measured | `python -m benchmarks.` |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())])


def write(begin: str, end: str, text: str, page: Path = PAGE) -> None:
    """Puts a text between two marks of a page."""
    head, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{head}{begin}\n{text}\n{end}{after}")


def main() -> None:
    write(BEGIN, END, table())


if __name__ == "__main__":
    main()
