"""Writes the table of docs/programs.md: which programs stand for each public example.

python -m tests.programs.page
"""

from __future__ import annotations

from pathlib import Path

from tests.programs.catalogue import PROGRAMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "programs.md"
BEGIN, END = "<!-- programs: begin -->\n", "<!-- programs: end -->"


def table() -> str:
    """Returns the table in Markdown, with the public titles in alphabetical order."""
    by_title: dict[str, list[str]] = {}
    # The catalogue's order depends on which of its modules was imported first.
    for name, program in sorted(PROGRAMS.items()):
        for title in program.like:
            by_title.setdefault(title, []).append(f"`{name}`: {program.kind.rstrip('.')}")
    rows = [
        f"| {title} | {'<br>'.join(found)} |".replace("\\|", "|")
        for title, found in sorted(by_title.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join(["| public example | programs |", "|---|---|", *rows, ""])


def with_table(page: str) -> str:
    """Returns the text of the page with the table of the present programs.

    Args:
        page: the text of the page.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
