"""README's figures are those of the results."""

from __future__ import annotations

from benchmarks import table


def test_readme_shows_what_was_measured() -> None:
    text = table.README.read_text()
    shown = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.table(), "run python -m benchmarks.table"
