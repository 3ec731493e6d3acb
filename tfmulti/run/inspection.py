"""Prints what `python -m tfmulti.data` shows: the form of a data set, its plan and its speed."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.config.console import Say, number, speaker
from tfmulti.config.run_directory import replacing
from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, size_of
from tfmulti.data.source import Leaf, Source, leaves_of, map_nest
from tfmulti.data.transforms.labels import Labels, read_labels
from tfmulti.run import validation
from tfmulti.run.data_speed import MEASURED_S, show_speed
from tfmulti.run.setup import Setup, first_batch, plan_of, set_up

_ROWS_SHOWN, _VALUES_SHOWN, _IMAGES_SHOWN, _CLASSES_SHOWN, _REPLICAS_SHOWN = 5, 8, 25, 20, 16
# The names of the parts of an example.
_PARTS = ("x", "y", "weight")


def show(job: validation.Job, workers: int, picture: str, *, measure: bool) -> None:
    """Prints the form of a job's data, its split over replicas and its speed.

    Args:
        job: the checked configuration and its data.
        workers: the number of workers whose plan is shown.
        picture: the file for the images of the first batch.
        measure: whether the speed is measured.
    """
    say = speaker(True)
    setup = set_up(job)
    if not isinstance(setup.data.train, Source):
        is_stream = job.data is not None and job.data.finish is not None
        _show_batches(setup, say, "a stream of GZIP files" if is_stream else _kind(setup.data))
    else:
        _show_parts(setup, say)
        _show_first_batch(setup, Path(picture), say)
        _show_plan(setup, workers, say)
    if measure:
        show_speed(setup, say)


def _show_parts(setup: Setup, say: Say) -> None:
    """Prints the size of each part, the form of an example and the classes."""
    data = setup.data
    for part in ("train", "validation", "test"):
        source = getattr(data, part)
        if source is not None:
            rows = size_of(source)
            say(part, f"{rows:,} examples" if rows is not None else "batches of its own")
    specs = data.train.specs
    parts = specs if isinstance(specs, tuple) and not isinstance(specs, Leaf) else (specs,)
    for name, spec in zip(_PARTS, parts, strict=False):
        say(name, _form(spec))
    if data.spec is not None and data.spec.task == CLASSIFICATION:
        order = functools.partial(plan_of(setup).examples_at, 0)
        labels = read_labels(data.train, order, skip_bad=True, limit_s=MEASURED_S)
        say("classes", f"{data.spec.outputs}{class_words(labels, data.spec, len(data.train))}")


def _form(spec: Any) -> str:
    """Returns the types and shapes of a nest of specs as text."""
    if isinstance(spec, dict):
        return ", ".join(f"{name} {_form(value)}" for name, value in spec.items())
    if isinstance(spec, tuple) and not isinstance(spec, Leaf):
        return ", ".join(_form(value) for value in spec)
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"


def class_words(labels: Labels | None, spec: DataSpec, rows: int) -> str:
    """Returns the words for how many of the read examples each class has.

    Args:
        labels: the labels that were read, or None if all of the data would have to be read.
        spec: the form of the data.
        rows: the number of training examples.
    """
    if labels is None:
        return "; their sizes are not known without reading all of the data"
    counts = np.bincount(labels.values, minlength=spec.outputs)
    names = spec.class_names or range(len(counts))
    shown = [
        f"{name}: {count:,}" for name, count in zip(names, counts[:_CLASSES_SHOWN], strict=False)
    ]
    more = f", … {len(counts) - _CLASSES_SHOWN} more" if len(counts) > _CLASSES_SHOWN else ""
    least, most, empty = int(counts.min()), int(counts.max()), int((counts == 0).sum())
    uneven = f"; the largest has {most / max(least, 1):.3g} × the smallest" if most > least else ""
    if empty:
        uneven = f"; {empty} of them {'have' if empty > 1 else 'has'} none"
    of = f" of {labels.examples:,} of {rows:,} examples:" if labels.examples < rows else ";"
    lost = labels.examples - len(labels.values)
    bad = f"; {lost:,} cannot be read" if lost else ""
    return f"{of} {', '.join(shown)}{more}{uneven}{bad}"


def _show_first_batch(setup: Setup, picture: Path, say: Say) -> None:
    """Draws the images of the first batch, or prints its first rows if they are no images."""
    data = first_batch(setup)
    first = data[0] if isinstance(data, tuple) else data
    y = data[1] if isinstance(data, tuple) and len(data) > 1 else None
    if isinstance(first, np.ndarray) and first.ndim == 4 and first.shape[-1] in (1, 3):
        draw_images(picture, first[:_IMAGES_SHOWN], y)
        say("picture", f"the first {min(len(first), _IMAGES_SHOWN)} training images: {picture}")
        return
    say("rows", f"the first {min(len(leaves_of(data)[0]), _ROWS_SHOWN)} of training")
    if setup.data.features is not None:
        say("", " → ".join([_names(setup.data.features), *_PARTS[1 : len(leaves_of(data))]]))
    for row in range(min(len(leaves_of(data)[0]), _ROWS_SHOWN)):
        words = map_nest(lambda leaf, row=row: _short(leaf[row]), data)
        say("", " → ".join(str(part) for part in leaves_of(words)))


def _names(features: tuple[str, ...]) -> str:
    """Returns the names of the values that a row shows, as text."""
    return ", ".join([*features[:_VALUES_SHOWN], *(["…"] if features[_VALUES_SHOWN:] else [])])


def _short(value: Any) -> str:
    """Returns the first values of an array, or the beginning of a text."""
    if isinstance(value, (bytes, str)):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return repr(text[:60] + "…" if len(text) > 60 else text)
    array = np.asarray(value)
    values = [
        number(float(v)) if array.dtype.kind == "f" else str(v)
        for v in array.reshape(-1)[:_VALUES_SHOWN]
    ]
    return " ".join(values) + (" …" if array.size > _VALUES_SHOWN else "")


def draw_images(path: Path, images: np.ndarray, labels: np.ndarray | None) -> None:
    """Draws images in a square into a file, each with its label.

    Args:
        path: the file. Its ending gives the format.
        images: [n, height, width, 1 or 3].
        labels: [n, …], or None. Labels that are not single values are not drawn.
    """
    # The import takes half a second.
    from matplotlib.figure import Figure

    side = int(np.ceil(len(images) ** 0.5))
    figure = Figure(figsize=(1.6 * side, 1.75 * side), layout="constrained")
    low, high = float(images.min()), float(images.max())
    bounds = (0, 255) if images.dtype == np.uint8 and high > 16 else (low, high)
    for i, image in enumerate(images):
        axes = figure.add_subplot(side, side, i + 1)
        shown = (image - bounds[0]) / max(bounds[1] - bounds[0], 1e-9)
        axes.imshow(shown[..., 0] if image.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
        if labels is not None and np.size(labels[i]) == 1:
            axes.set_title(str(np.reshape(labels[i], -1)[0]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=110)


def _show_plan(setup: Setup, workers: int, say: Say) -> None:
    """Prints the rows of each replica in the first and last step, and the examples of workers."""
    plan = plan_of(setup)
    replicas = workers * setup.placement.local_replicas
    steps = plan.steps_per_epoch
    on = f"{workers} workers × {setup.placement.local_replicas}" if workers > 1 else f"{replicas}"
    say(
        "plan",
        f"{steps:,} steps an epoch of {plan.global_batch_size} rows on {on} "
        f"replica{'s' if replicas > 1 else ''}",
    )
    for step in dict.fromkeys((0, steps - 1)):
        part = plan.part(step, 0, replicas, replicas)
        slices = [(last - first) * counts for first, last, counts in part.slices]
        more = " + …" if slices[_REPLICAS_SHOWN:] else ""
        shown = " + ".join(map(str, slices[:_REPLICAS_SHOWN])) + more
        idle = f"; {slices.count(0)} replicas have none" if 0 in slices else ""
        say(
            "",
            f"{'last' if step else 'first'} step: {part.rows} rows = {_grouped(slices)} "
            f"({shown}){idle}",
        )
    if workers > 1:
        for rank in range(min(workers, _REPLICAS_SHOWN)):
            local = setup.placement.local_replicas
            part = plan.part(0, rank * local, local, replicas)
            examples = plan.examples_of(part)
            begin = ", ".join(map(str, examples[:6])) + (", …" if len(examples) > 6 else "")
            say(
                "", f"worker {rank}, first step: rows {part.begin}–{part.end - 1}, examples {begin}"
            )


def _grouped(slices: list[int]) -> str:
    """Returns the rows of replica slices in few words, such as `6×4 + 2×3`."""
    return " + ".join(f"{len(list(group))}×{rows}" for rows, group in itertools.groupby(slices))


def _show_batches(setup: Setup, say: Say, kind: str) -> None:
    """Prints the form of data without random access, which gives whole batches."""
    spec = getattr(setup.data.train, "element_spec", None)
    say("train", f"{kind}: batches of its own, which every worker reads")
    if spec is not None:
        say("batch", str(spec))
    if setup.steps_per_epoch:
        say("plan", f"{setup.steps_per_epoch:,} steps an epoch")


def _kind(data: DataSet) -> str:
    """Returns the kind of data without random access, in words."""
    if isinstance(data.train, tf.data.Dataset):
        return "a tf.data.Dataset"
    return f"a PyDataset ({type(data.train).__name__})"
