"""README's figures are those of the results."""

from __future__ import annotations

import json

from benchmarks import curves, table


def test_readme_shows_what_was_measured() -> None:
    text = table.README.read_text()
    shown = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.table(), "run python -m benchmarks.table"


def test_readme_shows_the_curves_ends() -> None:
    text = curves.README.read_text()
    shown = text.split(curves.BEGIN)[1].split(curves.END)[0].strip()
    assert shown == curves.table(json.loads(curves.RESULTS.read_text())["sides"])


def test_what_workers_send() -> None:
    """Half of all gradients' bytes twice, of two workers; less by the type, or by the steps."""
    sent = {side: curves.sent_kb(side, 1_000_000) for side in curves.SIDES}
    assert list(sent.values()) == [4000, 2000, 2000, 400, 80, 400]
