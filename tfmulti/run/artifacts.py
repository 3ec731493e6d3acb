"""Writes the results of a run: the exported model, the curves and the report.

Runs on the chief.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from tfmulti.config.run_directory import RunDir, replacing, write_text
from tfmulti.errors import ModelError, RunDirError
from tfmulti.run.report import FitReport
from tfmulti.training.state.model_checks import as_made

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def weights_sha256(model: keras.Model) -> str:
    """Returns the SHA-256 of all weights, over the type, shape and bytes of each one in order."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(f"{weight.dtype} {weight.shape};".encode())
        digest.update(weight.tobytes())
    return digest.hexdigest()


def export_model(model: keras.Model, saved: Path, folder: Path) -> None:
    """Writes a SavedModel for serving.

    Keras cannot export a model with mirrored variables. So the saved file is loaded again outside
    the strategy, with the classes of the model and its layers.

    Args:
        model: the trained model.
        saved: the .keras file of this model.
        folder: the folder for the SavedModel, new or empty.

    Raises:
        RunDirError: the folder is not empty.
        ModelError: the saved file cannot be loaded with these classes.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RunDirError(f"--export_dir {folder} is not empty. Give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with as_made(model):
        classes = {type(layer).__name__: type(layer) for layer in [model, *model.layers]}
    try:
        plain = keras.saving.load_model(saved, custom_objects=classes)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"--export_dir: {saved} cannot be loaded to be exported: "
            f"{str(error).strip().splitlines()[0]} Give the model's classes a get_config, and "
            "register them with keras.saving.register_keras_serializable."
        ) from None
    with replacing(folder) as partial:
        plain.export(partial, verbose=False)


def write_report(run_dir: RunDir, report: FitReport) -> None:
    """Writes report.json."""
    write_text(run_dir.report, report.to_json())


def curves_figure(history: dict[str, list[float]], title: str = "") -> Figure:
    """Returns a figure of each metric over the epochs, with training and validation in one plot.

    Args:
        history: one list for each metric, with an entry for each epoch.
        title: the title of the picture.
    """
    # The import takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [name for name in history if not name.startswith("val_")]
    figure = Figure(figsize=(5.0 * max(1, len(names)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), place)
        for key, label in ((name, "training"), (f"val_{name}", "validation")):
            values = history.get(key, [])
            if values:
                axes.plot(range(1, len(values) + 1), values, marker=".", label=label)
        axes.set(xlabel="epoch")
        # A user's metric may be called "$x$", which is no formula of matplotlib.
        axes.set_title(name, parse_math=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    if title:
        figure.suptitle(title, parse_math=False)
    return figure


def curves_svg(history: dict[str, list[float]]) -> str:
    """Returns the figure of `curves_figure` as an SVG element.

    Args:
        history: one list for each metric, with an entry for each epoch.
    """
    # The import takes half a second.
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        curves_figure(history).savefig(text, format="svg")
    picture = text.getvalue()
    # The lines before belong to a file of its own.
    return picture[picture.index("<svg") :]


def draw_curves(path: Path, history: dict[str, list[float]], title: str) -> None:
    """Draws each metric over the epochs into a file.

    Args:
        path: the file. Its ending gives the format.
        history: one list for each metric, with an entry for each epoch.
        title: the title of the picture.
    """
    figure = curves_figure(history, title)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110)
