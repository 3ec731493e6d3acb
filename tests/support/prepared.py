"""Makes data sets that tensorflow-datasets prepares, with examples made here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets


class Made(tensorflow_datasets.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of images and labels; a subclass gives the form and the examples.

    `form` has the names and kinds of the features. tensorflow-datasets accepts a class name only
    once.
    """

    VERSION = tensorflow_datasets.core.Version("1.0.0")
    pkg_dir_path = Path(__file__).parent
    # This file has no checksums of downloads next to it.
    code_path = None
    form: ClassVar[dict[str, Any]]

    def _info(self) -> Any:
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=tensorflow_datasets.features.FeaturesDict(self.form),
            supervised_keys=("image", "label"),
        )

    def _generate_examples(self) -> None:
        raise AssertionError

    def _split_generators(self, manager: Any) -> dict[str, Iterator[dict[str, Any]]]:
        return {part: enumerate(examples) for part, examples in self.parts().items()}

    def parts(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Returns the examples of each split."""
        raise NotImplementedError
