"""Draws a run's report as HTML: report.html in the run directory, and the result in a notebook.

The page is one file that loads nothing. All texts are escaped, because names come from users.
"""

from __future__ import annotations

import html
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tfmulti.config.console import number
from tfmulti.data.advice import HIGH_SHARE
from tfmulti.run.curves import curves_svg
from tfmulti.run.straggler import Straggler

if TYPE_CHECKING:
    from tfmulti.run.report import FitReport

_STYLE = """
.tfmulti{font:14px/1.5 system-ui,sans-serif;max-width:60em}
.tfmulti h3{margin:1.2em 0 .3em;font-size:1.05em}
.tfmulti table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.tfmulti th,.tfmulti td{text-align:left;vertical-align:top;padding:.15em 1.2em .15em 0}
.tfmulti th{font-weight:600;white-space:nowrap}
.tfmulti pre{padding:.6em;border:1px solid #8886;border-radius:4px;white-space:pre-wrap}
.tfmulti .note{border-left:4px solid #d97706;padding-left:.6em;margin:.4em 0}
.tfmulti .bar{display:flex;height:1.6em;max-width:40em;border-radius:4px;overflow:hidden}
.tfmulti .bar span{color:#fff;font-size:.85em;padding:.1em .4em;overflow:hidden;white-space:nowrap}
.tfmulti svg{max-width:100%;height:auto;background:#fff}
"""
_COLOURS = ("#2563eb", "#d97706", "#7c3aed")


def page(report: FitReport, title: str) -> str:
    """Returns report.html: the report as a page of its own."""
    return (
        '<!DOCTYPE html>\n<html lang="en" style="font-family:system-ui,sans-serif">'
        '<head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title></head><body>"
        f"<h1>{html.escape(title)}</h1>{fragment(report)}</body></html>\n"
    )


def fragment(report: FitReport) -> str:
    """Returns the report as HTML that can stand in another page, such as a notebook."""
    parts = [f"<style>{_STYLE}</style>", *(_note(words) for words in warnings(report))]
    parts.append(_titled("Result", _table(_results(report))))
    if report.history.get("loss"):
        parts.append(_titled("Curves", curves_svg(report.history)))
    parts.append(_titled("What ran where", _table(_places(report))))
    parts.append(_titled("Speed", _table(_speed(report))))
    shares = time_shares(report)
    if shares:
        parts.append(_titled("Where the time of a step goes", _bar(shares)))
    if report.run_dir is not None:
        parts.append(_titled("Run it again", f"<pre>{html.escape(command(report))}</pre>"))
    return f'<div class="tfmulti">{"".join(parts)}</div>'


def warnings(report: FitReport) -> list[str]:
    """Returns what the reader of a report should know before its numbers, in words."""
    lines = []
    if report.stopped_by:
        lines.append(
            f"The run was stopped by {report.stopped_by} after step {report.steps}. Its state is "
            "saved, and the same command goes on."
        )
    if report.inexact:
        lines.append(f"{', '.join(report.inexact)}: these are not the numbers of one device.")
    if report.examples_lost:
        lines.append(f"{report.examples_lost:,} examples could not be read.")
    if report.waiting_share > HIGH_SHARE:
        lines.append(
            f"The steps waited for data for {100 * report.waiting_share:.0f} % of their time. "
            "See the page “Performance”."
        )
    if report.straggler:
        lines.append(Straggler(**report.straggler).words())
    return lines


def time_shares(report: FitReport) -> dict[str, float]:
    """Returns the parts of the time of the steps by name, which add up to 1; or none if unknown.

    Without tfmulti's own collectives, as on several GPUs, waiting for other workers counts as
    computing.
    """
    if not report.steps - report.steps_before:
        return {}
    data, others = report.waiting_share, report.others_share or 0.0
    parts = {"computing": max(0.0, 1.0 - data - others), "waiting for data": data}
    if report.others_share is not None:
        parts["waiting for other workers"] = others
    return parts


def command(report: FitReport) -> str:
    """Returns the command that does the run again, in a new folder."""
    config = shlex.quote(str(Path(report.run_dir or "") / "config.json"))
    words = f"python -m tfmulti.fit --config {config} --run_dir runs/again"
    if report.workers == 1:
        return words
    # An IPv6 address keeps its brackets, as --hosts takes it.
    workers_of = Counter(address.rpartition(":")[0] for address in report.addresses)
    where = f"--nproc-per-node {report.workers}"
    if len(workers_of) > 1:
        hosts = ",".join(f"{host}:{count}" for host, count in workers_of.items())
        where = f"--hosts {shlex.quote(hosts)}"
    return f"tfmulti launch {where} -m {words[len('python -m ') :]}"


def _results(report: FitReport) -> dict[str, str]:
    """Returns the final metrics and how much was trained."""
    rows = {name: number(value) for name, value in report.metrics.items()}
    before = f", {report.steps_before:,} of them before it was resumed"
    rows["steps"] = f"{report.steps:,}{before if report.steps_before else ''}"
    rows["epochs"] = f"{report.epochs} of {report.epochs_asked or report.epochs}"
    rows["examples"] = f"{report.examples:,}"
    if report.verification is not None:
        rows["compared with one device"] = "the same numbers"
    rows["SHA-256 of the weights"] = report.weights_sha256[:16]
    return rows


def _places(report: FitReport) -> dict[str, str]:
    """Returns the strategy, where each worker ran, and the versions."""
    # A report of an earlier version has only the chief's devices.
    places = report.places or (", ".join(report.devices),)
    ports = [f" (at {address})" for address in report.addresses] or [""]
    workers = {
        f"worker {rank}": f"{place}{port}"
        for rank, (place, port) in enumerate(zip(places, ports, strict=False))
    }
    return {
        "strategy": f"{report.strategy} ({report.why})",
        **workers,
        "replicas": str(report.replicas),
        "batch": f"{report.global_batch_size} global, at most {report.per_replica_batch_size} on "
        "each replica",
        "parameters": f"{report.parameters:,}",
        "versions": ", ".join(f"{name} {text}" for name, text in report.versions.items()),
        "run directory": report.run_dir or "none",
    }


def _speed(report: FitReport) -> dict[str, str]:
    """Returns the throughput."""
    figures = {name: number(value) for name, value in (report.throughput or {}).items()}
    return {
        "training": f"{number(report.seconds)} s, with tracing and validation",
        "throughput": f"{number(report.examples_per_second)} examples/s, "
        f"{number(report.examples_per_second / max(1, report.replicas))} on each replica, in the "
        "steps alone, without tracing",
        **figures,
    }


def _note(words: str) -> str:
    return f'<p class="note">{html.escape(words)}</p>'


def _titled(title: str, content: str) -> str:
    return f"<h3>{html.escape(title)}</h3>{content}"


def _table(rows: dict[str, str]) -> str:
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _bar(shares: dict[str, float]) -> str:
    """Returns a bar whose parts have the widths of the shares, and the same in words."""
    spans = (
        f'<span style="width:{100 * share:.2f}%;background:{colour}"'
        f' title="{name}">{f"{100 * share:.0f} %" if share > 0.05 else ""}</span>'
        for (name, share), colour in zip(shares.items(), _COLOURS, strict=False)
        if share > 0
    )
    legend = "; ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
    return f'<div class="bar">{"".join(spans)}</div><p>{legend}</p>'
