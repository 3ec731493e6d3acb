"""Starts the programs of each place, and says how far they are from plain Keras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.exactness.running import Arrays
from tests.support.places import Places, run_at, workers_at

# This is the limit of one place. The longest takes 200 s on two cores.
LIMIT_S = 900

Left = dict[str, np.ndarray]


class ProgramPlaces(Places):
    """What the programs left at each place: a dictionary a worker, program -> name -> array.

    At the place `plain` the second dictionary is that of the perturbed weights. A program that
    ends its process has the error `Died`, and the others go on in a new process.
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
        """Runs programs; returns the end of the log where they did not end well."""
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


# An array that is small beside the others of its group is measured by this part of their size:
# the gradient of a bias before a normalization is nothing but rounding.
FLOOR = 0.01


def differences(left: Left, right: Left) -> dict[str, float]:
    """Returns how far each array is off, relative to the largest number in it.

    Another shape, a NaN on one side alone or a name on one side alone is infinitely far.
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
    """Returns what an array is compared among: the weights, one optimizer's velocities, …."""
    return name.rpartition("/")[0]


def _size(array: np.ndarray) -> float:
    return float(np.abs(np.nan_to_num(array.astype(np.float64))).max(initial=0.0))


def excess(
    found: Left, plain: Left, perturbed: Sequence[Left], tolerance: float
) -> tuple[float, str]:
    """Returns the largest difference over what is allowed, and what differs by how much.

    Allowed is the tolerance, or ten times the most that one unit in the last place of the initial
    weights changed on one device.
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
