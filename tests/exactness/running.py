"""Runs the cases at each place once, in the background."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.cases import CASES
from tests.support.places import BEFORE_RELEASE, Places, run_at

# This is the limit of one place. The longest takes 200 s on two cores.
LIMIT_S = 2400 if BEFORE_RELEASE else 600

Arrays = dict[str, dict[str, np.ndarray]]


class CasePlaces(Places):
    """The results of the cases at each place: for each worker, case -> name -> array."""

    def _run(self, place: str) -> list[Arrays]:
        folder = self._folder / place
        names = [name for name in CASES if name in self._names[place]]
        argv = ["-m", "tests.support.cases", str(folder / "out_RANK.npz"), place, "|".join(names)]
        run_at(place, argv, folder, limit_s=LIMIT_S)
        return [_by_case(file) for file in sorted(folder.glob("out_*.npz"))]


def _by_case(file: Path) -> Arrays:
    found: Arrays = {}
    with np.load(file) as archive:
        for name in archive.files:
            case, _, part = name.partition("|")
            found.setdefault(case, {})[part] = archive[name]
    return found
