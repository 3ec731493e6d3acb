"""Handwritten digits that are part of the package: the optical digits of UCI, 8×8 pixels."""

from __future__ import annotations

import gzip
from importlib import resources

import numpy as np

from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, labelled

# The validation and the test part have 300 images each, so an image is 0.33 points of accuracy.
_HELD_OUT = 300
# The split belongs to the data set, so it does not change with --seed.
_SPLIT_SEED = 1998


def load(options: str, seed: int) -> DataSet:
    """Returns 1,197 training, 300 validation and 300 test images, uint8 [8, 8, 1].

    Source: https://doi.org/10.24432/C50P49 (CC BY 4.0; LICENSE.md stands beside the file).
    """
    file = resources.files("tfmulti.data.sources") / "digits_data" / "optdigits.csv.gz"
    text = gzip.decompress(file.read_bytes()).decode("ascii")
    table = np.array([row.split(",") for row in text.splitlines()], dtype=np.uint8)
    table = table[np.random.default_rng(_SPLIT_SEED).permutation(len(table))]
    images, labels = table[:, :64].reshape(-1, 8, 8, 1), table[:, 64]
    first, second = len(table) - 2 * _HELD_OUT, len(table) - _HELD_OUT
    return DataSet(
        train=labelled(images[:first], labels[:first]),
        validation=labelled(images[first:second], labels[first:second]),
        test=labelled(images[second:], labels[second:]),
        spec=DataSpec((8, 8, 1), "uint8", CLASSIFICATION, outputs=10, input_scale=1 / 16),
    )
