"""Runs the programs at each place, and measures their differences from plain Keras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.exactness.running import Arrays
from tests.support.places import Places, run_at, workers_at

# This is the limit of one place. All programs of one place take up to 25 minutes on two cores.
LIMIT_S = 5400

Left = dict[str, np.ndarray]


class ProgramPlaces(Places):
    """The results of the programs at each place: for each worker, program -> name -> array.

    At the place `plain` the second entry has the results of the perturbed weights. A program that
    ends its process has the error `Died`, and the next programs run in a new process.
    """

    def _run(self, place: str) -> list[Arrays]:
        folder = self._folder / place
        wanted = list(self._names[place])
        while wanted:
            log = self._attempt(place, folder, wanted)
            done = [name for name in wanted if (folder / "rank_0" / f"{name}.npz").exists()]
            if log is None:
                break
            dead = next(name for name in wanted if name not in done)
            for rank in _ranks(place):
                target = folder / f"rank_{rank}"
                target.mkdir(parents=True, exist_ok=True)
                np.savez(target / f"{dead}.npz", error=np.array(["Died", log]))
            wanted = [name for name in wanted if name not in (*done, dead)]
        return [
            {name: _read(folder / f"rank_{rank}" / f"{name}.npz") for name in self._names[place]}
            for rank in _ranks(place)
        ]

    def _attempt(self, place: str, folder: Path, names: list[str]) -> str | None:
        """Runs programs, and returns the end of the log if they failed."""
        argv = ["-m", "tests.programs", str(folder), place, "|".join(names)]
        try:
            run_at(place, argv, folder / f"logs_{len(names)}", limit_s=LIMIT_S)
        except AssertionError as error:
            return str(error)[-6000:]
        return None


def _ranks(place: str) -> range:
    return range(2 if place == "plain" else workers_at(place))


def _read(file: Path) -> Left:
    with np.load(file) as archive:
        return {name: archive[name] for name in archive.files}


# The difference of a small array is relative to at least this part of the largest number in its
# group. For example, the gradient of a bias before a normalization is only rounding.
FLOOR = 0.01


def differences(left: Left, right: Left) -> dict[str, float]:
    """Returns the difference of each array, relative to the largest number in the array.

    The difference is infinite if shapes or names differ, or if only one side has a NaN.
    """
    sizes: dict[str, float] = {}
    for name, array in right.items():
        sizes[_group(name)] = max(sizes.get(_group(name), 0.0), _size(array))
    found = {name: float("inf") for name in left.keys() ^ right.keys()}
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            found[name] = float("inf")
            continue
        gap = np.abs(np.nan_to_num(a.astype(np.float64)) - np.nan_to_num(b.astype(np.float64)))
        scale = max(_size(b), FLOOR * sizes[_group(name)]) or 1.0
        found[name] = float(gap.max(initial=0.0)) / scale
    return found


def _group(name: str) -> str:
    """Returns the group of an array: the weights, the velocities of one optimizer, …."""
    return name.rpartition("/")[0]


def _size(array: np.ndarray) -> float:
    return float(np.abs(np.nan_to_num(array.astype(np.float64))).max(initial=0.0))


def excess(
    found: Left, plain: Left, perturbed: Sequence[Left], tolerance: float
) -> tuple[float, str]:
    """Returns the largest quotient of a difference and its limit, and a description of it.

    The limit is the tolerance, or ten times the largest change on one device after the initial
    weights were moved by one unit in the last place.
    """
    sensitivity: dict[str, float] = {}
    for each in perturbed:
        assert plain.keys() == each.keys(), "the perturbed program left something else"
        for name, difference in differences(each, plain).items():
            sensitivity[_group(name)] = max(sensitivity.get(_group(name), 0.0), difference)
    worst, words = 0.0, "nothing was compared"
    for name, difference in differences(found, plain).items():
        allowed = max(tolerance, 10 * sensitivity.get(_group(name), 0.0))
        if difference / allowed >= worst:
            worst = difference / allowed
            words = f"{name} differs by {difference:.2e}, allowed {allowed:.2e}"
    return worst, words
