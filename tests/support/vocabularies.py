"""Loads texts on a worker whose own texts would give another vocabulary than the chief's.

    python -m tests.support.vocabularies OUT

writes OUT, in which RANK becomes the worker's rank: the vocabulary, its size in the data's spec,
the tokens of the worker's first text, and the error if the chief's texts have no words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tfmulti import make_strategy
from tfmulti.data.sources import text
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.run.setup import shared


def texts_in(folder: Path, words: str) -> str:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "1.txt").write_text(words)
    return str(folder)


def main(out: str) -> None:
    strategy = make_strategy("multi_worker_mirrored")
    rank = placement_of(strategy).rank
    if rank:

        def refuse(*args: object) -> tuple[str, ...]:
            raise AssertionError("a worker that is not the chief computes a vocabulary")

        text.make_vocabulary = refuse
    folder = Path(out).parent / f"texts_{rank}"
    own = texts_in(folder, f"own{rank} chiefs ünter own{rank}" if rank else "ünter chiefs ünter")
    data = shared(text.load(f"{own},tokens=5", 0), strategy)
    assert data.spec is not None
    tokens = data.train.read(np.array([0]))[0]
    texts_in(folder, "" if rank == 0 else "words")
    try:
        shared(text.load(own, 0), strategy)
        said = ""
    except DataError as error:
        said = str(error)
    found = [data.vocabulary, data.spec.vocabulary_size, tokens[0].tolist(), said]
    Path(out.replace("RANK", str(rank))).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
