"""What the doctor has found: single findings, and the report of all of them."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfmulti.config import json_values
from tfmulti.config.troubleshooting import DOCTOR, docs_path_of

OK, WARNING, FAILED = "ok", "warning", "failed"
# From the best to the worst.
_ORDER = (OK, WARNING, FAILED)
_MOST_CHARACTERS = 2000


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        check: the name of the check, one or two words.
        status: `OK`, `WARNING` or `FAILED`.
        measured: what was measured.
        rule: what should have been measured; empty if that is obvious.
        advice: what to do; empty if nothing is to be done.
        worker: the rank of the worker that it concerns, or None.
    """

    check: str
    status: str
    measured: str
    rule: str = ""
    advice: str = ""
    worker: int | None = None

    def lines(self) -> Iterable[str]:
        """Yields the lines that tell this finding."""
        where = "" if self.worker is None else f"worker {self.worker}: "
        status = self.status if self.status == OK else self.status.upper()
        yield f"{status:<8} {self.check:<13} {where}{self.measured}"
        if self.status != OK:
            path = docs_path_of(self.measured, DOCTOR)
            for label, text in (("rule", self.rule), ("do", self.advice), ("docs", path)):
                if text:
                    yield textwrap.fill(
                        text,
                        100,
                        initial_indent=f"{'':<8} {label:<13} ",
                        subsequent_indent=" " * 23,
                        break_on_hyphens=False,
                        break_long_words=False,
                    )


@dataclass(frozen=True)
class Report:
    """All findings of a job.

    Attributes:
        findings: the findings, in the order of the checks.
        workers: the number of workers.
        links: the table of the links between the workers: for each pair the ranks, the round-trip
            time in milliseconds and the megabytes of a second.
        seconds: how long the doctor took.
    """

    findings: Sequence[Finding]
    workers: int
    links: Sequence[dict[str, float]] = ()
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The worst status of all findings."""
        return max((finding.status for finding in self.findings), key=_ORDER.index, default=OK)

    @property
    def has_failed(self) -> bool:
        """Whether a check has failed."""
        return has_failed(self.findings)

    def lines(self) -> Iterable[str]:
        """Yields the lines of the report."""
        for finding in self.findings:
            # The report omits the checks of the other workers that are ok.
            if finding.status != OK or not finding.worker:
                yield from finding.lines()
        yield from self._table()
        counts = Counter(finding.status for finding in self.findings)
        yield ""
        verdict = {
            OK: "It will train here",
            WARNING: "It will train here, but see the warnings",
            FAILED: "It will not train here as it is",
        }[self.status]
        yield (
            f"{verdict}: {counts[OK]} checks are ok, {counts[WARNING]} gave a warning, "
            f"{counts[FAILED]} failed ({self.seconds:.0f} s)."
        )

    def _table(self) -> Iterable[str]:
        """Yields the matrix of the links: a row for each worker that sends."""
        if not self.links:
            return
        link_of = {(int(link["from"]), int(link["to"])): link for link in self.links}
        ranks = range(self.workers)
        yield ""
        yield "round trip in ms / bandwidth in MB/s, from the worker of the row to the column's"
        yield " " * 10 + "".join(f"{rank:>16}" for rank in ranks)
        for row in ranks:
            cells = []
            for column in ranks:
                link = link_of.get((row, column))
                text = f"{link['rtt_ms']:.2f} / {link['mb_s']:.0f}" if link else "none"
                cells.append("-" if row == column else text)
            yield f"{row:>10}" + "".join(f"{cell:>16}" for cell in cells)

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(
            {
                "status": self.status,
                "workers": self.workers,
                "seconds": round(self.seconds, 1),
                "findings": [dataclasses.asdict(finding) for finding in self.findings],
                "links": list(self.links),
            },
            indent=1,
        )


def has_failed(findings: Iterable[Finding]) -> bool:
    """Returns whether a finding has failed."""
    return any(finding.status == FAILED for finding in findings)


def printable(text: str, most: int) -> str:
    r"""Returns a text of another machine as it may be shown.

    Control characters must not reach the terminal.

    Args:
        text: the text.
        most: the greatest number of characters that are kept.

    >>> printable("a\x1b[2J\nb", 5)
    'a[2Jb'
    """
    return "".join(filter(str.isprintable, text[: 2 * most]))[:most]


def findings_of(values: Any, worker: int) -> list[Finding]:
    """Returns the findings that another worker has sent.

    Args:
        values: a list of JSON objects.
        worker: the rank of that worker.

    Raises:
        ValueError: the values are no list of findings.
    """
    if not isinstance(values, list):
        raise ValueError("no list of findings")
    findings = []
    for value in values:
        finding = json_values.build(Finding, value)
        if finding.status not in _ORDER:
            raise ValueError("no status of a finding")
        texts = {
            name: printable(text, _MOST_CHARACTERS)
            for name, text in vars(finding).items()
            if isinstance(text, str)
        }
        findings.append(dataclasses.replace(finding, **texts, worker=worker))
    return findings
