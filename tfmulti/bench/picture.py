"""Draws bench.png: the throughput, the efficiency and the parts of the time of a step.

TensorBoard shows the same picture.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tfmulti.bench.parts import PARTS
from tfmulti.bench.report import Report
from tfmulti.bench.results import Result
from tfmulti.config.run_directory import replacing

_COLOURS = {
    "compute": "tab:blue",
    "communication": "tab:red",
    "input": "tab:orange",
    "host": "tab:gray",
}
_KINDS = {"replicas": ("tab:green", "s"), "workers": ("tab:blue", "o")}


def draw(report: Report, path: Path) -> None:
    """Draws a report into a file, whose ending gives the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    speed, efficiency, parts = figure.subplots(1, 3)
    _draw_curves(report, speed, efficiency)
    _draw_parts(report.results, parts)
    run, config = report.config.run, report.config
    weak, strong = f"batch {config.batch} a replica (weak)", f"global batch {config.batch} (strong)"
    batch = weak if config.weak else strong
    devices = f"{report.gpus} GPUs" if report.gpus else f"{report.cores} CPU cores"
    figure.suptitle(f"{run.model}, {batch}, {run.precision}, {devices}")
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110)


def log_picture(picture: Path, folder: Path) -> None:
    """Writes a PNG file into a folder of event files, as the image `scaling` of TensorBoard."""
    data = picture.read_bytes()
    # A PNG begins with its width and its height: https://www.w3.org/TR/png/#11IHDR.
    width, height = struct.unpack(">II", data[16:24])
    image = Summary.Image(encoded_image_string=data, width=width, height=height, colorspace=4)
    summary = Summary(value=[Summary.Value(tag="scaling", image=image)])
    writer = EventFileWriter(str(folder))
    writer.add_event(Event(wall_time=time.time(), step=0, summary=summary))
    writer.close()


def _draw_curves(report: Report, speed: Any, efficiency: Any) -> None:
    """Draws throughput and efficiency over the number of devices: measured, predicted and ideal."""
    results = report.results
    base = min(results, key=lambda result: result.point.devices)
    for kind, (colour, marker) in _KINDS.items():
        shown = [r for r in results if r.point.kind in (kind, "one")]
        if all(r.point.kind == "one" for r in shown):
            continue
        x = [r.point.devices for r in shown]
        style = {"color": colour, "marker": marker, "label": f"measured, {kind}"}
        speed.errorbar(
            x, [r.examples_per_sec for r in shown], yerr=_spread(shown), capsize=3, **style
        )
        efficiency.plot(x, [100 * r.efficiency for r in shown], **style)
    if all(r.point.kind == "one" for r in results):
        speed.plot([1], [base.examples_per_sec], "ko", label="measured")
        efficiency.plot([1], [100], "ko", label="measured")
    x = [int(p["workers"]) for p in report.predicted]
    if x:
        dotted: dict[str, Any] = {
            "color": "tab:blue",
            "linestyle": ":",
            "marker": "x",
            "alpha": 0.8,
        }
        label = "predicted by the cost model, not measured"
        speed.plot(x, [p["examples_per_sec"] for p in report.predicted], label=label, **dotted)
        efficiency.plot(x, [100 * p["efficiency"] for p in report.predicted], label=label, **dotted)
    x = x or [r.point.devices for r in results]
    ideal = base.examples_per_sec / base.point.devices
    ends = [min(x), max(x)]
    speed.plot(ends, [ideal * n for n in ends], color="0.6", linestyle="--", label="ideal")
    efficiency.axhline(100, color="0.6", linestyle="--", label="ideal")
    speed.set(title="throughput", ylabel="examples/s", yscale="log")
    efficiency.set(title="efficiency of each replica", ylabel="%", ylim=(0, None))
    for axes in (speed, efficiency):
        axes.set(xlabel="replicas or workers", xscale="log")
        axes.set_xticks(sorted({*map(int, x)}), labels=sorted({*map(int, x)}))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _spread(shown: list[Result]) -> list[list[float]]:
    """Returns how far the throughputs of the rounds go below and above the one that is shown."""
    below, above = [], []
    for result in shown:
        speed = result.examples_per_sec
        round_speeds = [speed * result.step_ms / ms for ms in result.rounds_ms]
        below.append(max(0.0, speed - min(round_speeds)))
        above.append(max(0.0, max(round_speeds) - speed))
    return [below, above]


def _draw_parts(results: list[Result], axes: Any) -> None:
    """Draws a bar for each point, with the parts of the time of a step on top of each other."""
    names = [result.point.name.replace(" ", "\n") for result in results]
    below = [0.0] * len(results)
    for part in PARTS:
        values = [getattr(result.parts, part) for result in results]
        axes.bar(names, values, bottom=below, color=_COLOURS[part], label=part, width=0.6)
        below = [a + b for a, b in zip(below, values, strict=True)]
    for point, total in enumerate(below):
        axes.annotate(f"{total:.3g} ms", (point, total), ha="center", va="bottom", fontsize=9)
    axes.set(title="where a step's time goes", ylabel="ms a step")
    axes.margins(y=0.12)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="y")
