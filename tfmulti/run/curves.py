"""Draws the metrics of a run over its epochs, with matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfmulti.config.run_directory import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves_figure(history: dict[str, list[Any]], title: str = "") -> Figure:
    """Returns a figure of each metric over the epochs, with training and validation in one plot.

    `history` has a list for each metric, with an entry for each epoch. An entry is a number, or a
    list of numbers.
    """
    # The import takes half a second.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in history if not name.startswith("val_")]
    figure = Figure(figsize=(5.0 * max(1, len(names)), 3.6), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), place)
        for key, label, color in ((name, "training", "C0"), (f"val_{name}", "validation", "C1")):
            values = history.get(key, [])
            if values:
                epochs = range(1, len(values) + 1)
                # A metric of several numbers has a line for each of them, and one label.
                first, *_ = axes.plot(epochs, values, marker=".", color=color)
                first.set_label(label)
        axes.set(xlabel="epoch")
        # matplotlib would take a metric's name such as "$x$" for a formula.
        axes.set_title(name, parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def curves_svg(history: dict[str, list[Any]]) -> str:
    """Returns the figure of `curves_figure` as an SVG element."""
    # The import takes half a second.
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        curves_figure(history).savefig(text, format="svg")
    picture = text.getvalue()
    # Within a page, the XML declaration before the element is left out.
    return picture[picture.index("<svg") :]


def draw_curves(path: Path, history: dict[str, list[Any]], title: str) -> None:
    """Draws each metric over the epochs into a file.

    The ending of the path gives the format.
    """
    figure = curves_figure(history, title)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110)
