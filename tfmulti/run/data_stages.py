"""Applies the transforms that a configuration asks for to loaded data, always in one order.

1. Each part is cached.
2. The parts are split, and a validation part is taken from the training part.
3. Means and categories are computed from the training part (`data_set.fitted`).
4. The images of the training part are augmented.
5. The examples of the training part are weighted by their classes.

The cache holds nothing that is random, because the augmentation is applied to what the cache gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfmulti.config.fit_config import FitConfig
from tfmulti.data.bad_records import check_lost
from tfmulti.data.data_set import DataSet, fitted
from tfmulti.data.loader import local_workers
from tfmulti.data.source import Source
from tfmulti.data.transforms import augmentation, class_weights
from tfmulti.data.transforms.cache import InMemory, cached, free_memory
from tfmulti.data.transforms.labels import read_labels
from tfmulti.data.transforms.splits import with_splits, with_validation
from tfmulti.errors import ConfigError, DataError


def prepared(data: DataSet, config: FitConfig) -> DataSet:
    """Returns the data with the transforms that a configuration asks for.

    Only the training part is augmented or weighted. A stream of GZIP files gets no transforms.

    Raises:
        UserError: the data cannot be split, cached, augmented or weighted as asked, or more
            examples than `skip_bad_records` could not be read when the data was loaded.
    """
    check_lost(data.lost, config.skip_bad_records)
    if data.finish is not None:
        _check_stream(config)
        return data
    if config.cache != "none":
        data = _with_cache(data, config.cache)
    splits = {
        "train": config.training_split,
        "validation": config.validation_split,
        "test": config.test_split,
    }
    data = with_splits(data, splits, config.seed)
    data = with_validation(data, config.validation_fraction, config.seed)
    data = fitted(data)
    if config.augment is not None:
        data = replace(data, train=_augmented(data.train, config))
    if config.class_weight is not None:
        data = replace(data, train=_weighted(data, config))
    return data


def _check_stream(config: FitConfig) -> None:
    """Raises ConfigError if the configuration has a transform, which a stream cannot have."""
    is_asked_for = {
        "cache": config.cache != "none",
        "training_split": config.training_split is not None,
        "validation_split": config.validation_split is not None,
        "test_split": config.test_split is not None,
        "augment": config.augment is not None,
        "class_weight": config.class_weight is not None,
    }
    for flag, is_given in is_asked_for.items():
        if is_given:
            raise ConfigError(
                f"--{flag} needs files that are read at random, but those of --dataset "
                f"{config.dataset} are GZIP files, which are streamed. gunzip them, or leave "
                f"--{flag} out."
            )


def _with_cache(data: DataSet, kind: str) -> DataSet:
    """Returns the data with each part cached.

    In memory all parts together take at most this worker's share of the free memory.
    """
    free_bytes = free_memory() // local_workers()

    def with_own_cache(source: Source) -> Source:
        """Returns a cached source, and subtracts the memory that it may take."""
        nonlocal free_bytes
        cached_source = cached(source, kind, free_bytes=free_bytes)
        if isinstance(cached_source, InMemory):
            free_bytes -= cached_source.most_bytes
        return cached_source

    parts: dict[str, Any] = {
        name: part.changed(with_own_cache) if isinstance(part, Source) else part
        for name, part in data.parts.items()
    }
    return replace(data, **parts)


def _augmented(train: Any, config: FitConfig) -> Source:
    """Returns the augmented training part; raises DataError if its examples are no images."""
    changes = augmentation.parse_changes(str(config.augment))
    if not isinstance(train, Source) or not augmentation.takes(train.specs):
        raise DataError(
            f"--augment {config.augment} needs images [height, width, 1 or 3], uint8 or float32; "
            f"--dataset {config.dataset} has others. Leave it out, or change the data yourself."
        )
    # The change is made below the split, so that the random numbers belong to the example and not
    # to its position in a part.
    return train.changed(lambda source: augmentation.Augmented(source, changes, config.seed))


def _weighted(data: DataSet, config: FitConfig) -> Source:
    """Returns the weighted training part; raises DataError if its classes cannot be known."""
    if not isinstance(data.train, Source):
        raise DataError(
            "--class_weight needs data with random access, not batches. Give each batch its "
            "weights: (x, y, sample_weight)."
        )
    weights = class_weights.parse_class_weight(str(config.class_weight))
    if weights is None:
        classes = data.spec.outputs if data.spec else 0
        labels = read_labels(data.train, skip_bad=config.skip_bad_records > 0)
        weights = class_weights.balanced(labels and labels.values, classes)
    return class_weights.Weighted(data.train, weights)
